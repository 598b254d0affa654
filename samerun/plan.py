"""The arithmetic of a batch plan: how rows are split, who is idle, what a pipeline loses, the table."""

import heapq
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from samerun.config import Config, Model
from samerun.errors import require, say


@dataclass(frozen=True)
class Plan:
    """How one global batch is split over ranks and micro-steps."""

    num_processes: int
    data_parallel_size: int
    global_batch_size: int
    micro_batch_size: int
    grad_accum_steps: int
    tokens_per_step: int
    bubble: float = 0.0  # The share of a step that the ranks of a pipeline spend waiting for each other.

    def idle_share(self) -> float:
        """The share of a step that ranks spend waiting for those with one row more, on average."""
        rows_per_rank = self.global_batch_size / self.data_parallel_size
        return 1 - rows_per_rank / math.ceil(rows_per_rank)

    def split(self, lengths: np.ndarray, joined: bool) -> list[list[np.ndarray]]:
        """Split rows of these lengths into parts [micro_step][rank]: arrays of the numbers of rows.

        Rows that are padded go with others of about their length, and the sizes of the parts differ by one at most.
        Rows that are joined make parts of about the same number of tokens.
        """
        ranks, count = self.data_parallel_size, self.data_parallel_size * self.grad_accum_steps
        if joined:
            parts = balance(lengths, count, self.micro_batch_size)
        else:
            parts = np.array_split(np.argsort(lengths, kind="stable"), count)
        micro_steps = []
        for number in range(self.grad_accum_steps):
            micro_step = parts[number * ranks : (number + 1) * ranks]
            if number % 2 == 1:
                micro_step.reverse()  # So that it is not always the same rank that has more tokens.
            micro_steps.append(micro_step)
        return micro_steps

    def even_neighbours(self, pipeline_ranks: int = 1) -> str:
        """The nearest batch sizes and process counts that leave no rank idle. Each rank of a pipeline needs a row."""
        rows, ranks = self.global_batch_size, self.data_parallel_size
        below = rows // ranks * ranks
        sizes = [size for size in (below, below + ranks) if size > 0]

        ranks_per_row = self.num_processes // ranks
        even = [count * ranks_per_row for count in range(1, rows // pipeline_ranks + 1) if rows % count == 0]
        fewer = [count for count in even if count <= self.num_processes]
        more = [count for count in even if count > self.num_processes]
        counts = fewer[-1:] + more[:1]
        return f"{' or '.join(map(str, sizes))} rows, {' or '.join(map(str, counts))} processes"


def balance(lengths: np.ndarray, count: int, size: int) -> list[np.ndarray]:
    """Divide rows of these lengths into `count` parts of at most `size` rows, with about the same number of tokens.

    The longest row that is left goes to the part with the fewest tokens (Graham, "Bounds on Multiprocessing Timing
    Anomalies", 1969). The parts come in the order of their tokens.
    """
    if count == 1:
        return [np.argsort(-lengths, kind="stable")]
    parts = [[] for _ in range(count)]
    open_parts = [(0, number) for number in range(count)]  # A heap of tokens and number of part.
    for row in np.argsort(-lengths, kind="stable").tolist():
        tokens, number = heapq.heappop(open_parts)
        parts[number].append(row)
        if len(parts[number]) < size:
            heapq.heappush(open_parts, (tokens + int(lengths[row]), number))
    parts = [np.array(part, int) for part in parts]
    return sorted(parts, key=lambda part: lengths[part].sum())


@dataclass(frozen=True)
class Stage:
    """The steps from `first_step` on have this plan. Without batch.warmup, there is one stage."""

    first_step: int
    first_row: int  # Where its rows begin in the endless stream of shuffled epochs.
    plan: Plan

    def row_of(self, step: int) -> int:
        """Where the rows of a step of this stage begin, and those of the step before it end."""
        return self.first_row + (step - self.first_step) * self.plan.global_batch_size


def check_length(config: Config, stages: list[Stage], max_steps: int) -> None:
    """Raises UserError if the run ends before a warmup does, never decays though it should, or would not learn."""
    optim = config.optim
    if max_steps == 0:  # An evaluation of a model is none of this.
        return
    require(optim.warmup_steps <= max_steps, f"optim.warmup_steps exceeds the run's {max_steps} steps")
    decays = optim.schedule != "constant" or optim.decay_fraction == 1
    require(decays, "optim.decay_fraction: optim.schedule constant never decays; choose linear or cosine, or 1 here")
    ends_at_zero = optim.schedule != "constant" and optim.min_learning_rate_ratio == 0
    learns = max_steps > 1 or optim.warmup_steps or not ends_at_zero
    advice = "the only step would have a learning rate of 0; take more steps, or a ratio above 0"
    require(learns, f"optim.min_learning_rate_ratio: {advice}")
    last = stages[-1].first_step
    reached = f"the global batch begins with step {last}, and the run has {max_steps}"
    require(last <= max_steps, f"batch.warmup: {reached}; give fewer steps, or [] for none")


def pipeline_bubble(config: Model, plan: Plan) -> float:
    """The share of a step in which a rank waits (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    Raises UserError for a plan that does not suit the pipeline.
    """
    ranks, rows, micro_steps = config.pipeline_ranks, plan.global_batch_size, plan.grad_accum_steps
    needed = ranks * plan.data_parallel_size
    needs = f"needs at least {needed} rows in a step of {plan.num_processes} processes, and has {rows}"
    require(rows >= needed, f"model.pipeline_ranks {ranks}: {needs}")
    if config.pipeline_schedule == "Interleaved1F1B":
        fits = micro_steps % (micro_steps // ranks) == 0  # torch makes so many rounds, of the same length.
        advice = "choose 1F1B, or another batch.max_micro_batch_size"
        require(
            fits, f"model.pipeline_schedule: {micro_steps} passes cannot be interleaved among {ranks} ranks; {advice}"
        )
    fill = (ranks - 1) / config.chunks_per_rank()
    return fill / (micro_steps + fill)


def plan_table(stages: list[Stage], pipeline_ranks: int = 1) -> str:
    lines = []
    for stage in stages:
        plan = stage.plan
        line = {
            "from_step": f"{stage.first_step:,}",
            "processes": f"{plan.num_processes:,}",
            "data_parallel": f"{plan.data_parallel_size:,}",
            "global_batch": f"{plan.global_batch_size:,}",
            "micro_batch": f"{plan.micro_batch_size:,}",
            "grad_accum": f"{plan.grad_accum_steps:,}",
            "tokens_per_step": f"{plan.tokens_per_step:,}",
            "idle": f"{plan.idle_share():.1%}",
            "nearest_even": plan.even_neighbours(pipeline_ranks) if plan.idle_share() else "is even",
        }
        lines.append(line)
    table = pd.DataFrame(lines)
    if all(stage.first_step == 1 for stage in stages):
        table = table.drop(columns="from_step")
    bubbles = [f"{stage.plan.bubble:.1%}" for stage in stages]
    if any(stage.plan.bubble for stage in stages):
        table.insert(table.columns.get_loc("idle"), "bubble", bubbles)
    return table.to_string(index=False)


def say_if_idle(plan: Plan) -> None:
    sharers, rows = plan.data_parallel_size, plan.global_batch_size
    if sharers > rows:
        ranks_per_row = plan.num_processes // sharers
        idle = (sharers - rows) * ranks_per_row
        advice = f"at most {rows * ranks_per_row:,} processes, or {sharers:,} rows in a step"
        say(f"Idle: {idle:,} of {plan.num_processes:,} processes have no row of a step of {rows:,}; take {advice}")
