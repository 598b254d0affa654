"""Could the device ever wait for rows? The time to read a step's rows, against the least that a step can take.

    python tests/benchmarks/data_wait.py [--config configs/pretrain_1b.yaml] [--devices 1 8] [--tflops 989] [--steps 24]

The rows are the config's, cut from documents of web-like lengths (log-normal, median 600 tokens, sigma 1.0, seed 0) in
memory-mapped Arrow. The least that a step can take is its matrix FLOPs at the device's peak, which no training reaches:
what it prints is the most that reading can cost where nothing else is slow. --tflops 989 is an H200's dense bf16.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import train
from samerun.cli import load_config
from samerun.config import Data
from samerun.data.batches import collate, load_step
from samerun.data.load import load_data
from samerun.data.rows import Dataset
from samerun.model.architecture import model_config
from samerun.model.build import flops_per_token
from samerun.plan import Stage

VOCABULARY = 49_152  # That of the tokenizer of pretrain_1b.yaml, which is on the Hub.


def make_rows(folder: Path, tokens: int, config: Data) -> Dataset:
    """About so many tokens as rows of the config."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(600), 1.0, tokens // 900).astype(int) + 1
    documents = [rng.integers(0, VOCABULARY, length, dtype=np.int32) for length in lengths]
    datasets.Dataset.from_dict({"input_ids": documents}).save_to_disk(folder / "rows")
    update = {"path": str(folder / "rows"), "files": [], "format": "tokens", "eval_fraction": 0.0}
    return load_data(config.model_copy(update=update), None, 0)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/pretrain_1b.yaml")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tflops", type=float, default=989, help="peak of a device, in TFLOP/s")
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    datasets.disable_progress_bars()
    config = load_config(["--config", args.config])
    length, limit = config.data.sequence_length, config.batch.max_micro_batch_size
    limit = config.global_batch_size if limit == "auto" else limit
    flops = flops_per_token(model_config(config, VOCABULARY), config.model.lora, length)
    print(f"{flops / 1e9:.2f} GFLOPs per token, {config.global_batch_size} rows of {length} tokens per step")
    print("devices  reading ms  least step ms   share")
    with tempfile.TemporaryDirectory() as folder:
        data = make_rows(Path(folder), 4 * config.global_batch_size * length, config.data)
        for devices in args.devices:
            plan = train.plan_batch(config.global_batch_size, limit, devices, length)
            stage = Stage(1, 0, plan)
            took = []
            for step in range(1, args.steps + 1):
                begin = time.perf_counter()
                load_step(step, data, stage, 0, True, torch.device("cpu"), collate)
                took.append(time.perf_counter() - begin)
            reading, least = np.median(took), plan.tokens_per_step / devices * flops / (args.tflops * 1e12)
            print(f"{devices:7}  {reading * 1e3:10.2f}  {least * 1e3:13.1f}  {reading / least:6.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
