"""Documents that share a row, with a mask as transformers makes it, and without: processor time and peak memory.

    python tests/benchmarks/documents.py [--lengths 512 2048 8192 16384] [--rounds 3]

A row has documents of log-normal lengths (sigma 0.8), the mean a fifth of the row, seed 0. A micro-batch has four rows
and is one forward and backward pass of a Llama with 4 layers of 256, in float32 on one core. Each variant has a process
of its own, as memory that was once used is not given back; they alternate. Memory is the growth of the process's peak.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
VOCABULARY = 384


def make_row(length: int, rng: np.random.Generator) -> np.ndarray:
    """A row as of train.Dataset.read(), full of documents."""
    ends = [0]
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + max(2, int(rng.lognormal(np.log(length / 5) - 0.32, 0.8)))))
    ids = rng.integers(3, VOCABULARY, length)
    targets = np.append(ids[1:], -100)
    targets[np.array(ends[1:]) - 1] = -100
    positions = np.concatenate([np.arange(size) for size in np.diff(ends)])
    return np.stack([ids, targets, positions])


def measure(variant: str, length: int, rows: int) -> None:
    """One variant, in this process: prints [MiB, seconds]."""
    import torch
    import transformers

    from samerun.config import Model
    from samerun.data.batches import collate
    from samerun.model.build import make_model
    from samerun.model.loss import compute_loss, joins_documents
    from train import token_loss

    torch.set_num_threads(1)
    found = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = make_model(Model(), found, 0, seed=0)
    if variant == "mask":
        model.set_attn_implementation("sdpa")
    rng = np.random.default_rng(0)
    batch = [make_row(length, rng) for _ in range(rows)]
    batch = collate(batch, torch.device("cpu"), joined=joins_documents(model))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    compute_loss(model, batch, token_loss)[0].backward()
    seconds = time.process_time() - began
    print(json.dumps([(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 16384])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", choices=["mask", "documents"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        return measure(args.variant, args.lengths[0], args.rows) or 0

    def once(variant: str, length: int) -> list[float]:
        command = [sys.executable, __file__, "--variant", variant, "--lengths", str(length), "--rows", str(args.rows)]
        return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])

    print(f"{'tokens':>8}{'':4}{'mask':>22}{'documents':>22}   mask / documents: memory, time")
    for length in args.lengths:
        rounds = [[once(variant, length) for variant in ("mask", "documents")] for _ in range(args.rounds)]
        (mask_memory, mask_time), (memory, seconds) = np.median(rounds, axis=0)
        mask, documents = f"{mask_memory:,.0f} MiB {mask_time:.2f} s", f"{memory:,.0f} MiB {seconds:.2f} s"
        ratios = f"{mask_memory / memory:.2f}, {mask_time / seconds:.2f}"
        print(f"{length:8,}{'':4}{mask:>22}{documents:>22}   {ratios}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
