"""Is the memory that --plan calculates what a step takes? Each strategy on CPU processes, and the share of the two.

    python tests/benchmarks/memory.py [--width 384] [--length 256] [--only PATTERN ...]

A Llama in float32 is trained for some steps by `accelerate launch`, with the launcher files that ship. What is measured
is the peak of a rank's resident memory in the last step, as Linux counts it, less what the process held before it had a
model. glibc is told to give freed memory back at once, so that the resident memory is that of the tensors that live.
The greatest of the ranks counts.

The plan is that of the tensors. The libraries take some MiB for themselves, which are measured by the same launch of a
tiny model: what it takes beyond its tensors. They are taken off before the two are compared.
"""

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTING, CHUNKED = ("--model.gradient_checkpointing", "true"), ("--model.chunked_loss", "true")
SELECTIVE = "--model.gradient_checkpointing", "selective"
ONE_PASS = ("--batch.max_micro_batch_size", "8")
# In place of the Llama, a Mixtral. The weights of its layers are mostly experts.
EXPERTS = "--model.architecture.model_type", "mixtral", "--model.architecture.num_local_experts", "8"
EXPERTS += "--model.architecture.num_experts_per_tok", "2"
DIVIDED = "--model.expert_ranks", "2"
CASES = {  # Launcher file, number of processes, settings.
    "one process": ("single", 1, ()),
    "one process, checkpointing": ("single", 1, CHECKPOINTING),
    "one process, selective": ("single", 1, SELECTIVE),
    "one process, chunked loss": ("single", 1, CHUNKED),
    "one process, both": ("single", 1, CHECKPOINTING + CHUNKED),
    "one process, one micro-step": ("single", 1, ONE_PASS),
    "DDP 2": ("cpu", 2, ()),
    "DDP 2, both": ("cpu", 2, CHECKPOINTING + CHUNKED),
    "DDP 2, one micro-step": ("cpu", 2, ONE_PASS),
    "FSDP2 2": ("fsdp2", 2, ()),
    "FSDP2 2, both": ("fsdp2", 2, CHECKPOINTING + CHUNKED),
    "FSDP2 2, selective": ("fsdp2", 2, SELECTIVE),
    "FSDP2 2, one micro-step": ("fsdp2", 2, ONE_PASS),
    "FSDP2 2, immediate": ("fsdp2", 2, ("--batch.accumulation", "immediate")),
    "tensor parallelism 2": ("tensor_parallel", 2, ()),
    "tensor parallelism 2, selective": ("tensor_parallel", 2, SELECTIVE),
    "tensor parallelism 2, both": ("tensor_parallel", 2, CHECKPOINTING + CHUNKED),
    "sequence parallelism 2": ("sequence_parallel", 2, ()),
    "sequence parallelism 2, both": ("sequence_parallel", 2, CHECKPOINTING + CHUNKED),
    "context parallelism 2": ("context_parallel", 2, ()),
    "context parallelism 2, both": ("context_parallel", 2, CHECKPOINTING + CHUNKED),
    "experts, one process": ("single", 1, EXPERTS),
    "experts, DDP 2": ("cpu", 2, EXPERTS),
    "experts, FSDP2 2": ("fsdp2", 2, EXPERTS),
    "experts, FSDP2 2, both": ("fsdp2", 2, EXPERTS + CHECKPOINTING + CHUNKED),
    "expert parallelism 2": ("fsdp2", 2, EXPERTS + DIVIDED),
    "expert parallelism 2, both": ("fsdp2", 2, EXPERTS + DIVIDED + CHECKPOINTING + CHUNKED),
    "expert parallelism 2 x 2": ("fsdp2", 4, EXPERTS + DIVIDED),
    "pipeline 2": ("cpu", 2, ("--model.pipeline_ranks", "2")),
    "pipeline 2, both": ("cpu", 2, ("--model.pipeline_ranks", "2", *CHECKPOINTING, *CHUNKED)),
}
TINY = 32, 32  # Width and tokens of a row.
GROUPS = {
    "tensor_parallel": ["--parallelism_config_tp_size", "2"],
    "sequence_parallel": ["--parallelism_config_sp_size", "2"],
    "context_parallel": ["--parallelism_config_cp_size", "2"],
}


def write_config(folder: Path, width: int, length: int) -> Path:
    """8 rows of so many tokens in a step, at most 2 at a time."""
    import datasets
    import yaml

    datasets.disable_progress_bars()
    rows = [{"input_ids": [token % 256 for token in range(length)]}] * 8
    datasets.Dataset.from_list(rows).save_to_disk(folder / "rows")
    architecture = {"model_type": "llama", "vocab_size": 4 * width, "hidden_size": width, "num_hidden_layers": 8}
    architecture |= {"intermediate_size": 3 * width, "num_attention_heads": 4, "num_key_value_heads": 2}
    architecture |= {"use_cache": False, "tie_word_embeddings": False}
    config = {  # In the second step, DDP has its old and its new buckets at a time.
        "run": {"output_dir": "set below", "max_steps": 3, "log_every": 1, "save_every": 0, "trackers": []},
        "batch": {"global_batch_size": 8, "max_micro_batch_size": 2},
        "data": {"path": str(folder / "rows"), "format": "tokens"},
        "model": {"architecture": architecture},
    }
    config["data"] |= {"packing": "none", "sequence_length": length}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def resident(name: str) -> int:
    """A line of what Linux says about the memory of this process, in KiB."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


def measure(argv: list[str]) -> None:
    """One rank of a launch, in this process: prints the peak of its last step."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if os.environ.pop("AS_GPU"):
        import wrapper_cpu_as_gpu  # noqa: F401
    import train

    before = []
    build_model, train_step = train.build_model, train.train_step

    @functools.wraps(build_model)
    def noted(*args, **options):
        if not before:
            before.append(resident("RssAnon"))
        return build_model(*args, **options)

    def measured(*args):
        Path("/proc/self/clear_refs").write_text("5")  # The peak is from now on.
        result = train_step(*args)
        before.append(resident("VmHWM") - resident("RssFile"))  # Code is no tensor.
        return result

    train.build_model, train.train_step = noted, measured
    status = train.main(argv)
    print(f"measured {(before[-1] - before[0]) / 2**20:.4f} GiB", flush=True)
    sys.exit(status)


def launch(script: list, launcher: str, processes: int) -> str:
    options = ["--config_file", ROOT / "accelerate_configs" / f"{launcher}.yaml", "--mixed_precision", "no"]
    options += ["--num_processes", processes, "--main_process_port", 0, *GROUPS.get(launcher, [])]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, *script]
    environment = os.environ | {"AS_GPU": "" if launcher == "cpu" else "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment |= {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout)
    return done.stdout


def calculated_and_measured(config: Path, name: str) -> tuple[float, float]:
    """GiB per device."""
    launcher, processes, settings = CASES[name]
    words = ["--config", config, "--run.output_dir", config.parent / name.replace(" ", "-"), *settings]
    table = launch([ROOT / "train.py", *words, "--perf.device_memory_gib", 1000, "--plan", processes], launcher, 1)
    calculated = float(re.search(rf"all\n\s*{processes} .* ([\d.]+)", table).group(1))
    output = launch([__file__, "--rank", *words], launcher, processes)
    return calculated, max(map(float, re.findall(r"measured ([\d.]+) GiB", output)))


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        measure(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--only", nargs="+", default=[""], help="patterns of the cases to measure")
    args = parser.parse_args()
    names = [name for name in CASES if any(re.search(pattern, name) for pattern in args.only)]
    if not names:
        parser.error(f"--only matches none of: {'; '.join(CASES)}")
    worst = 0.0
    print("GiB per device               calculated  measured  of it libraries  share", flush=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as tiny_folder:
        config = write_config(Path(folder), args.width, args.length)
        tiny_config = write_config(Path(tiny_folder), *TINY)
        for name in names:
            tiny, measured = calculated_and_measured(tiny_config, name)
            libraries = measured - tiny
            calculated, measured = calculated_and_measured(config, name)
            share = calculated / (measured - libraries)
            worst = max(worst, abs(share - 1))
            print(f"{name:32}{calculated:7.3f}   {measured:7.3f}         {libraries:7.3f}  {share:5.2f}", flush=True)
    print(f"the calculated ones are within {worst:.0%} of the measured ones without the libraries")
    return int(worst > 0.1)


if __name__ == "__main__":
    sys.exit(main())
