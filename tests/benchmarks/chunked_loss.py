"""What does model.chunked_loss save and cost? Peak memory and time of a training pass with a large vocabulary.

    python tests/benchmarks/chunked_loss.py [--rounds 3] [--vocab-size 50257] [--tokens 8192] [--bf16]
    python tests/benchmarks/chunked_loss.py --layers 12 --width 768 --tokens 2048

A Llama, forward and backward on the CPU, by default of two narrow layers, so that little but the output layer counts.
The second one is about as large as GPT-2. Beside it, torch's own linear_cross_entropy() in chunks, which knows no
other loss than that. Each variant has a process of its own, as memory that was once used is not given back; they
alternate. Memory is the growth of the process's peak by the first pass, the gradients of all weights included. Time is
the median of the passes after it.
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
VARIANTS = {"whole": "all logits at once", "chunked": "model.chunked_loss", "torch": "linear_cross_entropy"}


def loss_by_torch(model, batch):
    """The loss by torch's function, in its own choice of chunks."""
    import torch

    import train

    states = model.model(**train.model_inputs(model, batch))[0].flatten(0, 1)
    options = torch.nn.LinearCrossEntropyOptions()
    arguments = states, model.lm_head.weight.to(states.dtype), batch["targets"].flatten()
    return torch.nn.functional.linear_cross_entropy(*arguments, reduction="sum", options=options)


def measure(args: argparse.Namespace) -> None:
    """One variant, in this process: prints [MiB, seconds]."""
    import torch
    import transformers

    import train

    found = transformers.LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        use_cache=False,
    )
    model = train.build_model(train.Model(), found, 0, seed=0)
    length = min(1024, args.tokens)
    ids = np.random.default_rng(0).integers(0, args.vocab_size, (args.tokens // length, length))
    batch = train.collate([np.stack([row, row, np.arange(length)]) for row in ids], torch.device("cpu"), joined=True)
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(1 + args.passes):
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            if args.variant == "torch":
                loss = loss_by_torch(model, batch)
            else:
                loss, _ = train.compute_loss(model, batch, args.variant == "chunked")
        (loss / args.tokens).backward()
        seconds.append(time.perf_counter() - began)
        if len(seconds) == 1:
            memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        model.zero_grad()
    print(json.dumps([memory, float(np.median(seconds[1:]))]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=3, help="that are timed, after the first one")
    parser.add_argument("--vocab-size", type=int, default=50_257)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        measure(args)
        return 0
    rounds = []
    for _ in range(args.rounds):
        lines = []
        for variant in VARIANTS:
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
            lines.append(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
        rounds.append(lines)
    of = np.array(rounds)  # [round, variant, (MiB, seconds)]
    model = f"vocabulary {args.vocab_size:,}, {args.layers} layers of {args.width}"
    print(f"{args.tokens:,} tokens, {model}, {args.rounds} rounds:")
    print("median [least, greatest], and the medians of the shares")
    shares = np.median(of / of[:, :1], axis=0)
    for at, name in enumerate(VARIANTS.values()):
        texts = [f"{np.median(of[:, at, k]):8.1f} [{of[:, at, k].min():.1f}, {of[:, at, k].max():.1f}]" for k in (0, 1)]
        print(f"{name:24}{texts[0]} MiB{texts[1]} s   memory {shares[at, 0]:.2f}, time {shares[at, 1]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
