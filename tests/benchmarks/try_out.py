"""What does the check of a divided model cost, before the first step? Against a step.

    python tests/benchmarks/try_out.py [--layers 12] [--width 1024]

Each case launches train.py on CPU processes. A step has 8 rows of 512 tokens. The first one, which warms up, does not
count. All ranks begin and end together what is timed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TENSOR = ["--parallelism_config_tp_size", 2]
CASES = {  # The file of accelerate_configs/, its options, processes, and settings of the model.
    "TP": ("tensor_parallel", TENSOR, 2, {}),
    "FSDP2 x TP": ("fsdp2_tensor_parallel", TENSOR, 4, {}),
    "FSDP2 x TP x PP": ("fsdp2_tensor_parallel", TENSOR, 8, {"pipeline_ranks": 2}),
}
STEPS, ROWS, LENGTH, VOCABULARY = 3, 8, 512, 8192


def write_config(folder: Path, args: argparse.Namespace, model: dict) -> Path:
    import datasets
    import yaml

    datasets.disable_progress_bars()
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (STEPS * ROWS, LENGTH))
    datasets.Dataset.from_dict({"input_ids": ids.tolist()}).save_to_disk(folder / "rows")
    architecture = {"model_type": "llama", "hidden_size": args.width, "intermediate_size": 3 * args.width}
    architecture |= {"num_hidden_layers": args.layers, "num_attention_heads": 8, "vocab_size": VOCABULARY}
    config = {
        "run": {"output_dir": str(folder / "run"), "max_steps": STEPS, "save_every": 0, "trackers": []},
        "batch": {"global_batch_size": ROWS, "max_micro_batch_size": 2},
        "data": {"path": str(folder / "rows"), "format": "tokens", "packing": "none", "sequence_length": LENGTH},
        "model": {"architecture": architecture, **model},
        "optim": {"warmup_steps": 0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def measure(argv: list[str]) -> None:
    """One rank of a launch, in this process: prints the seconds of the check and of each step."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch.distributed as dist
    import wrapper_cpu_as_gpu  # noqa: F401

    import train
    from samerun.parallel.mesh import Parallelism

    def timed(function: Callable) -> Callable:
        def called(*arguments):
            dist.barrier()
            begin = time.perf_counter()
            returned = function(*arguments)
            dist.barrier()
            if dist.get_rank() == 0:
                os.write(1, f"measured {json.dumps(time.perf_counter() - begin)}\n".encode())
            return returned

        return called

    Parallelism.try_out = timed(Parallelism.try_out)
    train.train_step = timed(train.train_step)
    sys.exit(train.main(argv))


def launch(config: Path, launcher: str, options: list, processes: int) -> list[float]:
    """Seconds: of the check, and of each step."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", processes]
    command += ["--config_file", ROOT / "accelerate_configs" / f"{launcher}.yaml", "--mixed_precision", "no"]
    command += ["--main_process_port", 0, *options, __file__, "--measure", "--config", config]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)
    found = [float(seconds) for seconds in re.findall(r"measured ([\d.]+)", done.stdout)]
    if len(found) != 1 + STEPS:
        raise RuntimeError(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--only", nargs="+", default=[""], help="patterns of the cases to measure")
    args = parser.parse_args()
    print("seconds                check      step  share", flush=True)
    for name in [name for name in CASES if any(re.search(pattern, name) for pattern in args.only)]:
        launcher, options, processes, model = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            check, _, *steps = launch(write_config(Path(folder), args, model), launcher, options, processes)
        step = float(np.median(steps))
        print(f"{name:20}{check:8.2f}  {step:8.2f}  {check / step:5.2f}", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2:])
    sys.exit(main())
