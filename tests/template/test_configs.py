"""The files of configs/ run: scaled down, on stand-ins for what they take from the Hub, by the settings they ship with.

Only sizes and names are replaced. Formats, packing, schedules, adapters, compilation and what else a file chooses stay.
"""

import json

import numpy as np
import pytest
import transformers
from helpers import ROOT, run, tiny_model
from test_finetune import byte_tokenizer

import train

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """In place of the Hub: a model, a tokenizer, and data of each format, from texts that can be learned."""
    folder = tmp_path_factory.mktemp("hub")
    tiny_model(folder / "model")
    for name in "tokenizer", "model":  # That of a pretrained model is taken without being named.
        byte_tokenizer(folder / name, None)
    words = "one two three four five six".split()
    # With its end token a text is three rows of 64, so that there is one shape to compile.
    texts = [" ".join(words[at % 6] for at in range(start, start + 60))[:191] for start in range(150)]
    chats = [[{"content": text[:20], "role": "user"}, {"content": text[20:], "role": "assistant"}] for text in texts]
    for split in "train", "held-out":
        for kind, values in ("text", texts), ("messages", chats):
            (folder / kind / split).mkdir(parents=True)
            rows = "".join(json.dumps({kind: value}) + "\n" for value in values)
            (folder / kind / split / "rows.jsonl").write_text(rows)
    return folder


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_runs_scaled_down(hub, tmp_path, monkeypatch, file):
    monkeypatch.chdir(ROOT)  # From where its command is given, and its paths are meant.
    config = train.load_config(["--config", str(file)])[0].model_dump()
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
    assert bool(tokenizer.chat_template) == (kind == "messages") and tokenizer.is_fast == (file.stem != "small")
    adapted = (done.folder / "model" / "adapter_model.safetensors").exists()
    assert adapted == bool(config["model"].get("lora"))
    assert adapted or done.weights


def test_what_the_issue_asks_for_is_shipped():
    assert {file.stem for file in CONFIGS} >= {"small", "pretrain_1b", "finetune_chat", "lora_8b", "long_context"}
