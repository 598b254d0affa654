"""How much memory of the host does a rank need before its first step? Against what it keeps of the weights.

    python tests/benchmarks/host_memory.py [--only PATTERN ...] [--layers 24] [--processes 8]

Each case launches train.py on CPU processes, with a model of about 300 million parameters and with a tiny one. The peak
of a process until its first step, less that of the tiny one, is what the model takes. It should be at most the rank's
own part of the weights and twice the largest module: a layer, or a table of embeddings. The worst rank is shown.
"""

import argparse
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DENSE = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
DENSE |= {"num_key_value_heads": 4, "vocab_size": 8192, "num_hidden_layers": 24, "tie_word_embeddings": False}
EXPERTS = DENSE | {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "head_dim": 128}
EXPERTS |= {"moe_intermediate_size": 448, "num_hidden_layers": 12}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "moe_intermediate_size": 16, "head_dim": 8}
LORA = {"dtype": "bfloat16", "lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]}}
# The file of accelerate_configs/, its options, the architecture, whether it is pretrained, and settings of the model.
CASES = {
    "FSDP2, new": ("fsdp2", [], DENSE, False, {}),
    "FSDP2, pretrained": ("fsdp2", [], DENSE, True, {}),
    "FSDP2, LoRA on frozen bf16": ("fsdp2", [], DENSE, True, LORA),
    "FSDP2 x TP x PP, new": (
        "fsdp2_tensor_parallel",
        ["--parallelism_config_tp_size", 2],
        DENSE,
        False,
        {"pipeline_ranks": 2},
    ),
    "FSDP2 x TP x PP, pretrained": (
        "fsdp2_tensor_parallel",
        ["--parallelism_config_tp_size", 2],
        DENSE,
        True,
        {"pipeline_ranks": 2},
    ),
    "FSDP2 x experts, new": ("fsdp2", [], EXPERTS, False, {"expert_ranks": 4}),
    "FSDP2 x experts, pretrained": ("fsdp2", [], EXPERTS, True, {"expert_ranks": 4}),
}


def write_config(folder: Path, architecture: dict, pretrained: bool, model: dict) -> Path:
    import datasets
    import torch
    import transformers
    import yaml

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    datasets.Dataset.from_list([{"input_ids": list(range(64))}] * 32).save_to_disk(folder / "rows")
    if pretrained:
        found = transformers.AutoConfig.for_model(**architecture, max_position_embeddings=64)
        made = transformers.AutoModelForCausalLM.from_config(found)
        made.to(getattr(torch, model.get("dtype", "float32"))).save_pretrained(folder / "start")
    config = {
        "run": {"output_dir": str(folder / "run"), "max_steps": 2, "save_every": 0, "trackers": []},
        "batch": {"global_batch_size": 8},
        "data": {"path": str(folder / "rows"), "format": "tokens", "packing": "none", "sequence_length": 64},
        "model": model | ({"pretrained": str(folder / "start")} if pretrained else {"architecture": architecture}),
        "optim": {"warmup_steps": 0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def measure(argv: list[str]) -> None:
    """One rank of a launch, in this process: prints its peak until the first step, and what it keeps, in MiB."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if os.environ.pop("AS_GPU"):
        import wrapper_cpu_as_gpu  # noqa: F401
    import train
    from samerun.parallel.state import local_tensor

    def first_step(setup, *_):
        peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) / 2**10
        weights = [local_tensor(weight) for weight in setup.parameters if not weight.is_meta]
        kept = sum(weight.numel() * weight.element_size() for weight in weights) / 2**20
        os.write(1, f"measured {json.dumps([peak, kept])}\n".encode())  # In one piece, beside those of other ranks.
        setup.accelerator.wait_for_everyone()
        os._exit(0)

    train.train_step = first_step
    sys.exit(train.main(argv))


def launch(config: Path, launcher: str, options: list, processes: int) -> np.ndarray:
    """[ranks, 2]: the peak and what is kept."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", processes]
    command += ["--config_file", ROOT / "accelerate_configs" / f"{launcher}.yaml", "--mixed_precision", "no"]
    command += ["--main_process_port", 0, *options, __file__, "--measure", "--config", config]
    environment = os.environ | {"AS_GPU": "" if launcher == "cpu" else "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment |= {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)
    found = re.findall(r"measured (\[.*?\])", done.stdout)
    if len(found) != processes:
        raise RuntimeError(done.stdout)
    return np.array([json.loads(line) for line in found])


def largest_module(architecture: dict, model: dict) -> float:
    """MiB of the largest layer or embedding, in the type that it has in memory."""
    import torch
    import transformers

    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**architecture))
    modules = [*made.get_decoder().layers, made.get_input_embeddings()]
    numbers = max(sum(weight.numel() for weight in module.parameters()) for module in modules)
    return numbers * (2 if model.get("dtype") == "bfloat16" else 4) / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="patterns of the cases to measure")
    parser.add_argument("--layers", type=int, help="of the large model, if not about 300 million parameters")
    parser.add_argument("--processes", type=int, default=8)
    args = parser.parse_args()
    worst = 0.0
    print("MiB per rank                      kept  largest module   bound  measured  share", flush=True)
    for name in [name for name in CASES if any(re.search(pattern, name) for pattern in args.only)]:
        launcher, options, architecture, pretrained, model = CASES[name]
        architecture = copy.deepcopy(architecture)
        architecture["num_hidden_layers"] = args.layers or architecture["num_hidden_layers"]
        peaks = []
        for shape in architecture | {key: value for key, value in TINY.items() if key in architecture}, architecture:
            with tempfile.TemporaryDirectory() as folder:
                config = write_config(Path(folder), shape, pretrained, model)
                peaks.append(launch(config, launcher, options, args.processes))
        taken, kept = peaks[1][:, 0] - peaks[0][:, 0].max(), peaks[1][:, 1]
        largest = largest_module(architecture, model)
        rank = int(np.argmax(taken / (kept + 2 * largest)))
        bound = kept[rank] + 2 * largest
        worst = max(worst, taken[rank] / bound)
        row = f"{kept[rank]:7.0f}         {largest:7.0f} {bound:7.0f}   {taken[rank]:7.0f}  {taken[rank] / bound:5.2f}"
        print(f"{name:31}{row}", flush=True)
    return int(worst > 1.0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2:])
    sys.exit(main())
