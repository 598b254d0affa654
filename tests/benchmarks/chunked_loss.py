"""What does model.chunked_loss save and cost? Peak memory and time of a training pass with a large vocabulary.

    python tests/benchmarks/chunked_loss.py [--rounds 5] [--vocab-size 50257] [--tokens 8192] [--masked 0.7] [--bf16]
    python tests/benchmarks/chunked_loss.py --layers 12 --width 768 --tokens 2048
    python tests/benchmarks/chunked_loss.py --launch "one device" DDP FSDP2 [--compile] [--rounds 2]

A Llama, forward and backward on the CPU, by default of two narrow layers, so that little but the output layer counts.
The second one is about as large as GPT-2. Beside it, torch's own linear_cross_entropy() in chunks, which knows no
other loss than that. Memory is the growth of the peak of a process that makes one pass, the gradients of all weights
included. Each variant has a process of its own, as memory that was once used is not given back. For the time, all
variants take turns in another process, whose first turn does not count.

The last one runs train.py with and without it in turn, under strategies of tests/helpers.py. What it compares there are
the peak of a whole process, optimizer and libraries included, and the tokens per second of later steps.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
VARIANTS = {"whole": "all logits at once", "chunked": "model.chunked_loss", "torch": "linear_cross_entropy"}
STEPS, WARM_UP = 10, 3  # Of a launch.


def loss_by_torch(model, batch):
    """The loss by torch's function, in its own choice of chunks."""
    import torch

    from samerun.model.loss import model_inputs

    states = model.model(**model_inputs(model, batch))[0].flatten(0, 1)
    options = torch.nn.LinearCrossEntropyOptions()
    arguments = states, model.lm_head.weight.to(states.dtype), batch.targets.flatten()
    return torch.nn.functional.linear_cross_entropy(*arguments, reduction="sum", options=options)


def prepare(args: argparse.Namespace) -> tuple:
    """A model, and a batch of random tokens in rows of at most 1,024."""
    import torch
    import transformers

    from samerun.config import Model
    from samerun.data.batches import collate
    from samerun.model.build import make_model

    model = make_model(Model(), transformers.LlamaConfig(**architecture(args)), 0, seed=0)
    length = min(1024, args.tokens)
    ids = np.random.default_rng(0).integers(0, args.vocab_size, (args.tokens // length, length))
    rows = [np.stack([row, row, np.arange(length)]) for row in ids]
    for row in rows:
        row[1, : round(args.masked * length)] = -100
    batch = collate(rows, torch.device("cpu"), joined=True)
    return model, batch


def seconds_of_pass(args: argparse.Namespace, variant: str, model, batch: dict) -> float:
    import torch

    from samerun.model.loss import compute_loss
    from train import token_loss

    began = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        if variant == "torch":
            loss = loss_by_torch(model, batch)
        else:
            loss, _ = compute_loss(model, batch, token_loss, variant == "chunked")
    (loss / args.tokens).backward()
    seconds = time.perf_counter() - began
    model.zero_grad()
    return seconds


def measure(args: argparse.Namespace) -> None:
    """In this process: prints the MiB that a pass of one variant takes, or the seconds of each pass of all."""
    model, batch = prepare(args)
    if args.measure == "time":
        turns = [[seconds_of_pass(args, variant, model, batch) for variant in VARIANTS] for _ in range(1 + args.rounds)]
        print(json.dumps(turns[1:]))
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds_of_pass(args, args.measure, model, batch)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def measured(what: str) -> list | float:
    """What another process prints that measures this, with the same options."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", what]
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


def architecture(args: argparse.Namespace) -> dict:
    return {
        "vocab_size": args.vocab_size,
        "hidden_size": args.width,
        "intermediate_size": 2 * args.width,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 4,
        "use_cache": False,
    }


def config_of_run(args: argparse.Namespace, folder: Path) -> dict:
    """Steps of as many random tokens as a micro-batch has, on two ranks of a half each."""
    import datasets

    length = min(512, args.tokens // 2)
    ids = np.random.default_rng(0).integers(0, args.vocab_size, (8 * args.tokens // length, length))
    targets = ids.copy()
    targets[:, : round(args.masked * length)] = -100
    rows = datasets.Dataset.from_dict({"input_ids": ids.tolist(), "labels": targets.tolist()})
    rows.save_to_disk(folder / "rows")
    batch = args.tokens // length
    return {
        "run": {"max_steps": STEPS, "log_every": 1, "eval_every": 0, "save_every": 0, "trackers": []},
        "batch": {"global_batch_size": batch, "max_micro_batch_size": batch},
        "data": {"path": str(folder / "rows"), "format": "tokens", "packing": "none", "sequence_length": length},
        "model": {
            "architecture": {"model_type": "llama", **architecture(args)},
            "compile": "regional" if args.compile else "none",
        },
        "optim": {"learning_rate": 1e-4},
    }


def compare_launches(args: argparse.Namespace) -> None:
    """Prints a line for each strategy: with the setting, as a share of without it."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import by_strategy

    precision = "bf16" if args.bf16 else "no"  # Most CPUs multiply bf16 without their fast kernels.
    for strategy in args.launch:
        found = []  # [round, variant, (peak, seconds per token)]
        for _ in range(args.rounds):
            turn = []
            for chunked in "false", "true":
                with tempfile.TemporaryDirectory() as folder:
                    config = config_of_run(args, Path(folder))
                    options = "--mixed_precision", precision
                    chosen = "--model.chunked_loss", chunked
                    done = by_strategy(Path(folder), config, strategy, *chosen, options=options)
                    speeds = done.logged("perf/tokens_per_second")[WARM_UP:]
                    turn.append((max(done.logged("perf/peak_memory_gib")), 1 / np.median(speeds)))
            found.append(turn)
        found = np.array(found)
        memory, seconds = np.median(found[:, 1] / found[:, 0], axis=0)
        print(f"{strategy:24}memory {memory:.2f}, time {seconds:.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of the timed passes; memory is measured once")
    parser.add_argument("--vocab-size", type=int, default=50_257)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--masked", type=float, default=0.0, help="share of the tokens without a target, as of a chat")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--launch", nargs="+", metavar="STRATEGY", help="run train.py under these")
    parser.add_argument("--compile", action="store_true", help="with --launch: model.compile regional")
    parser.add_argument("--measure", choices=[*VARIANTS, "time"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args)
        return 0
    if args.launch:
        compare_launches(args)
        return 0
    memory = {variant: measured(variant) for variant in VARIANTS}
    seconds = np.array(measured("time"))  # [round, variant]
    model = f"{args.masked:.0%} masked, vocabulary {args.vocab_size:,}, {args.layers} layers of {args.width}"
    print(f"{args.tokens:,} tokens, {model}, {args.rounds} rounds:")
    print(
        "memory; time, median [least, greatest]; both as a share of the first line's, with the median over the rounds"
    )
    shares = np.median(seconds / seconds[:, :1], axis=0)
    for at, (variant, name) in enumerate(VARIANTS.items()):
        of = seconds[:, at]
        text = f"{memory[variant]:8.1f} MiB{np.median(of):8.2f} [{of.min():.2f}, {of.max():.2f}] s"
        print(f"{name:24}{text}   memory {memory[variant] / memory['whole']:.2f}, time {shares[at]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
