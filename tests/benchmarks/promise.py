"""Is it the same run on any machine? Draws the losses of a config on 1, 2 and 3 processes, and of a run that is killed.

    python tests/benchmarks/promise.py [--steps 60] [--config configs/small.yaml] [--picture promise.png] [--tiny]

The real command runs with the config on each number of processes. Then it runs on two, and SIGKILL ends all of its
processes in the middle, between two saves. The same command continues the run on three. The picture shows every loss
that was logged, and below it the relative difference of each loss from that of a single process.

Prints a table, and ends with exit status 1 if a difference is above 1e-3. The runs end after so many steps, on the
schedule of a run of that length, and they evaluate only at the end. --tiny shrinks the model and the data, leaves
out the run on three processes, and forks the ranks from one that has the libraries, so that a test can start it.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
import helpers

from samerun.cli import load_config

BOUND = 1e-3
LEAST = 1e-9  # Losses that are equal to the last digit have a place at the bottom of the logarithmic axis.
TINY = {
    "data.files": str(helpers.ROOT / "tests" / "*.py"),
    "data.sequence_length": 32,
    "batch.global_batch_size": 5,
    "model.architecture.hidden_size": 32,
    "model.architecture.intermediate_size": 64,
    "model.architecture.num_hidden_layers": 1,
    "model.architecture.num_attention_heads": 2,
    "model.architecture.num_key_value_heads": 2,
    "optim.adam_eps": 1e-5,  # So many steps, as a kill in their middle needs, would amplify rounding too far otherwise.
    "optim.learning_rate": 1e-3,
}
# Every line is narrower than the one below it, so that runs that lie on each other can all be seen.
STYLES = [
    {"color": "#bdd7ee", "linewidth": 11},
    {"color": "#4a90c9", "linewidth": 6},
    {"color": "#f5b041", "linewidth": 3},
    {"color": "#7b1e1e", "linewidth": 1.5, "linestyle": (0, (1, 2))},
    {"color": "#111111", "linewidth": 1.2},
]


@dataclass(frozen=True)
class Curve:
    """The losses of a run, or of one launch of it, by step."""

    label: str
    losses: dict[int, float]

    def difference(self, other: "Curve") -> dict[int, float]:
        """The relative difference of each loss from that of another run."""
        return {step: abs(loss / other.losses[step] - 1) for step, loss in self.losses.items()}


def read_losses(folder: Path) -> dict[int, float]:
    """What metrics.jsonl holds so far. Its last line may be cut short."""
    losses = {}
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        for text in (folder / "metrics.jsonl").read_text().splitlines():
            line = json.loads(text)
            if "train/loss" in line:
                losses[line["step"]] = line["train/loss"]
    return losses


class Runs:
    """The real command with the same settings each time. Each run has a folder of its own."""

    def __init__(self, config: Path, folder: Path, steps: int, tiny: bool):
        self.folder = folder
        self.steps = steps
        self.tiny = tiny
        self.save_every = max(1, steps // 6)
        settings = {
            "run.max_steps": steps,
            "run.log_every": 1,
            "run.eval_every": 0,
            "run.save_every": self.save_every,
            "run.trackers": "[]",
            "eval.prompts": "[]",
            **(TINY if tiny else {}),
        }
        words = [str(word) for setting, value in settings.items() for word in (f"--{setting}", value)]
        self.config = load_config(["--config", str(config), *words]).model_dump()
        self.environment = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}

    def start(self, name: str, processes: int, **how):
        print(f"{name}: {processes} process{'es' if processes > 1 else ''}", flush=True)
        self.config["run"]["output_dir"] = str(self.folder / name)
        return helpers.start(self.folder, self.config, processes=processes, env=self.environment, warm=self.tiny, **how)

    def whole(self, name: str, processes: int) -> helpers.Done:
        """Train to the last step."""
        process = self.start(name, processes)
        try:
            output, _ = process.communicate()
        finally:
            helpers.kill_tree(process)
        assert process.returncode == 0, output
        return helpers.Done(0, output, self.folder / name)

    def killed(self, name: str, processes: int) -> Curve:
        """SIGKILL to the launcher and its ranks in the middle, half-way between two saves."""
        middle = self.steps // 2 + self.save_every // 2
        process = self.start(name, processes, script=helpers.held_after(self.folder, self.steps - 1))
        try:
            while max(read_losses(self.folder / name), default=0) < middle:
                assert process.poll() is None, f"ended before step {middle}:\n{process.communicate()[0]}"
                time.sleep(0.01)
        finally:
            helpers.kill_tree(process)
        process.communicate()
        losses = read_losses(self.folder / name)
        return Curve(f"{processes} processes, killed after step {max(losses)}", losses)

    def continued(self, name: str, processes: int) -> Curve:
        """The same command once more, on another number of processes."""
        done = self.whole(name, processes)
        begin = done.launches[-1]
        losses = {step: loss for step, loss in read_losses(done.folder).items() if step > begin}
        return Curve(f"continued after step {begin} on {processes} process{'es' if processes > 1 else ''}", losses)


def measure(runs: Runs, tiny: bool) -> list[Curve]:
    """The whole runs, the one on a single process first, and then the two launches of the killed one."""
    curves = []
    for count in [1, 2] if tiny else [1, 2, 3]:
        done = runs.whole(f"on-{count}", count)
        curves.append(Curve(f"{count} process{'es' if count > 1 else ''}", read_losses(done.folder)))
    curves.append(runs.killed("killed", 2))
    curves.append(runs.continued("killed", 1 if tiny else 3))
    return curves


def draw(curves: list[Curve], what: str, path: Path) -> None:
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.set_title("The same run on any number of processes", fontsize=16, fontweight="bold", pad=30)
    above.text(0.5, 1.03, what, transform=above.transAxes, ha="center", fontsize=12, color="#555555")
    styles = [*STYLES[: len(curves) - 2], *STYLES[-2:]]
    for curve, style in zip(curves, styles):
        above.plot(curve.losses.keys(), curve.losses.values(), label=curve.label, solid_capstyle="round", **style)

    stopped = curves[-2]
    last = max(stopped.losses)
    above.plot(last, stopped.losses[last], "X", color=STYLES[-2]["color"], markersize=13, markeredgecolor="white")
    words = {"fontsize": 12, "color": STYLES[-2]["color"], "arrowprops": {"arrowstyle": "-", "color": "grey"}}
    above.annotate("kill -9", (last, stopped.losses[last]), (0, 45), textcoords="offset points", ha="center", **words)
    above.set_ylabel("training loss (nats per token)", fontsize=12)
    above.legend(fontsize=11.5, frameon=False, handlelength=3)

    for number, (curve, style) in enumerate(zip(curves, styles)):
        if curve is curves[0]:
            continue
        far = {step: max(LEAST, size) for step, size in curve.difference(curves[0]).items()}
        width = 1 + 1.3 * (len(curves) - 1 - number)
        below.plot(far.keys(), far.values(), color=style["color"], linewidth=width, solid_capstyle="round")
    below.set_yscale("log")
    below.set_ylim(LEAST / 2, 1e-1)
    below.set_yticks([LEAST, 1e-6, 1e-4, 1e-2], ["equal", "0.0001 %", "0.01 %", "1 %"])
    below.minorticks_off()
    below.set_ylabel("difference from\n1 process", fontsize=12)
    below.set_xlabel("optimizer step", fontsize=12)
    for axes in above, below:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e8e8e8")
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=11)
    figure.align_ylabels()
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--config", type=Path, default=helpers.ROOT / "configs" / "small.yaml")
    parser.add_argument("--picture", type=Path, default="promise.png")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(args.config, Path(folder), args.steps, args.tiny)
        curves = measure(runs, args.tiny)
    rows = runs.config["batch"]["global_batch_size"]
    draw(curves, f"{args.config.name}, {rows} rows per step, float32 on CPU processes", args.picture)

    worst = 0.0
    print(f"{'':44}{'last loss':>12}{'largest difference':>22}")
    for curve in curves:
        largest = max(curve.difference(curves[0]).values())
        worst = max(worst, largest)
        print(f"{curve.label:44}{curve.losses[max(curve.losses)]:12.6f}{largest:22.1e}")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
