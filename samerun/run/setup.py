"""What a launch has built before its first step, and whether it fits together."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import memory
from torch.utils._pytree import tree_leaves

from samerun.config import Config, rows_per_block
from samerun.data.batches import MicroBatch, StepBatch, collate, load_step, targets_of
from samerun.data.mixture import Mixture
from samerun.data.rows import Dataset, check_token_ids, longest_row
from samerun.dotted import eval_setting
from samerun.errors import as_user_error, require, say
from samerun.model.checks import is_same_loss, probe_row, states_of_chance
from samerun.model.loss import joins_documents, patched
from samerun.model.token_bytes import TokenBytes
from samerun.optim import BEYOND_FP16
from samerun.parallel.mesh import Parallelism
from samerun.parallel.state import trained_state
from samerun.plan import Plan, Stage, check_length
from samerun.run.checkpoint import Progress
from samerun.run.folder import RunFolder

MINIMIZED = "minimized"
CHANCE = "Dropout is on, or other chance: this run is the same only on the same number of processes."
DRAWN = (
    "The same rows differ each time they are read: the run is another one after a stop, or on other processes. "
    "Draw from the seed and the row's place."
)
UNTRIED = "The loss of the first two rows is 0, so it was not found out whether a row's loss depends on other rows."


@dataclass(frozen=True)
class Setup:
    """What a launch builds before its first step. None of it is replaced later."""

    config: Config
    folder: RunFolder
    accelerator: Accelerator
    parallel: Parallelism
    tokenizer: transformers.PreTrainedTokenizerBase | None
    train_data: Dataset
    eval_data: dict[str, Dataset]  # By the names of the evaluations; the only one has the name "".
    collate: Callable[[list[np.ndarray], torch.device, bool], MicroBatch]  # As collate().
    token_bytes: TokenBytes | None
    model: torch.nn.Module
    wrapped: torch.nn.Module  # As DDP wraps it. If the ranks divide the model, the same object.
    optimizers: list[torch.optim.Optimizer]
    parameters: list[torch.nn.Parameter]  # All of `model`, also frozen ones; to collect them in every step takes long.
    stages: list[Stage]
    max_steps: int
    flops_per_token: float
    vocabulary: int  # The number of tokens that the model knows.
    num_parameters: int
    num_trained: int  # How many of them are trained.
    frozen_weights: str | None  # A checksum of some numbers of those that are not, which no checkpoint holds.
    export_dtype: torch.dtype
    is_random: bool  # Whether the model draws random numbers.

    def is_due(self, step: int, every: int) -> bool:
        """Every `every` steps and after the last one; with 0 only after the last one."""
        return step == self.max_steps or (every > 0 and step % every == 0)

    def is_over(self, progress: Progress) -> bool:
        """Whether nothing is left but the export: all steps are done, or too many evaluations were in vain. All ranks
        have the same progress, so they give the same answer."""
        if self.lacks_evaluation(progress):
            return False
        if self.config.run.patience and progress.evaluations_in_vain >= self.config.run.patience:
            return True
        return progress.step >= self.max_steps

    def lacks_evaluation(self, progress: Progress) -> bool:
        """Whether the last step is to be evaluated, and is not yet."""
        if not self.eval_data or progress.evaluated_step >= progress.step:
            return False
        if progress.step == 0:
            return self.config.eval.at_start or self.max_steps == 0
        return self.is_due(progress.step, self.config.run.eval_every)

    @property
    def plan(self) -> Plan:
        """The plan of the global batch, which follows batch.warmup."""
        return self.stages[-1].plan

    def stage_at(self, step: int) -> Stage:
        return [stage for stage in self.stages if stage.first_step <= step][-1]

    def rows_after(self, step: int) -> int:
        """How many rows the steps after this one have. With batch.warmup, not all steps have equally many."""
        return self.stages[-1].row_of(self.max_steps + 1) - self.stage_at(step).row_of(step + 1)

    @cached_property
    def joined(self) -> bool:
        """Whether the rows of a micro-batch are not padded, see collate()."""
        return joins_documents(self.model)

    def followed(self) -> str:
        """The name of the evaluation that is eval/loss."""
        return self.config.eval.follow or next(iter(self.eval_data))

    def eval_rows(self, data: Dataset) -> np.ndarray:
        return np.arange(len(data))[: self.config.eval.max_rows]

    def load_step(self, step: int) -> StepBatch:
        rank, device = self.parallel.layout.data_parallel_rank, self.accelerator.device
        return load_step(step, self.train_data, self.stage_at(step), rank, self.joined, device, self.collate)


def begin_mixture(setup: Setup) -> None:
    """Let the sources of a mixture have the weights of data.stages, each from the first row of its step on.

    It is the plan that tells these rows, so this comes after it, and before any row is read for a step.
    """
    if not isinstance(setup.train_data, Mixture):
        return
    for step, weights in setup.config.data.weight_stages()[1:]:
        setup.train_data.begin_stage(setup.stage_at(step).row_of(step), rows_per_block("data.stages", weights))


def check_setup(setup: Setup) -> None:
    check_sizes(setup)
    check_adapted(setup)
    check_same_layers(setup)
    say_if_unheeded(setup)
    check_evaluations(setup)
    check_documents(setup)
    check_own_sum(setup)


def check_sizes(setup: Setup) -> None:
    """Raises UserError if there are too few rows or steps for this run."""
    rows = len(setup.train_data)
    batch = max(stage.plan.global_batch_size for stage in setup.stages)
    require(rows >= batch, f"data: {rows} rows; lower the global batch of {batch}")
    check_length(setup.config, setup.stages, setup.max_steps)


def check_adapted(setup: Setup) -> None:
    """Raises UserError if model.lora or load_in_4bit would be ignored, as they are when a fork builds its own model."""
    if setup.config.model.lora is not None:
        is_adapted = hasattr(setup.model, "peft_config")
        require(is_adapted, "model.lora: the model has no adapter, and would be trained itself; call add_lora()")
    has_codes = any(getattr(module, "is_quantized", False) for module in setup.model.modules())
    advice = "the model has no weights in 4 bits; load it with a quantization_config"
    require(has_codes or not setup.config.model.load_in_4bit, f"model.load_in_4bit: {advice}")


def check_same_layers(setup: Setup) -> None:
    """Raises UserError if each rank would leave out different layers by chance. DDP and FSDP2 would wait forever for
    the gradients or weights of layers that only some ranks compute."""
    configs = [module.config for module in setup.model.modules() if isinstance(module, transformers.PreTrainedModel)]
    chances = {(name, value) for one in configs for name, value in vars(one).items() if "layerdrop" in name and value}
    found = ", ".join(f"{name} {value}" for name, value in sorted(chances))
    advice = "ranks would leave out different layers and wait for each other; set it to 0 in the model's config"
    require(not found or setup.parallel.layout.processes == 1, f"model: {found}: {advice}")


def say_if_unheeded(setup: Setup) -> None:
    """What builds the model of a fork's task may forget settings that save memory or time."""
    if setup.collate is collate:
        return
    modules, asked = list(setup.model.modules()), setup.config.model
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in modules)
    if asked.gradient_checkpointing and not recomputes:
        say("model.gradient_checkpointing seems to be ignored: no module has gradient_checkpointing = True.")
    configs = [module.config for module in modules if isinstance(module, transformers.PreTrainedModel)]
    found = {config._attn_implementation for config in configs}
    if asked.attention not in {"sdpa", *found}:
        say(f"model.attention seems to be ignored: the model has {', '.join(sorted(map(str, found)))}.")


def check_optimizers(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Raises UserError if two optimizers have one weight: a checkpoint would hold the state of one of them.

    Nor may one have a weight that is not the model's: nobody would add up or forget its gradients.
    """
    trained = [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]
    twice = len(trained) - len(set(trained))
    require(not twice, f"build_optimizer: {twice} weights are in two optimizers; give each weight to one of them")
    others = len(set(trained) - set(model.parameters()))
    require(not others, f"build_optimizer: not the model's weights, but others: {others}; let the model hold them")


def check_evaluations(setup: Setup) -> None:
    """Raises UserError if there is an evaluation without targets, or none though a share of the data is to be for it:
    what a fork loads may know nothing of that."""
    is_kept = setup.eval_data or not setup.config.data.eval_fraction
    require(is_kept, "data.eval_fraction: no rows are held out; let what loads them do so, or take data.eval_source")
    for name, data in setup.eval_data.items():
        _, targets = data.sizes(setup.eval_rows(data))
        setting = f"{eval_setting(name)} or data.eval_fraction"
        require(targets.any(), f"{setting}: the rows have no target token; check roles or labels")


@torch.no_grad()
def sums_in(setup: Setup, micro_batches: list[list[np.ndarray]], training: bool = False) -> dict[str, float]:
    """The summed metrics of micro-batches of these rows, and what is minimized, of the model as the ranks have it.
    Pipelines only tell the metrics."""
    parallel, loss_of = setup.parallel, setup.parallel.loss_of

    def with_minimized(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = loss_of(model, batch)
        require("loss" in metrics, 'token_loss or compute_loss: no metric is called "loss"; log what is minimized')
        odd = [name for name, value in metrics.items() if not isinstance(value, torch.Tensor) or value.ndim]
        require(not odd, f"compute_loss: these are no tensors of one number, as sums are: {', '.join(odd)}")
        return loss, metrics | {MINIMIZED: loss.detach().sum()}

    batches = [setup.collate(rows, setup.accelerator.device, setup.joined) for rows in micro_batches]
    setup.wrapped.train(training)
    with torch.compiler.set_stance("force_eager"), patched(parallel, "loss_of", with_minimized):  # For short rows.
        metrics = parallel.metrics_of(setup.wrapped, parallel.part_of(batches))
    setup.wrapped.train()
    sums = parallel.sum_over_ranks(metrics)
    return {name: value.item() / parallel.layout.data_parallel_size for name, value in sums.items()}


def is_exact(setup: Setup) -> bool:
    """Whether a loss is computed in float32, and not rounded further."""
    return setup.accelerator.mixed_precision == "no" and setup.accelerator.device.type == "cpu"


def check_own_sum(setup: Setup) -> None:
    """check_sum() for rows of a fork's own, of which the first two are tried. Others were tried before, in a small
    model."""
    if setup.collate is collate:
        return
    check_own_sizes(setup)
    if has_drawn_rows(setup):
        say(DRAWN)
    elif has_chance(setup):
        if not setup.is_random:
            say(CHANCE)
    elif is_zero(setup):
        say(UNTRIED)
    check_no_rows(setup)


def has_dropout(model: torch.nn.Module) -> bool:
    """It may change no loss yet: at first, a LoRA adapter adds nothing, whatever its dropout is."""
    kind = torch.nn.modules.dropout._DropoutNd
    return any(isinstance(module, kind) and module.p > 0 for module in model.modules())


def has_drawn_rows(setup: Setup) -> bool:
    """Whether reading rows draws random numbers that depend on no seed, on any rank. The numbers that a pass draws do:
    each step begins with reseed(). Of eight rows, hardly all are twice the same by chance."""
    data, device = setup.train_data, setup.accelerator.device

    def tensors() -> list[torch.Tensor]:
        batch = setup.collate(data.read_rows(data.rows_at(0, 8)), device, setup.joined)
        found = [leaf for leaf in tree_leaves((batch, getattr(batch, "__dict__", None))) if torch.is_tensor(leaf)]
        found = [leaf for leaf in found if leaf.layout == torch.strided and not leaf.is_nested]
        return [leaf.unsqueeze(-1).contiguous().view(torch.uint8) for leaf in found]  # In bytes, nan is equal to nan.

    differ = not all(map(torch.equal, tensors(), tensors()))
    told = setup.parallel.sum_over_ranks({"differ": torch.tensor(float(differ), device=device)})
    return told["differ"].item() > 0


def has_chance(setup: Setup) -> bool:
    """Whether the losses of rows draw random numbers. Raises UserError if they depend on other rows, beside them or on
    other ranks, also in training, as by a batch norm."""
    draws = has_dropout(setup.model)
    has_others = max(stage.plan.micro_batch_size for stage in setup.stages) > 1
    for training in False, True:
        buffers = {name: buffer.clone() for name, buffer in setup.model.named_buffers()}
        if has_others:
            draws |= check_two_rows(setup, training)
        if setup.parallel.layout.data_parallel_size > 1:
            draws |= check_across_ranks(setup, training)
        for name, before in buffers.items():  # A batch norm counts the passes.
            setup.model.get_buffer(name).copy_(before)
    return draws


def is_zero(setup: Setup) -> bool:
    """Whether the first two rows have no loss, as in reinforcement learning before any answer is right. Whatever the
    mistakes of a loss are, has_chance() then finds nothing."""
    data = setup.train_data
    sums = sums_in(setup, [[row] for row in data.read_rows(data.rows_at(0, 2))])
    return sums.get(MINIMIZED, sums["loss"]) == 0


def check_own_sizes(setup: Setup) -> None:
    """Say if sizes() of the first two rows is more tokens than a row may have, or not the number of their `targets`."""
    data, limit = setup.train_data, setup.config.data.sequence_length
    rows = data.rows_at(0, 2)
    lengths, counted = data.sizes(rows)
    if lengths.max() > limit:
        say(f"A row has {lengths.max()} tokens by sizes(), but tokens_per_step counts data.sequence_length, {limit}.")
    batch = setup.collate(data.read_rows(rows), setup.accelerator.device, setup.joined)
    targets = targets_of(batch)
    if targets is not None:
        found = int((targets != -100).sum())
        if found != counted.sum():
            say(f"Two rows have {found} targets, but sizes() counts {counted.sum()}, by which the loss is divided.")


def check_no_rows(setup: Setup) -> None:
    """Raises UserError if a rank without rows would add something to the sums of others."""
    advice = "let read_rows([]) return a row without targets, whose sums are 0"
    rows = setup.train_data.read_rows(np.empty(0, int))
    require(len(rows), f"data: a rank without rows would have nothing to compute; {advice}")
    odd = [f"{name} {value:.6g}" for name, value in sums_in(setup, [rows]).items() if value != 0]
    require(not odd, f"data: a rank without rows would add {', '.join(odd)}; {advice}")


def sums_and_chance(setup: Setup, sums: Callable[[], dict[str, float]]) -> tuple[dict[str, float], bool]:
    """What a pass gives, and whether others give something else.

    A model may leave out layers or mask rows only now and then. So passes that draw numbers are tried eight times.
    """
    device = setup.accelerator.device
    before, first = states_of_chance(device), sums()
    draws = torch.tensor(float(states_of_chance(device) != before), device=device)
    draws = setup.parallel.sum_over_ranks({"draws": draws})["draws"].item()

    def differs() -> bool:
        again = sums()
        return any(again[name] != value for name, value in first.items() if math.isfinite(value))

    return first, any(differs() for _ in range(7 if draws else 1))


def check_two_rows(setup: Setup, training: bool) -> bool:
    """Whether the losses of rows draw random numbers. Raises UserError if they depend on the rows beside them."""
    data = setup.train_data

    def sums(are_together: bool) -> dict[str, float]:
        rows = data.read_rows(data.rows_at(0, 2))
        return sums_in(setup, [rows] if are_together else [[row] for row in rows], training)

    both, draws = sums_and_chance(setup, lambda: sums(True))
    if draws:
        return True
    with as_user_error("token_loss, compute_loss or the model: a row does not work without others beside it"):
        alone, draws = sums_and_chance(setup, lambda: sums(False))
    if draws:
        return True
    names = [name for name in both if math.isfinite(both[name]) and math.isfinite(alone[name])]  # The first step tells.
    for name in names:
        together, apart = both[name], alone[name]
        what = "loss" if name in ("loss", MINIMIZED) else f"metric {name}"
        found = f"the {what} of two rows is {together:.6g} in one micro-batch, {apart:.6g} in two"
        advice = "return a sum, to which each row adds the same beside any other"
        same = is_same_sum(setup, together, apart, is_loss=what == "loss")
        require(same, f"token_loss, compute_loss or the model: {found}; {advice}")
    return False


def check_across_ranks(setup: Setup, training: bool) -> bool:
    """Whether the loss of a row draws random numbers. Raises UserError if it depends on rows of other ranks, as where a
    loss gathers them."""
    data, layout = setup.train_data, setup.parallel.layout
    rows, ranks = data.rows_at(0, 2), layout.data_parallel_size

    def sums(number: int) -> dict[str, float]:
        found = sums_in(setup, [data.read_rows(rows[[number]])], training)
        return {"loss": found.get(MINIMIZED, found["loss"])}

    tried = [
        sums_and_chance(setup, functools.partial(sums, number)) for number in (0, 1, layout.data_parallel_rank % 2)
    ]
    if any(draws for _, draws in tried):
        return True
    first, second, mixed = (found["loss"] for found, _ in tried)
    expected = (first * math.ceil(ranks / 2) + second * (ranks // 2)) / ranks
    if not math.isfinite(expected):  # The first step tells.
        return False
    found = f"where ranks have other rows, their loss is {mixed:.6g} per rank, and {expected:.6g} by that of each row"
    advice = "let a row be all that is compared, such as a group of pairs, and gather nothing from other ranks"
    same = is_same_sum(setup, mixed, expected, is_loss=True)
    require(same, f"token_loss, compute_loss or the model: {found}; {advice}")
    return False


def is_same_sum(setup: Setup, one: float, other: float, is_loss: bool) -> bool:
    """Up to rounding, which may decide what a metric counts."""
    if is_exact(setup) and is_loss:
        return is_same_loss(setup.model, one, other)
    is_close = abs(one - other) <= 5e-2 * max(1, abs(other))
    return is_close or not (is_loss or is_exact(setup))


def check_documents(setup: Setup) -> None:
    """Raises UserError if the model of the run, as the ranks have it, gives documents that share a row another loss.

    A small model has been tried before. This one has all layers, the weights of a pretrained model, and its device.
    """
    precision = setup.accelerator.mixed_precision
    if setup.config.data.packing == "none" or precision == "fp8" or setup.collate is not collate:
        return  # float8 needs longer rows, and a fork may have rows of its own.
    row = probe_row(setup.vocabulary, packed=True)
    packed = sums_in(setup, [[row]])["loss"]
    alone = sums_in(setup, [[row[:, :4]], [row[:, 4:]]])["loss"]
    advice = BEYOND_FP16 if precision == "fp16" else "check the weights of model.pretrained"
    require(math.isfinite(alone), f"model: the loss is {alone:g} before any step; {advice}")
    same = is_same_loss(setup.model, packed, alone) if is_exact(setup) else abs(packed - alone) <= 1e-2 * abs(alone)
    found = f"{packed:.6g} in one row, {alone:.6g} in rows of their own"
    require(same, f"data.packing: the loss of two documents is {found}; use none")


def check_vocabulary(setup: Setup) -> None:
    """Raises UserError if there are tokens that the model does not know."""
    check_token_ids(setup.train_data, setup.vocabulary, "the training data")
    for name, data in setup.eval_data.items():
        check_token_ids(data, setup.vocabulary, f"the evaluation data {name}".strip())


def largest_micro_batch(
    parallel: Parallelism,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    forward_backward: Callable,
    data: Dataset,
) -> int:
    """The most rows for which all ranks have memory. Each try is a tenth smaller than the one before.

    It is a step of two micro-steps by `forward_backward`, that of train.py: in the second one, the gradients of the
    first one take memory, too. With FSDP2, they may be whole.

    Unless each rank has the whole model and rows of its own, all devices must be equal: if a single rank fails, the
    others wait for it forever.
    """
    config, accelerator = parallel.config, parallel.accelerator
    of_text = hasattr(data, "index")  # Rows of text are what is tried.
    require(of_text, "batch.max_micro_batch_size: auto is for rows of text only; give a number")
    joined = joins_documents(model)
    row = longest_row(config.data, joined)
    most = math.ceil(max(rows for _, rows in config.batch_stages()) / parallel.layout.data_parallel_size)
    trained_state(model, optimizers)  # Creates the optimizers' state, which takes memory, too.

    @memory.find_executable_batch_size(starting_batch_size=most)
    def find(size: int) -> int:
        batch = collate([row] * size, accelerator.device, joined)
        forward_backward(parallel, model, [batch, batch], scale=1.0)
        return size

    with as_user_error(
        "batch.max_micro_batch_size: no pass fits, even of one row; lower data.sequence_length or shard"
    ):
        found = find()
    model.zero_grad()
    for optimizer in optimizers:
        optimizer.state.clear()
    return int(accelerator.gather(torch.tensor([found], device=accelerator.device)).min())
