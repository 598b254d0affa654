"""How the ranks share the work of a step: who computes what, the sums of gradients, their norm, and clipping.

The ranks form any product of the dimensions of Layout, each of which has a module of its own.

DDP, FSDP2 and HSDP, also with rows that ranks share, are wrapped by Accelerate. As soon as ranks have other weights for
another reason than FSDP2, the model is divided here, in one fixed order: layers (pp), experts (ep), matrices (tp), and
FSDP2 of what is left. To remove a dimension, delete its module and the lines that name it.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from samerun.config import Config
from samerun.data.batches import MicroBatch, RowRanks, collate
from samerun.errors import as_user_error, is_main_process, require
from samerun.model.balance import ExpertBalance, add_to_loss, add_to_states
from samerun.model.build import vocabulary_size
from samerun.model.checks import probe_batch, probe_row
from samerun.model.loss import add_metrics, check_names, patched
from samerun.model.outline import let_go
from samerun.model.recompute import recompute_layers
from samerun.model.small import small_model
from samerun.model.weights import empty_weights, fill_weights, placeholders_on_meta
from samerun.optim import Guard, LossScale
from samerun.parallel.experts import check_experts, divide_experts, shard_experts
from samerun.parallel.fsdp import (
    before_backward,
    names_of_layers,
    precision_policy,
    shard_layers,
    sharding_options,
    whole_embeddings,
)
from samerun.parallel.layout import Layout, check_combination, check_layers_and_heads
from samerun.parallel.pipeline import PipelineGroups, PipelineSchedule, check_layers, same_length
from samerun.parallel.probe import first_difference, try_out_whole
from samerun.parallel.rows import check_shared_rows, part_of_row
from samerun.parallel.state import full_tensor, local_tensor, retarget, shards_of, trained_state
from samerun.parallel.tensor import divide_matrices, with_few_lengths


class Parallelism:
    """One step of training on all ranks: what this one computes, and what they send each other."""

    def __init__(self, config: Config, accelerator: Accelerator, layout: Layout, loss_of: Callable):
        self.config, self.accelerator, self.layout = config, accelerator, layout
        self.loss_of = loss_of  # compute_loss() with the loss and the settings of this run.
        self.plugin = getattr(accelerator.state, "fsdp_plugin", None)
        # Ranks with another number draw another dropout. What is whole must drop out alike on all ranks of tp.
        self.dropout_rank = layout.rank // layout.tp
        self.evaluates_at_a_time = 4 * layout.pp if layout.pp > 1 else 1  # Each rank waits for at most a fifth.
        self.row_ranks: RowRanks | None = None  # Those that share rows with this one.
        self.pipeline: PipelineSchedule | None = None
        # Gradients that neither DDP nor FSDP2 adds up, each with its ranks, see note_reductions(), and a weight that
        # a rank before this one counts in the norm.
        self.owed: list[tuple[list[torch.nn.Parameter], dist.ProcessGroup]] = []
        self.counted_elsewhere: torch.nn.Parameter | None = None
        self.loss_scale = LossScale(accelerator.mixed_precision, layout.averages_over)
        self.balance: ExpertBalance | None = None  # With model.balance_experts or balance_loss.
        self.names_of_metrics: dict[str, list[str]] = {}  # See sum_over_ranks().

    @property
    def passes(self) -> Callable | None:
        """What takes the place of accumulate(): of a model, the micro-batches of part_of() and a scale."""
        return self.pipeline.run if self.pipeline else None

    # Before the first step --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises UserError for settings that cannot be combined with the layout."""
        check_combination(self.layout, self.config, self.accelerator.mixed_precision, self.plugin)

    def prepare(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], forward_backward: Callable
    ) -> torch.nn.Module:
        """The model as this rank has it. Afterwards the optimizers train its parameters.

        It is divided while it has placeholders for weights, and each rank fills in what it keeps, so none need be sent.
        Accelerate's wrappers around the optimizers are not used: Guard decides whether they make an update.
        `forward_backward` is that of train.py, by which a divided model is tried.
        """
        model.loss_scale = self.loss_scale  # For gradients that a loss computes before the backward pass.
        check_divisible(model, self.config, self.layout)
        check_layers_and_heads(self.layout, self.config, model.config)
        self.make_groups()
        if self.config.model.balance_experts or self.config.model.balance_loss:
            self.balance = ExpertBalance(model, self.config.model, self.accelerator.device)
            self.loss_of = self.balance.counting(self.loss_of, add_to_loss)
        if self.layout.row_ranks > 1:
            self.try_out_parts(model)
        if self.config.batch.accumulation == "kept_weights":
            self.plugin.reshard_after_forward = False
        if not self.layout.is_divided:
            return self.prepare_by_accelerate(model, optimizers)
        if self.layout.ep > 1:
            check_experts(model, self.layout.ep, self.layout.setting("ep"))
        if self.layout.is_sharded and self.plugin.activation_checkpointing:
            # Accelerate does it in prepare(), which is not called here.
            recompute_layers(model, "launch: fsdp_activation_checkpointing")
        self.try_out(model, forward_backward)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.divide(model)
        retarget(optimizers, names, model)
        fill_weights(model, self.accelerator.device)
        return model.train()

    def prepare_by_accelerate(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> torch.nn.Module:
        """DDP, FSDP2 or a single device."""
        if not self.layout.is_sharded:
            fill_weights(model, self.accelerator.device)
            wrapped, *_ = self.accelerator.prepare(model, *optimizers)
            return wrapped
        self.plugin.mixed_precision_policy = precision_policy(self.accelerator)
        if self.plugin.transformer_cls_names_to_wrap is None:
            self.plugin.transformer_cls_names_to_wrap = names_of_layers(model)
        with whole_embeddings(model):
            wrapped, *_ = self.accelerator.prepare(model, *optimizers)
        fill_weights(model, self.accelerator.device)  # After Accelerate has sharded their placeholders.
        return wrapped

    def make_groups(self) -> None:
        """Views of all ranks as a mesh: of those that share rows, weights, or experts."""
        layout, device = self.layout, self.accelerator.device.type

        def view(**sizes: int) -> DeviceMesh:
            return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

        if layout.row_ranks > 1:
            others = layout.processes // (layout.row_ranks * layout.tp)
            self.row_ranks = RowRanks(view(others=others, rows=layout.row_ranks, tp=layout.tp)["rows"].get_group())
        if not layout.is_divided:
            return
        # The ranks of "data" compute on other tokens. Among them, FSDP2 shards and averages, or gradients are added up.
        copies = layout.dp_replicate if layout.is_sharded else 1
        data = layout.size(*layout.DATA) // copies
        self.mesh = view(pp=layout.pp, dp_replicate=copies, data=data, tp=layout.tp)
        if layout.ep > 1:
            self.expert_mesh = view(
                pp=layout.pp, dp_replicate=copies, efsdp=data * layout.tp // layout.ep, ep=layout.ep
            )
        if layout.pp > 1:
            self.pipeline_groups = PipelineGroups(self.mesh["pp"].get_group(), self.mesh.mesh.reshape(layout.pp, -1))

    def divide(self, model: torch.nn.Module) -> None:
        """Leave of a model what this rank computes, on its device."""
        layout, experts, partial = self.layout, [], []
        if layout.pp > 1:  # 1. The layers of this rank. The others stay as names and shapes, on the meta device.
            self.pipeline = PipelineSchedule(
                model, self.config, self.accelerator, layout, self.pipeline_groups, self.loss_of
            )
            if self.balance:
                for chunk in self.pipeline.chunks.values():
                    chunk.states_of = self.balance.counting(chunk.states_of, add_to_states(chunk))
        own = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
        waiting = placeholders_on_meta(model)
        if layout.ep > 1:  # 2. The experts of this rank, before its matrices: a plan for tp may name them, too.
            with as_user_error(
                f"{layout.setting('ep')}: the experts of this {model.config.model_type} cannot be divided"
            ):
                experts = divide_experts(model, self.expert_mesh["ep"], self.mesh["tp"], own)
        if layout.tp > 1:  # 3. The parts of their matrices.
            partial = divide_matrices(model, self.mesh["tp"], layout.setting("tp"), own, done=experts)
        empty_weights(model, None, waiting)
        model._apply(lambda tensor: tensor if self.is_moved_later(tensor) else tensor.to(self.accelerator.device))
        if layout.is_sharded:  # 4. FSDP2 of what is left.
            options = sharding_options(self.accelerator)
            if experts:
                shard_experts(model, experts, self.expert_mesh, layout, options)
            among = self.mesh["dp_replicate", "data"] if layout.dp_replicate > 1 else self.mesh["data"]
            shard_layers(model, among, options)
        self.note_reductions(model, partial)

    def is_moved_later(self, tensor: torch.Tensor) -> bool:
        """Whether this rank has none of it, or FSDP2 moves it later, with its layer: not all of them at once."""
        return tensor.is_meta or (self.layout.is_sharded and not isinstance(tensor, DTensor))

    def note_reductions(self, model: torch.nn.Module, partial: list[str]) -> None:
        """Which gradients are to be added up after the last micro-step, and over which ranks."""
        self.owed, self.counted_elsewhere = [], None
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.layout.is_sharded and self.mesh["data"].size() > 1:  # DDP takes neither DTensors nor pipelines.
            self.owed.append((trained, self.mesh["data"].get_group()))
        if partial:  # Each rank has the gradient of its own heads.
            self.owed.append(([model.get_parameter(name) for name in partial], self.mesh["tp"].get_group()))
        tied = self.pipeline.tied() if self.pipeline else None
        if tied is not None:  # Both ends of a pipeline have it, and the first one counts it.
            self.owed.append(([tied], self.pipeline_groups.ends))
            self.counted_elsewhere = None if self.layout.place("pp") == 0 else tied

    def try_out(self, model: torch.nn.Module, forward_backward: Callable) -> None:
        """Raises UserError if a small model of this kind, divided, does not compute what it computes as a whole.

        That is a pass of the real step, in float32: all hooks, schedules and sums over ranks take part in it. Only
        activations are not computed again.
        """
        layout, kind = self.layout, model.config.model_type
        chunks = layout.pp * self.config.model.chunks_per_rank() if layout.pp > 1 else 1
        small = small_model(model, self.config.model, chunks, self.accelerator.device)
        if layout.pp > 1:
            check_layers(small, chunks, self.loss_of, layout.setting("pp"))
            small.eval()
        with as_user_error(f"launch: divided as {layout}, the first try of a small model, on a few tokens, fails"):
            whole = [try_out_whole(small, self.loss_of) if is_main_process() else None]
        broadcast_object_list(whole)
        with patched(self.accelerator, "native_amp", False):  # In float32, under FSDP2, too.
            self.divide(small)
            fails = f"launch: divided as {layout}, no pass of this {kind} works; take FSDP2"
            if layout.tp > 1:
                fails = f"{layout.setting('tp')}: must divide the attention heads and the key heads of this {kind}"
            with as_user_error(fails):
                divided = self.try_out_divided(small, forward_backward)
        other = first_difference(whole[0], divided)
        require(not other, f"launch: divided as {layout}, a {kind} computes another {other}; take FSDP2")

    def try_out_divided(self, model: torch.nn.Module, forward_backward: Callable) -> dict[str, float]:
        """try_out_whole(), of the divided model."""
        batch = probe_batch(model, self.accelerator.device)
        copies = self.layout.data_parallel_size * self.layout.pp  # All ranks compute on one row, as often as it needs.
        metrics = forward_backward(self, model, [batch] * self.layout.pp, 1 / copies)
        found = {"loss": self.sum_over_ranks(metrics)["loss"].item() / copies}
        for name, parameter in model.named_parameters():
            if not parameter.is_meta and parameter.grad is not None:
                found[f"gradient of {name}"] = full_tensor(parameter.grad.norm()).item()
        found["gradient norm"] = self.clip_gradients(list(model.parameters())).item()
        model.zero_grad()
        if self.pipeline:
            parts = [None] * self.layout.pp
            dist.all_gather_object(parts, found, group=self.pipeline_groups.hosts)
            found = {name: value for part in parts for name, value in part.items()}
        return found

    @torch.no_grad()
    def try_out_parts(self, model: torch.nn.Module) -> None:
        """Raises UserError if the losses of the parts of a row, of which each rank has one, are not that of the row.

        They are not if a loss relates tokens to each other: no rank has all of them.
        """
        setting = self.layout.setting("cp" if self.layout.cp > 1 else "sp")
        small = small_model(model, self.config.model, 1, self.accelerator.device)
        # Documents that are cut: several ranks have some of each.
        row = probe_row(vocabulary_size(small), packed=True, lengths=(3, 5))
        batch = collate([row], self.accelerator.device, joined=True)
        fails = as_user_error(f"{setting}: a pass over a part of a row fails")
        with fails:  # In float32: this is outside of autocast.
            whole, _ = self.loss_of(small, batch)
            own, _ = self.loss_of(small, *self.part_of([batch]))
        let_go(small)
        parts = self.sum_over_ranks({"loss": own})["loss"].item() / self.layout.data_parallel_size
        same = math.isclose(parts, whole.item(), rel_tol=1e-4)
        refusal = f"{setting}: the losses of the parts of a row that ranks share do not add up to that of the row"
        require(same, f"{refusal}; take FSDP2")

    # The step ---------------------------------------------------------------------------------------------------------

    def part_of(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """What this rank computes of micro-batches of collate(): its tokens, and as many as its pipeline passes on."""
        layout = self.layout
        if layout.pp > 1:
            micro_batches = same_length(micro_batches)
        if layout.tp > 1:
            micro_batches = with_few_lengths(micro_batches)
        if layout.row_ranks > 1:
            number = layout.place("cp", "sp")
            micro_batches = [part_of_row(batch, layout, number, self.row_ranks) for batch in micro_batches]
        return micro_batches

    def autocast(self) -> AbstractContextManager:
        """Accelerate's autocast, which takes 50 µs even where there is nothing to cast."""
        return self.accelerator.autocast() if self.accelerator.native_amp else nullcontext()

    def before_micro_step(self, model: torch.nn.Module, is_last: bool) -> None:
        """What FSDP2 keeps or reduces differently than in the last micro-step."""
        if self.layout.is_sharded:
            before_backward(model, self.config.batch.accumulation, is_last)

    def reduce_gradients(self, model: torch.nn.Module) -> None:
        """Add up what neither DDP nor FSDP2 has, after the last micro-step."""
        if self.layout.is_divided and not self.layout.is_sharded:  # FSDP2 divides gradients as it does weights.
            for parameter in model.parameters():
                # An embedding of which each rank has some rows gets the gradient of all of them.
                if isinstance(parameter.grad, DTensor):
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        for parameters, group in self.owed:
            for parameter in parameters:
                if parameter.grad is None:  # Such as an expert that no token of this rank has chosen.
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local_tensor(parameter.grad), group=group)
        if self.balance:
            self.balance.take_load(is_alone=self.layout.processes == 1)

    def balance_experts(self, guard: Guard) -> None:
        """After an update, what model.balance_experts and balance_loss ask for."""
        if self.balance:
            self.balance.update(is_skipped=guard.skipped_in_a_row > 0)

    def expert_metrics(self) -> dict[str, float]:
        return self.balance.metrics() if self.balance else {}

    def expert_load(self) -> list[list[int]] | None:
        """What a continued run must know of the steps before, with model.balance_loss: [layers, experts]."""
        return self.balance.load_before.tolist() if self.balance and self.balance.weight else None

    def continue_expert_load(self, load: list[list[int]] | None) -> None:
        if self.balance and load:
            self.balance.load_before = torch.tensor(load, device=self.accelerator.device)

    def metrics_of(self, model: torch.nn.Module, micro_batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
        """The metrics of token_loss(), summed over micro-batches of part_of()."""
        if self.pipeline:
            return self.pipeline.run(model, micro_batches, scale=None)
        metrics = {}
        for batch in micro_batches:
            with self.autocast():
                _, metrics_of_batch = self.loss_of(model, batch)
            add_metrics(metrics, metrics_of_batch)
        return metrics

    def sum_over_ranks(self, metrics: dict[str, torch.Tensor], of: str = "") -> dict[str, torch.Tensor]:
        """Add up the values of the ranks. All of them get the same sums, to the bit.

        Raises UserError unless all sums `of` the same thing, such as the steps, have the same names on all ranks.
        """
        if of in self.names_of_metrics:
            check_names(self.names_of_metrics[of], metrics)
        elif of:
            self.names_of_metrics[of] = list(metrics)
            for names in gather_object([list(metrics)]):
                check_names(metrics, names)
        if self.layout.processes == 1:
            return metrics
        names = sorted(metrics)  # Each rank may have met them in another order.
        values = torch.stack([metrics[name] for name in names])
        dist.all_reduce(values)
        alike = self.layout.size("pp", "tp")  # Ranks that have the same values.
        sums = dict(zip(names, values.unbind()))
        return {name: sums[name] / alike for name in metrics}

    def clip_gradients(self, parameters: list[torch.nn.Parameter], factor: float = 1.0) -> torch.Tensor:
        """Multiply the gradients by a factor, and clip them.

        Returns their norm before they are clipped, a plain tensor that is the same on all ranks.
        """
        gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if factor != 1 and gradients:
            torch._foreach_mul_(gradients, factor)
        norm, limit = self.norm_of_gradients(parameters), self.config.optim.max_grad_norm
        if limit and gradients:
            share = (limit / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, share.to(gradients[0].device))
        return norm

    def norm_of_gradients(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        """Of some parameters, a plain tensor that is the same on all ranks. All of them call it, also without any.

        A rank adds up the squares of what it has. What several ranks have counts by its share on each of them.
        """
        layout, kinds = self.layout, {}
        if not (layout.is_sharded or layout.is_divided):  # All ranks have the same gradients.
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            return torch.nn.utils.get_total_norm(gradients).to(self.accelerator.device, torch.float32)
        for parameter in parameters:
            if parameter.grad is not None and parameter is not self.counted_elsewhere:
                kinds.setdefault(shards_of(parameter.grad), []).append(local_tensor(parameter.grad))
        square = torch.zeros((), device=self.accelerator.device)
        for shards, gradients in kinds.items():
            square += torch.nn.utils.get_total_norm(gradients) ** 2 * shards
        dist.all_reduce(square)
        return (square * layout.pp / layout.processes).sqrt()

    def forget_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        if not self.layout.has_buckets:
            for parameter in parameters:
                parameter.grad = None
            return
        # The gradients of DDP are views of its buckets, which stay (gradient_as_bucket_view in start_accelerator()).
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)

    # Checkpoints and the export ---------------------------------------------------------------------------------------

    def state_to_save(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, and what it is loaded into."""
        return trained_state(model, optimizers)

    def load_state(
        self, state: dict[str, torch.Tensor], model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        """Called when a checkpoint was loaded into state(), which here is the model and the optimizers themselves."""

    def weights_to_export(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Weights and saved buffers by their names, the same on all ranks, as this one has them. Tied ones are there
        once: from_pretrained() ties them again."""
        if self.pipeline:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # An evaluation may have left weights that are gathered, in bf16.
            weights = model.state_dict()
        else:
            weights = get_model_state_dict(model, options=StateDictOptions())
        return {name: weight for name, weight in weights.items() if name not in model.all_tied_weights_keys}

    def gather_weight(
        self, name: str, weight: torch.Tensor, dtype: torch.dtype, ranks: set[int]
    ) -> torch.Tensor | None:
        """One of weights_to_export(), whole and on the host, on these ranks. All ranks must call it."""
        whole = None
        if self.layout.rank in ranks or isinstance(weight, DTensor) or self.pipeline:
            whole = weight if weight.is_meta else full_tensor(weight.detach().to(dtype))
        if self.pipeline:
            return self.pipeline.pass_on(name, whole, dtype, ranks)
        return whole.cpu() if self.layout.rank in ranks else None


def check_divisible(model: torch.nn.Module, config: Config, layout: Layout) -> None:
    """Raises UserError for a model that cannot be divided, as far as that is known without a try."""
    if layout.tp > 1:
        kind, setting = model.config.model_type, layout.setting("tp")
        require(model.tp_plan, f"{setting}: transformers has no plan how ranks share a {kind}; take FSDP2")
    if layout.row_ranks > 1:
        check_shared_rows(model, config, layout)
