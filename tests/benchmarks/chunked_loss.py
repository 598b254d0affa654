"""What does model.chunked_loss save and cost? Peak memory and time of the loss and its gradients at a large vocabulary.

    python tests/benchmarks/chunked_loss.py [--rounds 3] [--vocab-size 50000] [--tokens 8192]

A Llama of two narrow layers, so that next to nothing but the output layer counts, in float32 on the CPU. Each variant
has a process of its own, as memory that was once used is not given back; they alternate. Memory is the growth of the
process's peak by one forward and backward pass. The gradients of the output layer and the embedding are in it.
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
WIDTH, LENGTH = 256, 1024


def measure(chunked: bool, vocab_size: int, tokens: int) -> None:
    """One variant, in this process: prints [MiB, seconds]."""
    import torch
    import transformers

    import train

    found = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    model = train.build_model(train.Model(), found, 0, seed=0)
    ids = np.random.default_rng(0).integers(0, vocab_size, (tokens // LENGTH, LENGTH))
    batch = train.collate([np.stack([row, row, np.arange(LENGTH)]) for row in ids], torch.device("cpu"))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    loss, _ = train.compute_loss(model, batch, chunked)
    loss.backward()
    seconds = time.perf_counter() - began
    print(json.dumps([(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--variant", choices=["whole", "chunked"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        return measure(args.variant == "chunked", args.vocab_size, args.tokens) or 0
    rounds = []
    for _ in range(args.rounds):
        command = [sys.executable, __file__, "--vocab-size", str(args.vocab_size), "--tokens", str(args.tokens)]
        lines = [
            subprocess.check_output([*command, "--variant", variant], text=True).splitlines()[-1]
            for variant in ("whole", "chunked")
        ]
        rounds.append([json.loads(line) for line in lines])
    of = np.array(rounds)  # [round, variant, (MiB, seconds)]
    print(f"{args.tokens:,} tokens, vocabulary {args.vocab_size:,}, {args.rounds} rounds: median [least, greatest]")
    for at, variant in enumerate(("all logits at once", "1,024 tokens at a time")):
        texts = [f"{np.median(of[:, at, k]):8.1f} [{of[:, at, k].min():.1f}, {of[:, at, k].max():.1f}]" for k in (0, 1)]
        print(f"{variant:24}{texts[0]} MiB{texts[1]} s")
    shares = np.median(of[:, 1] / of[:, 0], axis=0)
    print(f"chunked / whole: memory {shares[0]:.2f}, time {shares[1]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
