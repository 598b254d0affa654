"""The files of configs/ and accelerate_configs/ that this template ships, see shipped.py.

The configs run: scaled down, on stand-ins for what they take from the Hub, by the settings they ship with.

Only sizes and names are replaced. Formats, packing, schedules, adapters, compilation and what else a file chooses stay.
"""

import json
import math
import re
import shlex

import numpy as np
import pytest
import transformers
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from helpers import ROOT, run, tiny_model
from shipped import CONFIGS, LAUNCHERS
from test_finetune import byte_tokenizer

import train
from samerun.cli import load_config


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """In place of the Hub: a model, a tokenizer, and data of each format, from texts that can be learned."""
    folder = tmp_path_factory.mktemp("hub")
    tiny_model(folder / "model")
    for name in "tokenizer", "model":  # That of a pretrained model is taken without being named.
        byte_tokenizer(folder / name, None)
    words = "one two three four five six".split()
    # With its end token a text is three rows of 64.
    # Each is another one: what is the same as a held-out text is not trained on.
    texts = [f"{start:03} " + " ".join(words[at % 6] for at in range(start, start + 60))[:187] for start in range(150)]
    chats = [[{"content": text[:20], "role": "user"}, {"content": text[20:], "role": "assistant"}] for text in texts]
    for split in "train", "held-out":
        for kind, values in ("text", texts), ("messages", chats):
            (folder / kind / split).mkdir(parents=True)
            rows = "".join(json.dumps({kind: value}) + "\n" for value in values)
            (folder / kind / split / "rows.jsonl").write_text(rows)
    return folder


QUICK = "small_chat", "lora_8b"  # test_readme.py runs two more.


@pytest.mark.parametrize(
    "file",
    [file if file.stem in QUICK else pytest.param(file, marks=pytest.mark.slow) for file in CONFIGS],
    ids=lambda file: file.stem,
)
def test_runs_scaled_down(hub, tmp_path, monkeypatch, file):
    monkeypatch.chdir(ROOT)  # From where its command is given, and its paths are meant.
    config = load_config(["--config", str(file)]).model_dump()
    kind = "messages" if config["data"]["format"] == "chat" else "text"
    config["data"] |= {
        "files": [str(hub / kind / "train")],
        "path": None,
        "name": None,
        "split": "train",
        "sequence_length": 64,
    }
    if config["data"]["eval_source"]:
        config["data"]["eval_source"] = {"files": [str(hub / kind / "held-out")]}
    else:
        config["data"]["eval_fraction"] = 0.1  # Of 150 documents, not of millions.
    if config["data"]["tokenizer"]:
        config["data"]["tokenizer"] = str(hub / "tokenizer")
    if config["model"]["pretrained"]:
        config["model"]["pretrained"] = str(hub / "model")
    else:
        config["model"]["architecture"] |= {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    config["model"]["compile"] = "none"  # It would take most of a minute, and test_finetune.py does it.
    config["run"] |= {
        "max_steps": 6,
        "max_epochs": None,
        "max_tokens": None,
        "log_every": 1,
        "eval_every": 3,
        "save_every": 3,
        "output_dir": str(tmp_path / "run"),
    }
    config["batch"] |= {"global_batch_size": 8, "global_batch_tokens": None, "max_micro_batch_size": 4}
    config["optim"] |= {"learning_rate": 0.01, "warmup_steps": 2}
    config["eval"] |= {"max_rows": 8, "max_new_tokens": 4}
    done = run(tmp_path, config, curves=True)
    assert done.status == {"status": "finished", "step": 6} and np.isfinite(done.losses).all()
    assert done.losses[-1] < done.losses[0] and len(done.logged("eval/loss")) == 2
    assert all(len(done.logged(f"eval/sample_{i}")) == 2 for i in range(len(config["eval"]["prompts"])))
    assert (done.folder / "curves.png").exists() and list((done.folder / "tensorboard").rglob("events*"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.folder / "model")
    assert bool(tokenizer.chat_template) == (kind == "messages") and tokenizer.is_fast
    adapted = (done.folder / "model" / "adapter_model.safetensors").exists()
    assert adapted == bool(config["model"].get("lora"))
    assert adapted or done.weights


@pytest.mark.slow
def test_the_small_run_and_then_its_chats(tmp_path, monkeypatch, capsys):
    """The two commands of small_chat.yaml as they are, but for a few steps: only what Python brings is read."""
    monkeypatch.chdir(ROOT)
    base, chat = tmp_path / "small", tmp_path / "chat"
    few = "--run.max_steps", "5", "--optim.warmup_steps", "2", "--eval.max_rows", "16"
    assert train.main(["--config", "configs/small.yaml", "--run.output_dir", str(base), *few]) == 0
    settings = "--run.output_dir", str(chat), "--model.pretrained", str(base / "model"), "--run.log_every", "1"
    assert train.main(["--config", "configs/small_chat.yaml", *settings, *few]) == 0
    lines = [json.loads(line) for line in (chat / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.1
    assert (chat / "model" / "adapter_model.safetensors").exists()
    [sample] = [line["eval/sample_0"] for line in lines if "eval/sample_0" in line]
    assert "How do I call textwrap.fill?" in sample
    assert re.search("^The loss covers, for example: .*<[|]im_end[|]>", capsys.readouterr().out, re.M)


def test_the_memory_of_the_large_run_is_planned_without_network(capsys):
    """A newcomer asks for it first. The size of its vocabulary is in the file."""
    file = ROOT / "configs" / "pretrain_1b.yaml"
    assert train.main(["--config", str(file), "--perf.device_memory_gib", "80", "--plan", "8"]) == 0
    output = capsys.readouterr().out
    assert "GiB per device, DDP" in output and "Hub" not in output


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_command_and_schema_are_named(file):
    """Each gives its own command, and names the schema by which editors complete and check it."""
    text = file.read_text()
    assert "# yaml-language-server: $schema=schema.json" in text.splitlines()
    assert f"train.py --config configs/{file.name}" in text


@pytest.mark.parametrize("file", LAUNCHERS, ids=lambda file: file.stem)
def test_accelerate_understands(file):
    """Its loader refuses unknown keys at the top; those inside fsdp_config and the like it would silently take."""
    config = load_config_from_file(str(file))
    parser = launch_command_parser()
    options = {action.dest for action in parser._actions}
    assert options >= config.fsdp_config.keys() | config.parallelism_config.keys() | config.deepspeed_config.keys()
    args, *_ = _validate_launch_command(parser.parse_args(["--config_file", str(file), "train.py"]))
    assert args.mixed_precision == {"cpu": "no", "fp8": "fp8"}.get(file.stem, "bf16")
    assert (args.fp8_backend == "AO") == (file.stem == "fp8")
    with_fsdp = "context_parallel", "fsdp2", "fsdp2_tensor_parallel", "hsdp", "sequence_parallel"
    assert args.use_fsdp == (file.stem in with_fsdp)
    assert args.use_deepspeed == file.stem.startswith("deepspeed")
    assert int(args.fsdp_version) == (2 if args.use_fsdp else 1)
    assert args.multi_gpu == (file.stem in ("cpu", "multi_gpu", "multi_node", "tensor_parallel"))
    assert args.use_cpu == (file.stem == "cpu")
    sizes = ("dp_replicate", "dp_shard", "sp", "cp", "tp")
    product = math.prod(getattr(args, f"parallelism_config_{size}_size") for size in sizes)
    left = {"context_parallel": 2, "fsdp2_tensor_parallel": 2, "hsdp": 8, "sequence_parallel": 2}  # For FSDP2.
    assert product * left.get(file.stem, 1) == (args.num_processes if config.parallelism_config else 1)


@pytest.mark.parametrize("file", LAUNCHERS, ids=lambda file: file.stem)
def test_command_at_its_head(file):
    """It is one that Accelerate can parse, of this launcher file and of a config that exists."""
    [command] = re.findall(r"^# +accelerate launch (.+)", file.read_text(), re.M)
    args = launch_command_parser().parse_args(shlex.split(command))
    assert ROOT / args.config_file == file and args.training_script == "train.py"
    assert args.training_script_args[0] == "--config" and (ROOT / args.training_script_args[1]).is_file()
