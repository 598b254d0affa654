"""What several test files need: tiny models and rows made on the spot, and train.py run as a user runs it.

config = tiny_config(tmp_path)                  rows, model and settings; change it like any dict
done = launch(tmp_path, config, "--run.max_steps", "3", processes=2)     accelerate launch, a real process group
done = launch(..., warm=True)                   the same processes without the launcher and the imports, see warm.py
done = run(tmp_path, config)                    one process, this one, through main(argv)
done.output, done.metrics, done.losses, done.weights, done.status
"""

import contextlib
import functools
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
import psutil
import pytest
import torch
import transformers
import warm as warm_process
import yaml
from safetensors.torch import load_file

import train
from samerun.config import Data
from samerun.data.load import Dataset, load_data
from samerun.model import build

ROOT = Path(__file__).resolve().parents[1]
# Tests run beside each other, and the threads of one would wait for those of the others: main() leaves it at one here.
torch.set_num_threads(1)
torch.set_num_threads = lambda count: None
VOCABULARY = 384  # That of the bytes tokenizer, so that train.py leaves the model's embedding as it is.


@dataclass(frozen=True)
class Done:
    """A command that has ended, and what its run folder holds."""

    code: int
    output: str
    folder: Path

    @property
    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def logged(self, key: str) -> list:
        """The values of one metric, in the order of the file."""
        return [line[key] for line in self.metrics if key in line]

    @property
    def losses(self) -> list[float]:
        return self.logged("train/loss")

    @property
    def tokens(self) -> list[int]:
        """The tokens processed so far, at the log lines of steps. Those of evaluations have the number, too."""
        return [line["train/tokens"] for line in self.metrics if "train/loss" in line]

    @property
    def launches(self) -> list[int]:
        """The step after which each launch of the run began."""
        return [line["step"] for line in self.metrics if "plan/num_processes" in line]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The exported model's parameters."""
        return load_file(self.folder / "model" / "model.safetensors")

    @property
    def status(self) -> dict:
        return json.loads((self.folder / "status.json").read_text())

    @property
    def checkpoints(self) -> list[str]:
        """Names of all that lies in checkpoints/, hidden leftovers included."""
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    @property
    def recompiled(self) -> list[str]:
        """Functions that torch has compiled once more, with TORCH_LOGS=recompiles. Not counted is what transformers has
        around each forward() with a renamed argument: to torch it is one function, whatever the class is."""
        found = re.findall(r"Recompiling function (\w+) in (\S+):\d+", self.output)
        return [name for name, file in found if not file.endswith("transformers/utils/deprecation.py")]


def difference(some: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference of two models' parameters, which must have the same names."""
    assert some.keys() == other.keys()
    return max(float((some[name] - other[name]).abs().max()) for name in some)


def check_continued(done: Done, whole, after: int) -> None:
    """One launch went on after this step, and from there on the run is that of `whole`, which was never stopped."""
    assert done.launches == [after] and difference(done.weights, whole.weights) < 1e-5
    np.testing.assert_allclose(done.losses, whole.losses[after:], rtol=1e-5)


def resume_from(done: Done, step: int) -> tuple:
    """The setting that continues from a checkpoint of another run."""
    return "--run.resume", done.folder / "checkpoints" / f"step-{step:08}"


def write_config(folder: Path, config: dict) -> Path:
    """The config as YAML; its run folder is folder/run unless it names another."""
    config = config | {"run": {"output_dir": str(folder / "run")} | config.get("run", {})}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def output_dir(folder: Path, config: dict, overrides: tuple) -> Path:
    if "--run.output_dir" in overrides:
        return Path(overrides[overrides.index("--run.output_dir") + 1])
    return Path(config.get("run", {}).get("output_dir", folder / "run"))


def free_port() -> int:
    """A port for a launch to meet at. It is below those that the system gives to whoever asks for any, so that nobody
    gets it by chance before it is used; each worker of pytest-xdist has a range of its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    while True:
        port = 12_000 + 2_000 * (worker % 10) + random.SystemRandom().randrange(2_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def start(
    folder: Path,
    config: dict,
    *overrides,
    processes: int | None = 1,
    launcher: str | None = None,
    options: tuple = (),
    script: tuple | Path = ROOT / "train.py",
    env: dict | None = None,
    cwd: Path | None = None,
    warm: bool = False,
) -> subprocess.Popen | warm_process.Launch:
    """Start the real command, or a fork of it, and return its Popen, to be signalled.

    With a launcher or several processes it is `accelerate launch --config_file accelerate_configs/LAUNCHER.yaml`, that
    of the CPU if none is named; for 1 a plain `accelerate launch`; for None `python train.py`. The script may be words.
    """
    accelerate = None if processes is None else []
    if launcher or (processes or 1) > 1:
        accelerate = ["--config_file", ROOT / "accelerate_configs" / f"{launcher or 'cpu'}.yaml"]
        accelerate += ["--num_processes", processes, "--main_process_port", free_port(), *options]
    script = [
        *(script if isinstance(script, tuple) else [script]),
        "--config",
        write_config(folder, config),
        *overrides,
    ]
    accelerate, script = accelerate and list(map(str, accelerate)), list(map(str, script))
    environment = os.environ | (env or {})
    if warm and sys.platform == "linux":
        request = {"launcher": accelerate, "script": script, "environment": dict(environment)}
        return warm_process.Launch(request | {"cwd": str(cwd or Path.cwd())})
    command = [sys.executable] if accelerate is None else [sys.executable, "-m", "accelerate.commands.launch"]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, *(accelerate or []), *script], env=environment, cwd=cwd, **pipe)


def kill_tree(process: subprocess.Popen | warm_process.Launch) -> None:
    """SIGKILL to a launcher and its ranks: these are in sessions of their own and would outlive it."""
    if process.poll() is None:  # Otherwise its number may be another's by now.
        launcher = psutil.Process(process.pid)
        for one in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


HELD = """
import sys, time
sys.path.insert(0, {root!r})
import train
def train_step(setup, batch, *more, train_step=train.train_step):
    while batch.step > {step} and not train.StopSignal.requested:
        time.sleep(0.01)
    return train_step(setup, batch, *more)
train.train_step = train_step
sys.exit(train.main())
"""


def held_after(folder: Path, step: int) -> Path:
    """A train.py that waits after this step for a signal: on a busy machine, a test that is to stop it or kill it in
    the middle may come late. After a signal it makes one more step at most."""
    path = folder / f"held-{step}.py"
    path.write_text(HELD.format(root=str(ROOT), step=step))
    return path


def launch(folder: Path, config: dict, *overrides, expect: int | None = 0, timeout: float = 600, **options) -> Done:
    """Run the real command, see start(), to its end. Fails with the output if the exit status is not `expect`."""
    process = start(folder, config, *overrides, **options)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        kill_tree(process)
    assert expect is None or process.returncode == expect, f"exit status {process.returncode}, not {expect}:\n{output}"
    return Done(process.returncode, output, output_dir(folder, config, overrides))


# How each strategy is launched: launcher file, its options, processes, settings and environment.
TENSOR = "--parallelism_config_tp_size", 2
IN_A_PIPELINE = "--model.pipeline_ranks", 2
SHARING_ROWS = {"PARALLELISM_CONFIG_SP_SIZE": "2"}
STRATEGIES = {
    "one device": ("single", (), 1, (), {}),
    "fp8.yaml": ("fp8", (), 1, (), {}),
    "DDP": ("multi_gpu", (), 2, (), {}),
    "FSDP2": ("fsdp2", (), 2, (), {}),
    "HSDP": ("hsdp", ("--num_machines", 1), 4, (), {}),
    "tensor": ("tensor_parallel", TENSOR, 2, (), {}),
    "tensor, FSDP2": ("fsdp2_tensor_parallel", TENSOR, 4, (), {}),
    "sequence, DDP": ("multi_gpu", (), 4, (), SHARING_ROWS),
    "sequence, FSDP2": ("sequence_parallel", ("--parallelism_config_sp_size", 2), 4, (), {}),
    "context, DDP": ("multi_gpu", (), 2, (), {"PARALLELISM_CONFIG_CP_SIZE": "2"}),
    "context, FSDP2": ("context_parallel", ("--parallelism_config_cp_size", 2), 4, (), {}),
    "pipeline, DDP": ("multi_gpu", (), 4, IN_A_PIPELINE, {}),
    "pipeline, FSDP2": ("fsdp2", ("--fsdp_reshard_after_forward", "false"), 4, IN_A_PIPELINE, {}),
}


def by_strategy(folder: Path, config: dict, name: str, *overrides, options: tuple = ()) -> Done:
    """Launch a file that ships, in its own precision unless an option says another, with CPU processes for its GPUs."""
    launcher, more, processes, settings, environment = STRATEGIES[name]
    how = {"launcher": launcher, "processes": processes, "options": (*more, *options), "env": environment}
    script = ROOT / "tests" / "wrapper_cpu_as_gpu.py", ROOT / "train.py"
    return launch(folder, config, *settings, *overrides, **how, script=script, warm=True, timeout=900)


def cross_entropy(line: dict, prefix: str = "eval") -> float:
    """What the perplexity and bits per byte of this line of metrics.jsonl are of. A fork's loss may have more terms."""
    return line.get(f"{prefix}/cross_entropy", line[f"{prefix}/loss"])


@functools.cache
def loss_of_run() -> Callable:
    """As the strategies and checks get it. A fork's may load something, such as a teacher, which few tests need."""
    return train.loss_function(train.Settings.model_construct())


COUNT_FLOPS, COUNTED = build.flops_per_token, {}


def flops_per_token(found: transformers.PreTrainedConfig, *more) -> float:
    """What train.py counts, for each model once: it takes longer than a tiny run. The length of the documents, which is
    the last argument, is that of the first run with the model."""
    asked = found.to_json_string(), repr(more[:-1])
    if asked not in COUNTED:
        COUNTED[asked] = COUNT_FLOPS(found, *more)
    return COUNTED[asked]


def run(folder: Path, config: dict, *overrides, expect: int | None = 0, curves: bool = False) -> Done:
    """The same command line through main(argv) in this process: one process, no start-up time.

    Unless a test is about them, curves are not drawn. That is most of the time of a tiny run; real commands draw them.
    """
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(output))
        stack.enter_context(mock.patch.object(train, "flops_per_token", flops_per_token))
        if not curves:
            stack.enter_context(mock.patch.object(train, "draw_curves", create=True))  # A fork may have none.
        code = train.main(["--config", str(write_config(folder, config)), *map(str, overrides)])
    assert expect is None or code == expect, f"exit status {code}, not {expect}:\n{output.getvalue()}"
    return Done(code, output.getvalue(), output_dir(folder, config, overrides))


def tiny_model(folder: Path, learned_positions: bool = False) -> Path:
    """A model of 32 dimensions and 2 layers, saved for model.pretrained: a Llama with fewer key than query heads, or a
    GPT-2, whose positions are absolute and whose output layer is its embedding."""
    torch.manual_seed(1)
    common = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": None, "eos_token_id": 1}
    if learned_positions:
        common |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.1}
        config = transformers.GPT2Config(**common, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    else:
        common |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
        config = transformers.LlamaConfig(**common, num_attention_heads=4, num_key_value_heads=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_rows(lengths: Iterable[int], seed: int = 0, masked: float = 0.0) -> list[dict]:
    """Documents of token ids that can be learned: counting up from anywhere. A share of the labels is masked."""
    rng, rows = np.random.default_rng(seed), []
    for length in lengths:
        ids = (rng.integers(3, 40) + np.arange(length) * rng.integers(1, 4)) % (VOCABULARY - 3) + 3
        labels = np.where(rng.random(length) < masked, -100, ids)
        rows.append({"input_ids": ids.tolist()} | ({"labels": labels.tolist()} if masked else {}))
    return rows


def write_rows(folder: Path, rows: list[dict]) -> Path:
    """Save rows as a dataset that data.path takes."""
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    return folder


def rows_by_use(config: Data, tokenizer=None, seed: int = 0) -> dict[str, Dataset]:
    """The rows to train on as "train", and those of each evaluation by its name."""
    data, held_out = load_data(config, tokenizer, seed)
    return {"train": data} | held_out


def training_rows(config: Data, tokenizer=None, seed: int = 0) -> Dataset:
    return rows_by_use(config, tokenizer, seed)["train"]


def slow_but(*fast: str, of: list[str]) -> list:
    """For parametrize(): the tests of all of these are slow but a few."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in of]


def tiny_config(folder: Path) -> dict:
    """23 ragged rows of at most 24 tokens with masked labels, 11 more to evaluate on, and 30 steps of 10 rows.

    10 divides by 2 and not by 3 or 4, and 23 not by 10: 30 steps are 13 epochs and a bit, and steps straddle epochs.
    Of the gradient norms some are above max_grad_norm and some below. adam_eps is large enough that rounding stays
    below 1e-5 in the parameters; with 1e-8 it alone reaches 5e-5. Writes to folder/rows, /held-out and /start.
    """
    rng = np.random.default_rng(0)
    rows = make_rows([1, 24, *rng.integers(2, 25, 21).tolist()], seed=1, masked=0.4)
    rows[5]["labels"] = [-100] * len(rows[5]["labels"])  # A row without any target.
    rows = write_rows(folder / "rows", rows)
    held_out = write_rows(folder / "held-out", make_rows(rng.integers(2, 25, 11).tolist(), seed=2, masked=0.4))
    return {
        "run": {"max_steps": 30, "seed": 7, "log_every": 1, "eval_every": 0, "save_every": 0, "trackers": []},
        "batch": {"global_batch_size": 10, "max_micro_batch_size": 10},
        "data": {
            "path": str(rows),
            "format": "tokens",
            "tokenizer": "bytes",
            "packing": "none",
            "sequence_length": 24,
            "eval_source": {"path": str(held_out)},
        },
        "model": {"pretrained": str(tiny_model(folder / "start"))},
        "optim": {
            "learning_rate": 0.005,
            "warmup_steps": 5,
            "schedule": "cosine",
            "min_learning_rate_ratio": 0.1,
            "weight_decay": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1e-5,
            "max_grad_norm": 1.1,
        },
    }


WHOLE_ROWS = (64, 64, 64, 64), 64  # For packed_config(): each row is one document, so that none are joined.


def packed_config(
    folder: Path, lengths: tuple[int, ...] = (5, 7, 20, 1, 9, 16, 3), row: int = 16
) -> tuple[dict, list[dict]]:
    """8 steps on documents of these lengths that are packed into 4 rows, and the pieces that the rows consist of.

    Each step sees all of them.
    """
    documents, pieces, at = make_rows(lengths, seed=3), [], 0
    for ids in (document["input_ids"] for document in documents):
        edges = [0, *range(row - at % row, len(ids), row), len(ids)]  # The stream of documents is cut at these places.
        pieces += [{"input_ids": ids[low:high]} for low, high in zip(edges, edges[1:])]
        at += len(ids)
    config = tiny_config(folder)
    config["run"]["max_steps"] = 8
    config["batch"] = {"global_batch_size": 4, "max_micro_batch_size": 2}
    source = {"path": str(write_rows(folder / "documents", documents)), "format": "tokens", "tokenizer": "bytes"}
    config["data"] = source | {"packing": "concat", "sequence_length": row}
    return config, pieces
