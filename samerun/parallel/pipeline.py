"""Pipeline parallelism: ranks share the layers."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleLoopedBFS
from torch.distributed.pipelining.schedules import get_schedule_class

from samerun.config import Config
from samerun.data.batches import MicroBatch, collate, lengthen
from samerun.errors import explained, require
from samerun.model.attention import DOCUMENTS
from samerun.model.build import vocabulary_size
from samerun.model.checks import is_same_loss, probe_loss, probe_row
from samerun.model.loss import StandIn, add_metrics, model_inputs, place_of, replaced
from samerun.parallel.base import DDP, Division, Sharded
from samerun.parallel.fsdp import check_sharding, shard_layers, sharded_division
from samerun.parallel.mesh import ranks_per_row, tensor_parallel_size
from samerun.parallel.state import full, local, train_instead


class Pipeline(DDP):
    """Pipeline parallelism: each rank of a group has some of the layers, and passes on what it has computed.

    A group computes on several micro-batches at a time, each of its ranks on another one: the accumulation keeps all of
    them busy. Groups with rows of their own add up their gradients after the last micro-step.
    """

    def __init__(self, config: Config, accelerator: Accelerator, loss_of: Callable):
        super().__init__(config, accelerator, loss_of)
        self.size = config.model.pipeline_ranks
        self.setting = f"model.pipeline_ranks {self.size}"
        self.data_parallel_size = accelerator.num_processes // self.size
        # Ranks that add up gradients are neighbours, so that they are on one machine. Less goes through a pipeline.
        self.place, self.data_parallel_rank = divmod(accelerator.process_index, max(1, self.data_parallel_size))
        self.evaluates_at_a_time = 4 * self.size  # So that each rank waits for at most a fifth of the time.
        self.schedules = {}
        self.metric_names = {}

    def check(self) -> None:
        super().check()
        processes, model = self.accelerator.num_processes, self.config.model
        require(processes % self.size == 0, f"{self.setting}: does not divide the {processes} processes")
        alone = ranks_per_row() * tensor_parallel_size() == 1
        require(alone, f"{self.setting}: cannot be combined with sequence, context or tensor parallelism")
        require(model.lora is None, f"{self.setting}: cannot be combined with model.lora")
        require(model.compile != "full", f"{self.setting}: cannot be combined with model.compile full; use regional")
        is_float8 = self.accelerator.mixed_precision == "fp8"
        require(not is_float8, f"{self.setting}: cannot be combined with mixed_precision fp8; use bf16, or no")
        is_number = self.config.batch.max_micro_batch_size != "auto"
        require(is_number, f"{self.setting}: batch.max_micro_batch_size must be a number; auto tries whole models")
        require(not self.config.eval.prompts, f"{self.setting}: cannot be combined with eval.prompts")

    def division(self) -> Division:
        return Division(layers=self.size)

    def prepare(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> torch.nn.Module:
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.count = self.size * self.config.model.chunks_per_rank()
        self.width, self.dtype = model.config.get_text_config().hidden_size, model.dtype
        chunks = divide_layers(model, self.count, self.loss_of, self.setting)
        self.make_groups()
        self.chunks = {number: chunk for number, chunk in enumerate(chunks) if number % self.size == self.place}
        keep_only(model, list(self.chunks.values()))
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.accelerator.device))
        self.shard_over_groups(model)
        train_instead(optimizers, names, model)
        self.has_last = self.place == self.size - 1
        is_at_an_end = self.place == 0 or self.has_last
        self.tied = model.get_input_embeddings().weight if model.all_tied_weights_keys and is_at_an_end else None
        return model

    def shard_over_groups(self, model: torch.nn.Module) -> None:
        """Each rank has its layers as a whole."""

    def make_groups(self) -> None:
        """The ranks of a pipeline, those with the same layers, and the first and last one of a pipeline."""
        device = self.accelerator.device.type
        sizes, names = (self.size, self.data_parallel_size), ("pipeline", "data")
        self.meshes = init_device_mesh(device, sizes, mesh_dim_names=names)
        self.ranks = self.meshes.get_group("pipeline")
        last = (self.size - 1) * self.data_parallel_size
        ends = [[number, number + last] for number in range(self.data_parallel_size)]
        self.ends, _ = dist.new_subgroups_by_enumeration(ends)
        pipelines = self.meshes.mesh.T.tolist()
        self.hosts, _ = dist.new_subgroups_by_enumeration(pipelines, backend="gloo")  # To gather what no GPU can hold.
        dist.barrier(group=self.ranks)  # NCCL makes a group at its first use, which should not be in a schedule.

    def forward_backward(
        self, model: torch.nn.Module, micro_batches: list[MicroBatch], scale: float
    ) -> dict[str, torch.Tensor]:
        metrics = self.run(micro_batches, scale)
        self.add_up_replicas(model)
        if self.tied is not None:
            dist.all_reduce(local(self.tied.grad), group=self.ends)
        return metrics

    def add_up_replicas(self, model: torch.nn.Module) -> None:
        """The gradients of the ranks that have the same layers, and other rows."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # Such as an expert that no token of this rank has chosen.
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self.meshes.get_group("data"))

    def evaluate(self, model: torch.nn.Module, micro_batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
        return self.run(micro_batches, scale=None)

    def run(self, micro_batches: list[MicroBatch], scale: float | None) -> dict[str, torch.Tensor]:
        """Forward passes and, with a scale, backward passes. All ranks of a pipeline get the summed metrics."""
        longest = max(batch.length for batch in micro_batches)  # What is passed on has one shape,
        length = math.ceil(longest / 128) * 128  # and not many in a run.
        micro_batches = [lengthen(batch, length) for batch in micro_batches]
        metrics = {}
        for chunk in self.chunks.values():
            chunk.micro_batches, chunk.scale, chunk.metrics = micro_batches, scale or 0.0, metrics
        numbers = torch.arange(len(micro_batches))
        is_training = scale is not None
        schedule = self.schedule(len(micro_batches), length, is_training)
        with self.accelerator.autocast():
            work = schedule.step if is_training else schedule.eval
            work(number=numbers, target=numbers, return_outputs=False)
        return self.share(metrics, is_training)

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
            stages.append(PipelineStage(chunk, number, self.count, device, given, returned, group=self.ranks))
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
            dist.broadcast_object_list(names, group=self.ranks, group_src=self.size - 1)
            self.metric_names[is_training] = names[0]
        zero = torch.zeros((), device=self.accelerator.device)
        names = self.metric_names[is_training]
        values = torch.stack([metrics.get(name, zero) for name in names])
        dist.all_reduce(values, group=self.ranks)
        return dict(zip(names, values.unbind()))

    def sum_over_ranks(self, metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # The ranks of a pipeline have the same values. To sum over all makes sure that the bits are the same, too.
        return {name: total / self.size for name, total in super().sum_over_ranks(metrics).items()}

    def clip_gradients(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        once = [parameter for parameter in parameters if not (self.has_last and parameter is self.tied)]
        square = full(torch.nn.utils.get_total_norm([one.grad for one in once if one.grad is not None])) ** 2
        dist.all_reduce(square)  # Over all ranks, so that all pipelines clip by the same bits.
        norm = (square / self.data_parallel_size).sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.optim.max_grad_norm or math.inf, norm)
        return norm

    def gather_weights(self, bare: torch.nn.Module) -> dict[str, torch.Tensor]:
        weights = {name: full(value.detach()).cpu() for name, value in bare.named_parameters() if not value.is_meta}
        parts = [None] * self.size
        if self.data_parallel_rank == 0:
            dist.gather_object(weights, parts if self.place == 0 else None, group=self.hosts, group_dst=0)
        if self.accelerator.is_main_process:
            weights = {name: value for part in parts for name, value in part.items()}
        return weights

    def zero_gradients(self, optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()


class PipelineFSDP2(Pipeline, Sharded):
    """FSDP2 shards the layers of a rank among all ranks that have them."""

    def check(self) -> None:
        super().check()
        check_sharding(self.setting, self.accelerator)

    def division(self) -> Division:
        return replace(sharded_division(self, self.data_parallel_size), layers=self.size)

    def shard_over_groups(self, model: torch.nn.Module) -> None:
        shard_layers(model, self.meshes["data"], self.accelerator)

    def forward_backward(
        self, model: torch.nn.Module, micro_batches: list[MicroBatch], scale: float
    ) -> dict[str, torch.Tensor]:
        model.set_requires_gradient_sync(self.config.batch.sync_each_micro_step)
        for chunk in self.chunks.values():
            chunk.before_last_backward = functools.partial(self.average_from_now_on, model, chunk)
        return super().forward_backward(model, micro_batches, scale * self.data_parallel_size)  # FSDP2 averages.

    def average_from_now_on(self, model: torch.nn.Module, chunk: "ModelChunk") -> None:
        """FSDP2 averages after a backward pass. In the last one of a chunk, that is the sum over all micro-steps."""
        for module in chunk.layers.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(True)
        if chunk is self.chunks[self.place]:  # A rank has the backward pass of its first layers last.
            model.set_requires_gradient_sync(True, recurse=False)  # What is in no layer, such as the embedding.

    def add_up_replicas(self, model: torch.nn.Module) -> None:
        """Nothing is left to do: FSDP2 has averaged the gradients."""


class ModelChunk(torch.nn.Module):
    """Some neighbouring layers of a model: its own forward(), in which the other layers return what they are given."""

    def __init__(self, bare: torch.nn.Module, layers: range, loss_of: Callable):
        super().__init__()
        self.bare, self.numbers, self.loss_of, self.dtype = bare, layers, loss_of, bare.dtype
        decoder = bare.get_decoder()
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(decoder.layers)
        others = StandIn(lambda states, *_, **__: states)
        kept = [layer if number in layers else others for number, layer in enumerate(decoder.layers)]
        self.layers = torch.nn.ModuleList(kept)
        self.micro_batches, self.scale, self.metrics = [], 1.0, {}
        self.before_last_backward = lambda: None

    def forward(self, states: torch.Tensor | None = None, number: torch.Tensor | None = None) -> torch.Tensor:
        """The states after these layers, [1, tokens, width], or the loss, [1], of one of the micro-batches."""
        batch = self.micro_batches[int(number)]
        if not self.is_first:
            batch = replace(batch, input_ids=None, inputs_embeds=states)
        with replaced(self.bare.get_decoder(), "layers", self.layers):
            if self.is_last:
                loss, metrics = self.loss_of(self.bare, batch)
                add_metrics(self.metrics, metrics)
                returned = loss[None] * self.scale
            else:
                returned = states_of(self.bare, batch).to(self.dtype)
        is_last_pass = int(number) == len(self.micro_batches) - 1
        if is_last_pass and returned.requires_grad:
            returned.register_hook(lambda _: self.before_last_backward())
        return returned


def states_of(bare: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """What the layers return, before the last norm and the logits."""
    found = []

    def keep(states: torch.Tensor) -> torch.Tensor:
        found.append(states)
        return states[:, :1]  # One token, so that the rest costs nothing. Its logits are not used.

    head = place_of(bare.get_output_embeddings(), bare)
    with replaced(bare.get_decoder(), last_norm(bare), StandIn(keep)), replaced(*head, StandIn(lambda states: states)):
        bare(**model_inputs(bare, batch))
    return found[0]


def last_norm(bare: torch.nn.Module) -> str:
    """The name of the norm after the layers, the last part in transformers' plan of a pipeline."""
    return list(bare.get_decoder()._pp_plan)[-1]


def divide_layers(bare: torch.nn.Module, count: int, loss_of: Callable, setting: str) -> list[ModelChunk]:
    """The chunks of a pipeline. Raises UserError for a model that computes another loss with them."""
    name, total = bare.config.model_type, bare.config.get_text_config().num_hidden_layers
    joins = bare.config._attn_implementation == DOCUMENTS
    require(joins, f"{setting}: needs model.attention sdpa, and a model that works without padding; not {name}")
    require(bare.supports_pp_plan, f"{setting}: transformers has no plan how a {name} is divided")
    require(count <= total, f"{setting}: the {total} layers cannot be divided among {count} stages")
    saved = bare.state_dict().keys() - dict(bare.named_parameters(remove_duplicate=False)).keys()
    require(not saved, f"{setting}: a {name} has {min(saved, default='')}, which is no weight and belongs to no rank")
    edges = np.linspace(0, total, count + 1).round().astype(int)
    refusal = f"{setting}: a {name} computes another loss when its layers are divided"
    with explained(refusal), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        chunks = [ModelChunk(bare, range(low, high), loss_of) for low, high in itertools.pairwise(edges.tolist())]
        row = probe_row(vocabulary_size(bare), packed=True)
        batch = collate([row], bare.device, joined=True)
        states, expected = None, probe_loss(bare, [row], loss_of)
        for chunk in chunks:
            chunk.micro_batches = [batch]
            states = chunk(states, torch.tensor([0]))
        same, alone = is_same_loss(bare, states.item(), expected), leaves_states_alone(bare.train(), batch, loss_of)
    require(same, refusal)
    require(alone, f"{setting}: a {name} has dropout outside of its layers, which each rank would apply; set it to 0")
    return chunks


def leaves_states_alone(bare: torch.nn.Module, batch: MicroBatch, loss_of: Callable) -> bool:
    """Whether forward() does nothing with states before and after the layers, such as the dropout of embeddings."""
    nothing = ModelChunk(bare, range(1, 1), loss_of)
    nothing.micro_batches = [batch]
    states = torch.rand(*batch.input_ids.shape, bare.config.get_text_config().hidden_size, dtype=bare.dtype)
    return torch.equal(nothing(states, torch.tensor([0])), states)


def keep_only(bare: torch.nn.Module, chunks: list[ModelChunk]) -> None:
    """Let go of the weights that these chunks do not use. On the meta device, they keep their names and shapes."""
    decoder = bare.get_decoder()
    kept = {number for chunk in chunks for number in chunk.numbers}
    others = [layer for number, layer in enumerate(decoder.layers) if number not in kept]
    has_first, has_last = any(chunk.is_first for chunk in chunks), any(chunk.is_last for chunk in chunks)
    is_tied = bool(bare.all_tied_weights_keys)
    if not has_first and not (has_last and is_tied):
        others.append(bare.get_input_embeddings())
    if not has_last:
        others.append(decoder.get_submodule(last_norm(bare)))
    if not has_last and not (has_first and is_tied):
        others.append(bare.get_output_embeddings())
    for module in others:
        module.to("meta").requires_grad_(False)
