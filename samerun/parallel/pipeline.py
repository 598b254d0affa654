"""Pipeline parallelism: each rank has some of the layers, and passes on what it has computed."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleLoopedBFS
from torch.distributed.pipelining.schedules import get_schedule_class

from samerun.config import Config
from samerun.data.batches import MicroBatch, collate, in_one_row, lengthen
from samerun.errors import UserError, as_user_error, require
from samerun.model.attention import DOCUMENTS
from samerun.model.build import vocabulary_size
from samerun.model.checks import is_same_loss, probe_loss, probe_row
from samerun.model.loss import StandIn, add_metrics, check_names, model_inputs, patched, place_of
from samerun.parallel.fsdp import before_backward
from samerun.parallel.layout import Layout


class PipelineSchedule:
    """The layers of this rank, and the order in which it computes with them.

    The ranks of a pipeline compute on several micro-batches at a time, each on another one: the accumulation keeps all
    of them busy.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config,
        accelerator: Accelerator,
        layout: Layout,
        groups: "PipelineGroups",
        loss_of: Callable,
    ):
        self.model, self.config, self.accelerator, self.groups = model, config, accelerator, groups
        self.layout, self.size, self.place = layout, layout.pp, layout.place("pp")
        self.accumulation = config.batch.accumulation
        self.count = self.size * config.model.chunks_per_rank()
        self.width, self.dtype = model.config.get_text_config().hidden_size, model.dtype
        chunks = divide_layers(model, self.count, loss_of, layout.setting("pp"))
        self.chunks = {number: chunk for number, chunk in enumerate(chunks) if number % self.size == self.place}
        keep_only(model, list(self.chunks.values()))
        self.schedules, self.metric_names = {}, {}
        self.holders: dict[str, int] | None = None  # The first rank of the pipeline that has a weight, by its name.

    def tied(self) -> torch.nn.Parameter | None:
        """The embedding, if it is the output layer as well and this rank has it. So have both ends of a pipeline."""
        is_at_an_end = self.place in (0, self.size - 1)
        return self.model.get_input_embeddings().weight if self.model.all_tied_weights_keys and is_at_an_end else None

    def run(
        self, model: torch.nn.Module, micro_batches: list[MicroBatch], scale: float | None
    ) -> dict[str, torch.Tensor]:
        """Forward passes of part_of() and, with a scale, backward passes. All ranks get the summed metrics."""
        is_training, metrics = scale is not None, {}
        factor = (scale or 0.0) * self.layout.averages_over  # FSDP2 averages over the ranks.
        for chunk in self.chunks.values():
            chunk.micro_batches, chunk.scale, chunk.metrics = micro_batches, factor, metrics
        if is_training and self.layout.is_sharded:
            model.set_requires_gradient_sync(self.accumulation != "deferred")
            before_backward(model, self.accumulation, is_last=False)
            for chunk in self.chunks.values():
                chunk.before_last_backward = functools.partial(self.average_from_now_on, model, chunk)
        numbers = torch.arange(len(micro_batches))
        schedule = self.schedule(len(micro_batches), micro_batches[0].length, is_training)
        with self.accelerator.autocast():
            work = schedule.step if is_training else schedule.eval
            try:
                work(number=numbers, target=numbers, return_outputs=False)
            except RuntimeError as error:
                if isinstance(error.__cause__, UserError):  # Raised by a chunk, and wrapped by torch.
                    raise error.__cause__ from None
                raise
        return self.share(metrics, is_training)

    def average_from_now_on(self, model: torch.nn.Module, chunk: "ModelChunk") -> None:
        """FSDP2 averages after a backward pass. In the last one of a chunk, that is the sum over all micro-steps."""
        for module in chunk.layers.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(True, recurse=False)
                before_backward(module, self.accumulation, is_last=True, recurse=False)
        if chunk is self.chunks[self.place]:  # A rank has the backward pass of its first layers last.
            before_backward(model, self.accumulation, is_last=True, recurse=False)
            model.set_requires_gradient_sync(True, recurse=False)  # What is in no layer, such as the embedding.

    def schedule(self, micro_steps: int, length: int, is_training: bool):
        """The order in which this rank computes on its part of micro-batches of this many tokens.

        It holds memory for what is passed on. That of the last call is kept, because full rows all have one length.
        """
        key, (known, schedule) = (micro_steps, length), self.schedules.get(is_training, (None, None))
        if key == known:
            return schedule
        states = torch.empty(1, length, self.width, dtype=self.dtype, device="meta", requires_grad=True)
        loss = torch.empty(1, device="meta", requires_grad=True)
        stages = []
        for number, chunk in self.chunks.items():
            given = () if chunk.is_first else states
            returned = loss if chunk.is_last else states
            device = self.accelerator.device
            stages.append(PipelineStage(chunk, number, self.count, device, given, returned, group=self.groups.ranks))
        kind, part = ScheduleLoopedBFS, stages  # Forward passes only, of one part of the model or several.
        if is_training:
            kind = get_schedule_class(self.config.model.pipeline_schedule)
            part = stages[0] if kind is Schedule1F1B else stages
        # The last chunk returns the loss. torch also wants a target, of which no use is made.
        schedule = kind(part, micro_steps, loss_fn=lambda loss, _: loss.sum(), scale_grads=False)
        self.schedules[is_training] = key, schedule
        return schedule

    def share(self, metrics: dict[str, torch.Tensor], is_training: bool) -> dict[str, torch.Tensor]:
        """The metrics of the last rank of a pipeline, for all of its ranks. Only the last one knows their names."""
        if is_training not in self.metric_names:
            names = [list(metrics)]
            dist.broadcast_object_list(names, group=self.groups.ranks, group_src=self.size - 1)
            self.metric_names[is_training] = names[0]
        zero = torch.zeros((), device=self.accelerator.device)
        names = self.metric_names[is_training]
        check_names(names, metrics or names)  # Those of the last rank.
        values = torch.stack([metrics.get(name, zero) for name in names])
        dist.all_reduce(values, group=self.groups.ranks)
        return dict(zip(names, values.unbind()))

    def pass_on(self, name: str, weight: torch.Tensor, dtype: torch.dtype, ranks: set[int]) -> torch.Tensor | None:
        """A weight that some ranks of the pipeline have, and others on the meta device, on the host of these ranks.

        Each pipeline has all weights, so none needs another.
        """
        if self.holders is None:
            own = [name for name, tensor in self.model.state_dict().items() if not tensor.is_meta]
            known = [None] * self.size
            dist.all_gather_object(known, own, group=self.groups.hosts)
            self.holders = {name: place for place in reversed(range(self.size)) for name in known[place]}
        # The number of pipelines, and the distance from one rank of a pipeline to the next.
        width = self.layout.processes // self.size
        wanted = {rank // width for rank in ranks if rank % width == self.layout.rank % width}
        holder = self.holders[name]
        if self.place == holder:
            weight = weight.cpu()
            for place in wanted - {holder}:
                dist.send(as_bytes(weight), group=self.groups.hosts, group_dst=place)
        elif self.place in wanted:
            weight = torch.empty(weight.shape, dtype=dtype)
            dist.recv(as_bytes(weight), group=self.groups.hosts, group_src=holder)
        return weight if self.place in wanted else None


class PipelineGroups:
    """The process groups of the pipeline that this rank is in. There may be several pipelines."""

    def __init__(self, ranks: dist.ProcessGroup, by_depth: torch.Tensor):
        """`by_depth`: [ranks of a pipeline, pipelines], from the first layers to the last."""
        self.ranks = ranks
        self.ends, _ = dist.new_subgroups_by_enumeration(by_depth[[0, -1]].T.tolist())  # The first and the last one.
        self.hosts, _ = dist.new_subgroups_by_enumeration(
            by_depth.T.tolist(), backend="gloo"
        )  # For what no GPU can hold.
        dist.barrier(group=ranks)  # NCCL makes a group at its first use, which should not be in a schedule.


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as gloo sends any type: a view of its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def same_length(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """What a pipeline passes on has one shape, and not many in a run."""
    micro_batches = [in_one_row(batch) for batch in micro_batches]
    longest = max(batch.length for batch in micro_batches)
    return [lengthen(batch, math.ceil(longest / 128) * 128) for batch in micro_batches]


class ModelChunk(torch.nn.Module):
    """Some neighbouring layers of a model: its own forward(), in which the other layers return what they are given."""

    def __init__(self, model: torch.nn.Module, layers: range, loss_of: Callable):
        super().__init__()
        self.model, self.numbers, self.loss_of, self.dtype = model, layers, loss_of, model.dtype
        decoder = model.get_decoder()
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(decoder.layers)
        others = StandIn(lambda states, *_, **__: states)
        kept = [layer if number in layers else others for number, layer in enumerate(decoder.layers)]
        self.layers = torch.nn.ModuleList(kept)
        self.micro_batches, self.scale, self.metrics = [], 1.0, {}
        self.states_of = states_of
        self.before_last_backward = lambda: None

    def forward(self, states: torch.Tensor | None = None, number: torch.Tensor | None = None) -> torch.Tensor:
        """The states after these layers, [1, tokens, width], or the loss, [1], of one of the micro-batches."""
        batch = self.micro_batches[int(number)]
        if not self.is_first:
            batch = replace(batch, input_ids=None, inputs_embeds=states)
        with patched(self.model.get_decoder(), "layers", self.layers):
            if self.is_last:
                loss, metrics = self.loss_of(self.model, batch)
                add_metrics(self.metrics, metrics)
                returned = loss[None] * self.scale
            else:
                returned = self.states_of(self.model, batch).to(self.dtype)
        is_last_pass = int(number) == len(self.micro_batches) - 1
        if is_last_pass and returned.requires_grad:
            returned.register_hook(lambda _: self.before_last_backward())
        return returned


def states_of(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """What the layers return, before the last norm and the logits."""
    found = []

    def keep(states: torch.Tensor) -> torch.Tensor:
        found.append(states)
        return states[:, :1]  # One token, so that the rest costs nothing. Its logits are not used.

    head = place_of(model.get_output_embeddings(), model)
    with patched(model.get_decoder(), last_norm(model), StandIn(keep)), patched(*head, StandIn(lambda states: states)):
        model(**model_inputs(model, batch))
    return found[0]


def last_norm(model: torch.nn.Module) -> str:
    """The name of the norm after the layers, the last part in transformers' plan of a pipeline."""
    return list(model.get_decoder()._pp_plan)[-1]


def divide_layers(model: torch.nn.Module, count: int, loss_of: Callable, setting: str) -> list[ModelChunk]:
    """The chunks of a pipeline. Raises UserError for a model that has no plan for them."""
    name, total = model.config.model_type, model.config.get_text_config().num_hidden_layers
    joins = model.config._attn_implementation == DOCUMENTS
    require(joins, f"{setting}: needs model.attention sdpa, and a model that works without padding; not {name}")
    is_planned = model.get_decoder()._pp_plan  # Its head may have a plan by itself.
    require(is_planned, f"{setting}: transformers has no plan how a {name} is divided")
    # The first chunks have one more, if any: so a rank with several chunks has at most one layer more than another.
    edges = [0, *itertools.accumulate(len(part) for part in np.array_split(range(total), count))]
    return [ModelChunk(model, range(low, high), loss_of) for low, high in itertools.pairwise(edges)]


def check_layers(model: torch.nn.Module, count: int, loss_of: Callable, setting: str) -> None:
    """Raises UserError for a model that computes something else in chunks."""
    name = model.config.model_type
    chunks = divide_layers(model, count, loss_of, setting)
    refusal = f"{setting}: a {name} computes another loss when its layers are divided"
    with as_user_error(refusal), torch.no_grad():
        row = probe_row(vocabulary_size(model), packed=True)
        batch = collate([row], model.device, joined=True)
        states, expected = None, probe_loss(model, [row], loss_of)
        for chunk in chunks:
            chunk.micro_batches = [batch]
            states = chunk(states, torch.tensor([0]))
        same = is_same_loss(model, states.item(), expected)
        alone = leaves_states_alone(model.train(), batch, loss_of)
    require(same, refusal)
    require(alone, f"{setting}: a {name} has dropout outside of its layers, which each rank would apply; set it to 0")


def leaves_states_alone(model: torch.nn.Module, batch: MicroBatch, loss_of: Callable) -> bool:
    """Whether forward() does nothing with states before and after the layers, such as the dropout of embeddings."""
    nothing = ModelChunk(model, range(1, 1), loss_of)
    nothing.micro_batches = [batch]
    states = torch.rand(*batch.input_ids.shape, model.config.get_text_config().hidden_size, dtype=model.dtype)
    return torch.equal(nothing(states, torch.tensor([0])), states)


def keep_only(model: torch.nn.Module, chunks: list[ModelChunk]) -> None:
    """Let go of the weights that these chunks do not use. On the meta device, they keep their names and shapes."""
    decoder = model.get_decoder()
    kept = {number for chunk in chunks for number in chunk.numbers}
    others = [layer for number, layer in enumerate(decoder.layers) if number not in kept]
    has_first, has_last = any(chunk.is_first for chunk in chunks), any(chunk.is_last for chunk in chunks)
    is_tied = bool(model.all_tied_weights_keys)
    if not has_first and not (has_last and is_tied):
        others.append(model.get_input_embeddings())
    if not has_last:
        others.append(decoder.get_submodule(last_norm(model)))
    if not has_last and not (has_first and is_tied):
        others.append(model.get_output_embeddings())
    for module in others:
        module.to("meta").requires_grad_(False)
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None and not has_last:  # The first rank has a tied output layer for its weight only.
        model.get_output_embeddings().bias = torch.nn.Parameter(bias.to("meta"), requires_grad=False)
