"""Means per target, per source; what is printed; curves."""

import json
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from samerun.data.batches import collate, targets_of
from samerun.data.mixture import Mixture
from samerun.errors import one_line, say
from samerun.plan import plan_table
from samerun.run.checkpoint import Progress
from samerun.run.setup import CHANCE, Setup


def draw_curves(folder: Path, at_most_every: float = 0.0) -> None:
    """curves.png from metrics.jsonl: loss, throughput and learning rate against tokens.

    A picture that is younger than so many seconds is left: to draw takes half a second, and longer in a long run. One
    that cannot be drawn, as on a full disk, which also cuts lines of metrics.jsonl, is no reason to end the run.
    """
    picture = folder / "curves.png"
    try:
        # One of the future is drawn anew: a clock was set back, or the disk has another one.
        if picture.exists() and 0 <= time.time() - picture.stat().st_mtime < at_most_every:
            return
        draw_picture(folder / "metrics.jsonl", picture)
    except (OSError, ValueError) as error:
        say(f"curves.png could not be drawn: {one_line(error)}")


# What curves.png is drawn from.
DRAWN = [
    "train/tokens",
    "plan/num_processes",
    "train/loss",
    "eval/loss",
    "perf/tokens_per_second",
    "train/learning_rate",
]


def draw_picture(metrics: Path, picture: Path) -> None:
    from matplotlib.figure import Figure  # Not at the top of the file, because a launch begins without it.

    with open(metrics) as file:  # pandas by itself would hold all metrics, of which there may be gigabytes.
        lines = pd.DataFrame([list(map(json.loads(line).get, DRAWN)) for line in file], columns=DRAWN, dtype=float)
    lines["train/tokens"] = lines["train/tokens"].ffill() / 1e6
    continued = lines["train/tokens"][lines["plan/num_processes"].notna()].dropna()  # Not the first launch.
    figure = Figure(figsize=(16, 4.5), layout="constrained")
    loss, speed, rate = figure.subplots(1, 3, width_ratios=(3, 2, 2))

    def draw(key: str, axes, style: str) -> None:
        points = lines[["train/tokens", key]].dropna()
        points.plot("train/tokens", key, ax=axes, style=style, xlabel="tokens (millions)")

    draw("train/loss", loss, "-")
    draw("eval/loss", loss, "o-")
    draw("perf/tokens_per_second", speed, "-")
    draw("train/learning_rate", rate, "-")
    for axes in loss, speed, rate:
        for number, place in enumerate(continued):
            axes.axvline(place, color="gray", linestyle=":", label="continued" if number == 0 else None)
        axes.legend()
    loss.set(title="Loss", ylabel="nats per token")
    speed.set(title="Throughput while training", ylabel="tokens per second", ylim=(0, None))
    rate.set(title="Learning rate", ylim=(0, None))
    draft = picture.with_name(".curves.png")  # A viewer sees the old picture or the new, never half of it.
    figure.savefig(draft, dpi=110)
    os.replace(draft, picture)
    figure.clear()  # Its parts refer to each other, and would stay until they are collected as garbage.


def mean_per_target(metrics: dict[str, torch.Tensor], targets: int) -> dict[str, float]:
    """The metrics of token_loss() for the logs, NaN where there is no target. Waits for the device."""
    return {name: value.item() / targets if targets else math.nan for name, value in metrics.items()}


class SourceMetrics:
    """The metrics of each source of a mixture since the last log line, because a single step may not have all sources.

    A stop does not change them: checkpoints hold what they are made of.
    """

    def __init__(self, progress: Progress):
        self.sums = {name: torch.tensor(value) for name, value in (progress.source_sums or {}).items()}
        self.targets = Counter(progress.source_targets)

    def take(self, summed: dict[str, torch.Tensor], targets: dict[str, int]) -> None:
        """Move the sums of the sources out of those of a step, in which each source has so many targets."""
        self.targets.update(targets)
        for name in [name for name in summed if source_in(name) in targets]:
            self.sums[name] = self.sums.get(name, 0) + summed.pop(name)

    def note(self, progress: Progress) -> None:
        """Let the next checkpoint hold them. Waits for the device."""
        progress.source_sums = {name: value.item() for name, value in self.sums.items()}
        progress.source_targets = dict(self.targets)

    def read(self) -> dict[str, float]:
        """NAME/SOURCE per target of the source, and its share of all targets. Begins anew. Waits for the device."""
        metrics, total = {}, max(1, self.targets.total())
        for name, value in self.sums.items():
            metrics |= mean_per_target({name: value}, self.targets[source_in(name)])
        for source, targets in self.targets.items():
            metrics[f"token_share/{source}"] = targets / total
        self.sums, self.targets = {}, Counter()
        return metrics


def source_in(name: str) -> str | None:
    """The source of a metric NAME/SOURCE."""
    _, slash, source = name.rpartition("/")
    return source if slash else None


def prefixed(prefix: str, metrics: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def show(
    step: int, max_steps: int, metrics: dict[str, Any], names: tuple[str, ...], seconds_left: float | None
) -> None:
    """Print the line of a step: the metrics of these names and, where no progress bar does, the time that is left."""
    line = f"step {step:,}/{max_steps:,}"
    for name in names:
        value = metrics.get(name)
        if value is not None:
            shown = f"{value:,.0f}" if value > 999 else f"{value:.4g}"
            line += f"  {name} {shown}"
    if "train/epoch" in metrics and not sys.stderr.isatty():
        line += f"  epoch {metrics['train/epoch']:.4g}"
        if seconds_left is not None:
            line += f"  {tqdm.format_interval(seconds_left)} left"
    say(line)


def show_seconds(summary: dict[str, float | None]) -> None:
    """Print where the time of a launch went."""
    shown = []
    for name, value in summary.items():
        if name.endswith("_seconds"):
            shown.append(f"{name.removeprefix('summary/').removesuffix('_seconds')} {value:.1f}")
    say(f"Seconds: {', '.join(shown)}")


def announce(setup: Setup, launch: dict[str, str]) -> None:
    """Print what one wants to check before a long run."""
    length = setup.config.data.sequence_length
    say(plan_table(setup.stages, setup.config.model.pipeline_ranks))
    say(f"Launch: {', '.join(f'{name} {value}' for name, value in launch.items())}")
    fill = setup.train_data.tokens / len(setup.train_data) / length
    steps = len(setup.train_data) / setup.plan.global_batch_size
    say(f"Data: {len(setup.train_data):,} rows, {fill:.1%} full; {steps:,.1f} steps per epoch")
    if isinstance(setup.train_data, Mixture):
        end = setup.max_steps + 1
        end_of_rows = setup.stage_at(end).row_of(end)
        for name, count in setup.train_data.count_before(end_of_rows).items():
            size = len(setup.train_data.sources[name])
            say(f"Source {name}: {size:,} rows, seen {count / size:.2f} times in the run")
    only = f", of which {setup.num_trained:,} are trained" if setup.config.model.lora is not None else ""
    known = not math.isnan(setup.flops_per_token)
    flops = f"{setup.flops_per_token / 1e6:,.1f} MFLOPs per token" if known else "MFLOPs per token are not known"
    say(f"Model: {setup.num_parameters:,} parameters{only}, {flops}")
    if setup.config.model.lora is not None and not setup.config.model.pretrained:
        say("model.lora adapts random weights, which model/ will not hold; --export last --merge writes them, too.")
    say_example(setup)
    if setup.config.eval.follow or len(setup.eval_data) > 1:
        sizes = [f"{name} ({len(setup.eval_rows(data)):,} rows)" for name, data in setup.eval_data.items()]
        say(f"Evaluations: {', '.join(sizes)}; eval/loss is that of {setup.followed()}")
    if not setup.tokenizer and setup.collate is collate:
        say("There is no tokenizer to export with the model: data.tokenizer can name the one that made the tokens.")
    if setup.is_random:
        say(CHANCE)


def say_example(setup: Setup) -> None:
    """Print what is learned of the first step's row with the most targets, unless a fork's batch has none."""
    first_rows = setup.train_data.rows_at(0, setup.stages[0].plan.global_batch_size)
    _, counts = setup.train_data.sizes(first_rows)
    rows = setup.train_data.read_rows(first_rows[[counts.argmax()]])
    targets = targets_of(setup.collate(rows, torch.device("cpu"), setup.joined))
    if targets is None:
        return
    example = targets[targets >= 0][:120].tolist()
    if setup.tokenizer:
        example = setup.tokenizer.decode(example)
    say(f"The loss covers, for example: {example!r}")
