"""What README.md and the heads of the configs name exists: settings, files, metrics, the options of commands."""

import re
import shlex

import pytest
import train
from accelerate.commands.launch import launch_command_parser
from helpers import ROOT
from torch.distributed.run import get_args_parser

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
    commands += re.findall(r"(?:accelerate launch|torchrun) [^`\n']*train\.py [^`\n']*", text)
    assert len(commands) > 8
    for command in commands:
        words = shlex.split(re.sub(r"\$\(\(.*?\)\)|\$SLURM_NNODES|\$SLURM_NODEID", "2", command))
        parser = get_args_parser() if words[0] == "torchrun" else launch_command_parser()
        args = parser.parse_args(words[1 if words[0] == "torchrun" else 2 :])
        assert args.training_script == "train.py" and args.training_script_args[0] == "--config", command
        _, config, *settings = args.training_script_args
        train.load_config(["--config", str(ROOT / config), *settings])


def test_metrics_exist():
    """Those of the table are in the source of train.py, in full or by the part behind the slash."""
    source = (ROOT / "train.py").read_text()
    names = set(re.findall(r"`((?:train|perf|eval)/\w+)`", README))
    assert len(names) > 15
    for name in names:
        assert name in source or re.sub(r"_\d$", "", name.split("/")[1]) in source, name


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
