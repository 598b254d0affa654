"""What README.md and the heads of the configs name exists: settings, files, metrics, the options of commands."""

import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from accelerate.commands.launch import launch_command_parser
from helpers import ROOT, run, tiny_config
from torch.distributed.run import get_args_parser

import train

README = (ROOT / "README.md").read_text()
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def test_settings_exist():
    sections = "|".join(train.Config.model_fields)
    named = set(re.findall(rf"\b((?:{sections})\.\w+)", README))
    assert len(named) > 15 and named <= train.config_fields().keys()


def test_files_exist():
    named = re.findall(r"(?:accelerate_configs|configs|tests)/[\w.]+\.\w+|\b\w+\.yaml", README)
    for name in {name for name in named if name != "config.yaml"}:  # That one is in the run folder.
        assert (ROOT / name).is_file() or (ROOT / "accelerate_configs" / name).is_file(), name


def test_commands_parse():
    """Every command for Accelerate or torchrun is one that their parsers take, and asks train.py for what exists."""
    text = re.sub(r"\\\n *", "", README)
    heads = "".join(config.read_text() for config in CONFIGS)
    commands = re.findall(r"^# +(accelerate launch .+)", heads, re.M)
    commands += re.findall(r"(?:accelerate launch|torchrun) [^`\n']*train\.py [^`\n';]*", text)
    assert len(commands) > 8
    for command in commands:
        words = shlex.split(re.sub(r"\$\(\(.*?\)\)|\$SLURM_NNODES|\$SLURM_NODEID|\$n\b", "2", command))
        parser = get_args_parser() if words[0] == "torchrun" else launch_command_parser()
        args = parser.parse_args(words[1 if words[0] == "torchrun" else 2 :])
        assert args.training_script == "train.py" and args.training_script_args[0] == "--config", command
        _, config, *settings = args.training_script_args
        train.load_config(["--config", str(ROOT / config), *settings])


def test_metrics_are_those_of_a_run(tmp_path):
    """What the tables name is what a run with all features writes, no more and no less."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 2, "eval_every": 2}
    config["optim"]["warmup_steps"] = 0
    done = run(tmp_path, config, "--eval.prompts", "[a]", "--eval.max_new_tokens", 2)
    written = {key for line in done.metrics for key in line if not key.startswith("summary/")}
    named = set(re.findall(r"`((?:train|perf|eval)/\w+)`", README)) | {"step"}
    named |= {f"plan/{name}" for name in re.findall(r"`(\w+)`", re.search(r"^\| `plan/...` \|(.*)", README, re.M)[1])}
    assert written == named, "the table of metrics.jsonl in README.md names others"
    phases = {key[8:-8] for line in done.metrics for key in line if re.fullmatch(r"summary/\w+_seconds", key)}
    assert phases == set(re.findall(r"(\w+) [\d.]+", re.search(r"^Seconds: (.*)", README, re.M)[1]))


TINY = {
    "run.max_steps": 2,
    "run.max_tokens": "null",
    "optim.warmup_steps": 0,
    "eval.prompts": "[]",
    "batch.global_batch_size": 5,
    "batch.global_batch_tokens": "null",
    "data.path": "null",
    "data.name": "null",
    "data.tokenizer": "bytes",
    "data.sequence_length": 32,
    "data.eval_fraction": 0.1,
}
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "cell",
    re.findall(r"^\| (?:a CPU|\d+ GPUs?.*?) \| `(accelerate launch [^`]+)`", README, re.M),
    ids=lambda cell: re.sub(r".*?(\w+)\.yaml.*", r"\1", cell),
)
def test_commands_run(tmp_path, cell):
    """Those of the table of machines, two processes standing for more; test_launchers.py runs two machines."""
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text("What is written here can be learned. " * 20)
    words = shlex.split(cell)
    at = words.index("train.py")
    launcher, settings = words[2:at], TINY | {"run.output_dir": tmp_path / "run", "data.files": tmp_path / "texts"}
    settings |= {f"model.architecture.{name}": value for name, value in SHAPE.items()}
    if launcher:
        several = not launcher[1].endswith("single.yaml")
        launcher += [
            "--mixed_precision",
            "no",
            *(["--num_processes", "2", "--main_process_port", "0"] * several),
            "tests/wrapper_cpu_as_gpu.py",
        ]
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *launcher,
        *words[at:],
        *(str(word) for name, value in settings.items() for word in (f"--{name}", value)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text()) == {"status": "finished", "step": 2}


def test_the_same_run_on_one_and_on_two_processes(tmp_path):
    """The comparison of "The batch" finds no difference, and its model speaks as the snippet before it has it."""
    [command] = re.findall(r"^for n in 1 2; .*\n.*\n.*", README, re.M)
    [snippet] = re.findall(r"```python\n(.*?)```", README, re.S)
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text("What is written here can be learned. " * 20)
    settings = {
        "data.files": tmp_path / "texts",
        "data.eval_fraction": 0.1,
        "data.sequence_length": 32,
        "eval.prompts": "[]",
        "batch.global_batch_size": 5,
    } | {f"model.architecture.{name}": value for name, value in SHAPE.items()}
    settings = "".join(f" --{name} {shlex.quote(str(value))}" for name, value in settings.items())
    command = command.replace("; done", f"{settings}; done").replace("runs/same", f"{tmp_path}/same")
    command = command.replace("accelerate launch", f"{sys.executable} -m accelerate.commands.launch")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=240)
    losses = np.array(re.findall(r'^"train/loss": ([\d.]+)\t"train/loss": ([\d.]+)$', done.stdout, re.M), float)
    assert losses.shape == (12, 2), done.stdout + done.stderr
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-6)
    exec(snippet.replace("runs/small/model", f"{tmp_path}/same2/model"), {"print": (said := []).append})
    assert len(said) == 1 and said[0].startswith("def main(") and len(said[0]) > 20


def test_all_commands_of_the_table_are_found():
    assert len(test_commands_run.pytestmark[0].args[1]) == 4


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_every_config_has_a_plan(config, capsys):
    assert train.main(["--config", str(config), "--plan", "1", "2", "4", "8", "16", "32", "64"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8
    head = config.read_text()
    assert head.startswith("# yaml-language-server: $schema=schema.json\n")
    settings, _ = train.load_config(["--config", str(config)])
    rows, length = settings.global_batch_size, settings.data.sequence_length
    assert f"{rows:,} rows x {length:,} " in head and f"{rows * length:,} tokens per step" in head


def test_plan_is_what_the_script_prints(capsys):
    command, table = re.search(r"\$ python train\.py (.*--plan.*)\n((?:.+\n)+?)```", README).groups()
    assert train.main(shlex.split(command.replace("configs/", f"{ROOT}/configs/"))) == 0
    assert capsys.readouterr().out == table
