"""How far are fp16, bf16 and float8 from float32? A small Llama learns Python's asyncio in each, under every strategy.

    python tests/benchmarks/precision.py [--steps 60] [--learning-rate 1e-3] [--seed 0] [--tiny]

The launcher files are those that ship, on CPU processes. A CPU emulates float8, if torchao is there: it rounds to
float8 what it multiplies. All runs see the same rows. For each, the table has the largest relative difference of a loss
from that of another run in the same step, and the difference of their means over the last tenth of the steps. The other
run is first one process in float32, then one process in the same precision. --tiny takes a tiny model and two
strategies, so that a test can start it.
"""

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
import conftest  # noqa: F401  Caches of their own.
import helpers

from samerun.cli import load_config

PRECISIONS = {
    "float32": (("--mixed_precision", "no"), "one device", "DDP"),
    "bf16": (("--mixed_precision", "bf16"), *(name for name in helpers.STRATEGIES if name != "fp8.yaml")),
    "fp16": (("--mixed_precision", "fp16"), "one device", "DDP", "FSDP2", "tensor", "sequence, FSDP2"),
    "float8": (("--mixed_precision", "fp8"), "one device", "DDP", "FSDP2", "HSDP", "sequence, FSDP2"),
}
TINY = "one device", "FSDP2"
SETTINGS = {
    "run.log_every": 1,
    "run.eval_every": 0,
    "run.save_every": 0,
    "run.trackers": "[]",
    "batch.max_micro_batch_size": 4,
    "data.files": '["{stdlib}/asyncio/*.py"]',
    "data.sequence_length": 64,
    "data.eval_fraction": 0,
    "eval.prompts": "[]",
    "model.architecture.num_hidden_layers": 2,
    "model.architecture.num_attention_heads": 4,
    "model.architecture.num_key_value_heads": 2,
    "optim.warmup_steps": 3,
}


def read_config(steps: int, learning_rate: float, seed: int, tiny: bool) -> dict:
    settings = SETTINGS | {"run.max_steps": steps, "optim.learning_rate": learning_rate, "run.seed": seed}
    width = 32 if tiny else 64
    settings |= {"model.architecture.hidden_size": width, "model.architecture.intermediate_size": 3 * width}
    words = [str(word) for setting, value in settings.items() for word in (f"--{setting}", value)]
    return load_config(["--config", str(helpers.ROOT / "configs" / "small.yaml"), *words]).model_dump()


def differences(losses: np.ndarray, others: np.ndarray) -> str:
    """The largest relative difference, and that of the mean over the last tenth."""
    last = -max(1, len(losses) // 10)
    largest = np.abs(losses / others - 1).max()
    return f"{largest:12.1e}{losses[last:].mean() / others[last:].mean() - 1:12.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and few strategies, so that a test can run it"
    )
    args = parser.parse_args()
    config, first = read_config(args.steps, args.learning_rate, args.seed, args.tiny), None
    print(f"{'':28}{'last loss':>12}{'from float32':>24}{'from one device':>24}", flush=True)
    for precision, (options, *strategies) in PRECISIONS.items():
        if precision == "float8" and find_spec("torchao") is None:
            print("float8 needs torchao")
            continue
        alone = None
        for strategy in strategies:
            if args.tiny and strategy not in TINY:
                continue
            with tempfile.TemporaryDirectory() as folder:
                config["run"]["output_dir"] = f"{folder}/run"
                losses = np.array(helpers.by_strategy(Path(folder), config, strategy, options=options).losses)
            first = losses if first is None else first
            alone = losses if alone is None else alone
            row = differences(losses, first) + differences(losses, alone)
            print(f"{precision + ', ' + strategy:28}{losses[-1]:12.6f}{row}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
