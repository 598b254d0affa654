"""Draws how fast training was on a GPU: `gpu.py`'s results as bars, with those of other loops beside them.

    python tests/benchmarks/gpu_picture.py tests/benchmarks/gpu_h200.jsonl .github/gpu.png

Of a case that was measured several times, the last time counts: what is compared is to be of one call.
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

OURS, OTHERS = "#1f6f8b", "#c9c9c9"
BARS = {  # What is compared: for each bar the case, its label, and whether it is a bar of train.py.
    "documents of many lengths": [
        ("compile, documents, packing concat", "train.py: packed, compiled", True),
        ("documents, packing concat", "train.py: packed", True),
        ("documents, packing none", "train.py: a document is a row", True),
        ("TRL", "TRL: packed", False),
        ("Trainer", "Trainer: a document is a row", False),
    ],
    "documents as long as a row": [
        ("compile, fsdp2.yaml", "train.py: FSDP2, compiled", True),
        ("Accelerate", "Accelerate's loop: FSDP2, compiled", False),
        ("compile", "train.py: compiled", True),
        ("eager", "train.py", True),
    ],
}


def draw(results: list[dict], path: Path) -> None:
    rates = {line["case"]: line["real_rate"] for line in results if "real_rate" in line}
    device = results[0]["versions"].split(",")[0]
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    figure.suptitle(f"A Llama of 1.07 billion parameters in bf16, on one {device}", fontsize=14, fontweight="bold")
    parts = figure.subplots(2, 1, sharex=True)
    for axes, (title, bars) in zip(parts, BARS.items()):
        bars = [(rates[case], label, OURS if ours else OTHERS) for case, label, ours in bars if case in rates]
        values, labels, colors = zip(*reversed(bars))
        found = axes.barh(labels, values, color=colors, height=0.75)
        axes.bar_label(found, [f"{value:,.0f}" for value in values], padding=4, fontsize=10.5)
        axes.set_title(title, loc="left", fontsize=11.5, color="#555555")
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(labelsize=10.5)
        axes.set_xticks([])
    parts[-1].set_xlabel("tokens per second, without padding", fontsize=11)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a results.jsonl of gpu.py")
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    draw([json.loads(line) for line in args.results.read_text().splitlines()], args.picture)


if __name__ == "__main__":
    main()
