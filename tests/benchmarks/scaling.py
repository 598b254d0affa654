"""What does a step cost on machines that you do not have? Compute time, traffic and memory, calculated.

    python tests/benchmarks/scaling.py --config configs/pretrain_1b.yaml --vocab-size 49152 \\
        --devices 8 16 64 --tflops 400 --gb-per-second 300 50 50 [--section.field VALUE ...]
    python tests/benchmarks/scaling.py --count 2 4

The first prints, for each number of devices, train.py's own plan and what follows from it:

compute        FLOPs of the model (PaLM, arXiv:2204.02311, appendix B, as train.py's perf/mfu counts them) for the rows
               of the busiest device, at --tflops: the TFLOP/s that a device reaches, its peak times the MFU.
moved          Bytes that a device sends, and receives, per step. A ring all-reduce of S bytes over n devices moves
               2 (n - 1) / n S per device (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009), a reduce-scatter
               or an all-gather half of that. DDP all-reduces gradients; FSDP2, as stage 3 of ZeRO (arXiv:1910.02054,
               section 7; PyTorch FSDP, arXiv:2304.11277), gathers weights for every forward and backward pass and
               reduce-scatters gradients. See cost().
comm.          Bytes moved, at --gb-per-second: the bus bandwidth of nccl-tests (its doc/PERFORMANCE.md), which is
               defined by the same factors. Over several nodes that is at most the sum of a node's network links.
share          Of communication in the step if nothing of it overlaps with compute: an upper bound.
held           Weights, gradients and AdamW's moments. Activations, the bf16 weights of the pass that runs and buffers
               of the libraries come on top.

Latency, which rules at many small messages, is left out, and so are the few bytes of losses, norms and buffers.

The second counts the collectives of the launcher files as they ship, and the bytes that are held between micro-steps,
on so many CPU processes (gloo), where train.py trains a tiny model; exit status 1 if that is not what cost() says.
"""

import argparse
import copy
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import accelerate
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import train
from samerun.cli import load_config
from samerun.config import Model
from samerun.errors import UserError
from samerun.model.architecture import model_config
from samerun.model.build import flops_per_token
from samerun.model.lora import add_lora
from samerun.model.tokenizer import load_tokenizer

# Bytes of a number. The files of accelerate_configs/ for several GPUs say bf16: weights and gradients stay float32, and
# gradients are added up in that; FSDP2 rounds its shards before it gathers them.
WEIGHT = GRADIENT = 4
MOMENTS = 8
GATHERED = 2
LAUNCHERS = {"DDP": "multi_gpu", "FSDP2": "fsdp2", "HSDP": "hsdp"}
WAYS = [("DDP", "deferred"), ("DDP", "immediate")]  # With the values of batch.accumulation.
WAYS += [("FSDP2", "deferred"), ("FSDP2", "immediate"), ("FSDP2", "kept_weights")]
COPIES = 2  # Of HSDP, where it is counted.


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters."""

    trained: int
    regathered: int  # FSDP2 gathers these for the forward pass and again for the backward pass, the others once.
    frozen: int = 0
    frozen_bytes: int = 4  # Of each frozen one.


@dataclass(frozen=True)
class Cost:
    """Bytes on one device: of the whole tensors that a step's collectives gather and reduce, moved for that, held."""

    gathered: int
    reduced: int
    moved: float
    held: float


def count_weights(found: transformers.PreTrainedConfig, model: Model) -> Weights:
    """Of the model that train.py would build, without building it."""
    with torch.device("meta"):
        meta = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(found))
        meta = add_lora(meta, model.lora) if model.lora else meta
    # Accelerate makes a unit of every decoder layer, of an embedding that is not also the output layer, and of the
    # final norm with the output layer. Only the last keeps what it has gathered until its backward pass.
    embedding, output = meta.get_input_embeddings(), meta.get_output_embeddings()
    units = [module for module in meta.modules() if type(module).__name__ in (meta._no_split_modules or [])]
    units += [embedding] if embedding.weight is not output.weight else []
    trained = sum(p.numel() for p in meta.parameters() if p.requires_grad)
    total = sum(p.numel() for p in meta.parameters())
    regathered = sum(p.numel() for unit in units for p in unit.parameters())
    return Weights(trained, regathered, total - trained, 2 if model.dtype == "bfloat16" else 4)


def cost(strategy: str, accumulation: str, weights: Weights, devices: int, micro_steps: int) -> Cost:
    """Of a step of so many micro-steps. Deferred, gradients are reduced in the last one only.

    DDP's gradients are views of its buckets, which stay. FSDP2 holds those that wait whole, in the dtype in which they
    will be reduced, in place of their shards. HSDP is FSDP2 in each of COPIES, which reduce shards between them.
    """
    reductions = 1 if accumulation == "deferred" else micro_steps
    waiting = GRADIENT * weights.trained if micro_steps > reductions and devices > 1 else 0
    frozen, states = weights.frozen * weights.frozen_bytes, (WEIGHT + MOMENTS) * weights.trained
    gradients, ring = GRADIENT * weights.trained, (devices - 1) / devices
    if strategy == "DDP":
        reduced = reductions * gradients
        return Cost(0, reduced, ring * 2 * reduced, frozen + states + gradients)
    shards = devices // COPIES if strategy == "HSDP" else devices
    ring = (shards - 1) / shards
    once = GATHERED * (weights.trained + weights.frozen)
    gathered, kept = micro_steps * (once + GATHERED * weights.regathered), 0
    if accumulation == "kept_weights":
        gathered, kept = once, once if micro_steps > 1 else 0
    held = (frozen + states) / shards + kept + (waiting or gradients / shards)
    reduced, moved = reductions * gradients, ring * (gathered + reductions * gradients)
    if strategy == "HSDP":
        between = (1 if accumulation == "within_copies" else reductions) * gradients / shards
        reduced, moved = reduced + between, moved + 2 * (COPIES - 1) / COPIES * between
    return Cost(gathered, reduced, moved, held)


def positive(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


def scaling_table(
    argv: list[str], devices: list[int], tflops: float, speeds: list[float], vocab_size: int | None = None
) -> str:
    """The table for a command line of train.py. Speeds are in GB/s, one for each number of devices."""
    config = load_config(argv)
    length, rows, limit = config.data.sequence_length, config.global_batch_size, config.batch.max_micro_batch_size
    vocab_size = vocab_size or len(load_tokenizer(config.data, config.model))
    found = model_config(config, vocab_size)
    weights, flops = count_weights(found, config.model), flops_per_token(found, config.model.lora, length)
    total = weights.trained + weights.frozen
    lines = [
        f"{total:,} parameters, {flops / 1e6:,.1f} MFLOPs per token, {rows * length:,} tokens per step, "
        f"{tflops:g} TFLOP/s per device",
        "devices  accumulation  compute s  GB/s  strategy  sync          "
        "moved GB  comm. s  share  held GB  bytes/parameter",
    ]
    for n, speed in zip(devices, speeds):
        plan = train.plan_batch(rows, rows if limit == "auto" else limit, n, length)
        compute = math.ceil(rows / n) * length * flops / (tflops * 1e12)
        # In a step of one micro-step nothing can be deferred, and one device has nothing to share.
        cases = WAYS if plan.grad_accum_steps > 1 else [("DDP", "either"), ("FSDP2", "either")]
        for strategy, sync in cases if n > 1 else [("DDP", "either")]:
            costs = cost(strategy, sync, weights, n, plan.grad_accum_steps)
            seconds = costs.moved / (speed * 1e9)
            lines.append(
                f"{n:7,}  {plan.grad_accum_steps:12,}  {compute:9.3f}  {speed:4g}  {strategy if n > 1 else 'none':8}  "
                f"{sync if n > 1 else 'none':12}  {costs.moved / 1e9:8.2f}  {seconds:7.3f}  "
                f"{seconds / (seconds + compute):5.1%}  {costs.held / 1e9:7.2f}  {costs.held / total:15.2f}"
            )
    return "\n".join(lines)


# Counting ------------------------------------------------------------------------------------------------------------
STEPS, MICRO_STEPS, ROWS = 2, 4, 16
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # All divisible by 2 and 4, since FSDP2 fills up what is not.
NAMES = {"_allgather_base_": "gathered", "_reduce_scatter_base_": "reduced", "allreduce_": "reduced"}


class Collectives(TorchDispatchMode):
    """While entered, adds up the bytes of the whole tensors that this process's collectives gather or reduce."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":  # The shard and the whole, or a list of what is reduced in place.
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            name = NAMES.get(func._schema.name.removeprefix("c10d::"), "other")
            self.bytes[name] += max((leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)), default=0)
        return func(*args, **(kwargs or {}))


def held_bytes() -> int:
    """Of the floating-point tensors of this process, each storage once. Weights that FSDP2 has freed have size 0."""
    time.sleep(0.2)  # A thread of gloo lets go of what it has reduced a moment after the step has ended.
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def worker(file: Path, argv: list[str]) -> int:
    """train.py in this process of a launch; the first writes what it counted in the last step."""
    micro_steps, accumulate = [], accelerate.Accelerator.accumulate

    @contextmanager
    def counted(self, *models):
        with Collectives() as collectives, accumulate(self, *models):
            yield
        micro_steps.append((collectives.bytes, held_bytes()))

    accelerate.Accelerator.accumulate = counted
    code = train.main(argv)
    assert code or len(micro_steps) == STEPS * MICRO_STEPS
    if os.environ["RANK"] == "0":
        last = micro_steps[-MICRO_STEPS:]  # By then the optimizer has its moments.
        moved = sum((moved for moved, _ in last), Counter())
        file.write_text(json.dumps({**moved, "held": max(held for _, held in last)}))
    return code


def count(folder: Path, strategy: str, sync: str, processes: int, tied: bool = True) -> tuple[dict, Cost]:
    """What a step of the tiny model gathers, reduces and holds on CPU processes, and what cost() says."""
    import helpers

    config = helpers.tiny_config(folder)
    config["run"]["max_steps"] = STEPS
    config["batch"] = {"global_batch_size": ROWS, "max_micro_batch_size": ROWS // processes // MICRO_STEPS}
    config["model"] = {"architecture": {"model_type": "llama", **SHAPE, "tie_word_embeddings": tied}}
    config["optim"]["warmup_steps"] = 0
    path = helpers.write_config(folder, config)
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        ROOT / "accelerate_configs" / f"{LAUNCHERS[strategy]}.yaml",
        "--num_processes",
        processes,
        *(["--num_machines", 1] if strategy == "HSDP" else []),
        "--main_process_port",
        0,
        ROOT / "tests" / "wrapper_cpu_as_gpu.py",
        __file__,
        "--worker",
        folder / "counted.json",
        "--config",
        path,
        "--batch.accumulation",
        sync,
    ]
    process = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"},
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        helpers.kill_tree(process)
    assert process.returncode == 0, output
    settings = load_config(["--config", str(path)])
    weights = count_weights(model_config(settings, helpers.VOCABULARY), settings.model)
    expected = cost(strategy, sync, weights, processes, MICRO_STEPS)
    return json.loads((folder / "counted.json").read_text()), expected


def count_all(processes: list[int]) -> int:
    print(
        f"Bytes per step of {MICRO_STEPS} micro-steps, counted / calculated\nprocesses  strategy  sync           "
        f"{'gathered':>19}  {'reduced':>19}  {'held':>19}"
    )
    wrong = False
    for n in processes:
        of_copies = [("HSDP", sync) for sync in ("deferred", "immediate", "within_copies")]
        for strategy, sync in WAYS + (of_copies if n > COPIES else []):
            with tempfile.TemporaryDirectory() as folder:
                counted, expected = count(Path(folder), strategy, sync, n)
            pairs = [(counted.get(name, 0), getattr(expected, name)) for name in ("gathered", "reduced", "held")]
            # Held are also a few numbers that are not the model's, such as rotary frequencies and AdamW's counts.
            wrong |= not all(math.isclose(got, true, rel_tol=0.01) for got, true in pairs)
            cells = (f"{got:,} / {true:,.0f}" for got, true in pairs)
            print(f"{n:9}  {strategy:8}  {sync:13}  " + "  ".join(f"{cell:>19}" for cell in cells), flush=True)
    return int(wrong)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--devices", nargs="+", type=int, help="numbers of devices")
    parser.add_argument("--tflops", type=positive, help="model TFLOP/s that a device reaches: peak times MFU")
    parser.add_argument(
        "--gb-per-second",
        nargs="+",
        type=positive,
        help="bus bandwidth in GB/s: one for all numbers of devices, or one for each",
    )
    parser.add_argument("--vocab-size", type=int, help="in place of the tokenizer's, which may need the Hub")
    parser.add_argument("--count", nargs="+", type=int, choices=(2, 4), metavar="PROCESSES", help="2, 4 or both")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args(argv)
    if args.worker:
        return worker(args.worker, rest)
    if args.count:
        return count_all(args.count)
    if not (args.devices and args.tflops and args.gb_per_second and min(args.devices) > 0):
        parser.error("give --config, --devices, --tflops and --gb-per-second; or --count")
    speeds = args.gb_per_second * (len(args.devices) if len(args.gb_per_second) == 1 else 1)
    if len(speeds) != len(args.devices):
        parser.error(f"--gb-per-second: one value, or {len(args.devices)} for as many --devices; not {len(speeds)}")
    try:
        print(scaling_table(rest, args.devices, args.tflops, speeds, args.vocab_size))
    except UserError as error:
        hint = "" if args.vocab_size else "\nWith --vocab-size no tokenizer is needed."
        print(f"error: {error}{hint}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
