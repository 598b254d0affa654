"""Fine-tuning and what makes it fit: conversations, LoRA adapters, torch.compile and gradient checkpointing.

None of them may change what is promised: the run of a plain torch loop, on any number of processes.
"""

import datetime
import functools
import json
import re
import shutil
import unicodedata
import warnings
from functools import cache
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import peft
import pytest
import test_launchers
import torch
import transformers
from helpers import ROOT, VOCABULARY, Done, difference, launch, run, tiny_config, tiny_model, write_rows
from reference import evaluation_loss, shuffled, train_reference
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers.utils import chat_template_utils

from samerun.config import Data, Model
from samerun.data.chat import tokenize_turns
from samerun.data.encode import Encoder
from samerun.data.tokenize import tokenize
from samerun.errors import UserError
from samerun.model.build import flops_per_token, make_model
from samerun.model.lora import add_lora
from samerun.model.tokenizer import load_tokenizer, stop_after_turns
from samerun.run.export import names_of_adapter

# Conversations --------------------------------------------------------------------------------------------------------

CHATML = ROOT / "configs" / "chat_template.jinja"  # As shipped.
END, START = 256, 258
# What a tokenizer may bring along: no newlines, the end token only after the assistant, markers that trim white space.
OWN_TEMPLATE = """{%- for message in messages -%}
  <|im_start|>{{ message['role'][0] }}:
  {%- if message['role'] == 'assistant' -%}
    {%- generation -%}{{ message['content'] }}<|im_end|>{%- endgeneration -%}
  {%- else -%}
    {{ message['content'] }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>a:{%- endif -%}"""
CHATS = {
    "two turns": [("user", "2+2?"), ("assistant", "It is 4.")],
    "several turns after one of the system": [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello!"),
        ("user", "Bye"),
        ("assistant", "Bye"),
    ],
    "the user has the last word": [("user", "A"), ("assistant", "B or C"), ("user", "Which one?")],
    "the assistant alone": [("assistant", "Hear, hear")],
    "nothing to learn": [("user", "Anybody there?")],
    "white space at the edges, and more bytes than characters": [("user", " é\n"), ("assistant", "\n 日本 \n")],
    "longer than a row": [("user", "Count"), ("assistant", "one two three four five six seven eight nine ten eleven")],
    "an empty turn": [("user", ""), ("assistant", ""), ("user", "?"), ("assistant", "!")],
}


def byte_tokenizer(folder: Path, template: str | None) -> str:
    """A fast tokenizer whose token ids are the bytes of UTF-8, so that a test can tell them by hand."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))  # GPT-2's alphabet: bytes that cannot be printed are the characters from 256 on.
    alphabet = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    assert fast.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"]) == [END, START]
    return str(folder)


def by_hand(chat: list[tuple[str, str]], chatml: bool) -> dict[str, list[int]]:
    """What a conversation is as input_ids and labels."""
    ids, labels = [], []
    for role, content in chat:
        head = [START, *(f"{role}\n" if chatml else f"{role[0]}:").encode()]
        said = [*content.encode()] + [END] * (chatml or role == "assistant")
        tail = [10] * chatml
        ids += head + said + tail
        labels += [-100] * len(head) + (said if role == "assistant" else [-100] * len(said)) + [-100] * len(tail)
    return {"input_ids": ids, "labels": labels}


def write_chats(folder: Path, first: str) -> str:
    """Saved with `first` as the first field of a turn: datasets on the Hub have either order."""
    names = sorted(["role", "content"], key=lambda name: name != first)
    turns = [[dict(zip(["role", "content"], turn)) for turn in chat] for chat in CHATS.values()]
    return str(write_rows(folder, [{"messages": [{n: turn[n] for n in names} for turn in chat]} for chat in turns]))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """The tokenizer, with and without a template, and the config of the runs."""
    folder = tmp_path_factory.mktemp("chat")
    byte_tokenizer(folder / "without", None)
    byte_tokenizer(folder / "with", OWN_TEMPLATE)
    config = tiny_config(folder)
    path = write_chats(folder / "chats", "content")
    config["data"] = {
        "path": path,
        "format": "chat",
        "tokenizer": str(folder / "without"),
        "sequence_length": 48,
        "chat_template": str(CHATML),
        "eval_source": {"path": path},
    }
    config["run"]["max_steps"] = 8
    config["eval"] = {"prompts": ["é?"], "max_new_tokens": 8, "temperature": 0.0}
    return folder, config


STRICT = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML.read_text()


def test_a_template_that_needs_the_system(chat, tmp_path):
    """Prompts have no turn of the system, so they get an empty one."""
    _, config = chat
    (tmp_path / "strict.jinja").write_text(STRICT)
    rows = [{"messages": [{"role": role, "content": "a"} for role in ("system", "user", "assistant")]}] * 8
    source = {"path": str(write_rows(tmp_path / "chats", rows)), "chat_template": str(tmp_path / "strict.jinja")}
    config = config | {"data": config["data"] | source | {"eval_source": {"path": source["path"]}}}
    done = run(tmp_path, config, "--run.max_steps", 2, "--optim.warmup_steps", 0, "--batch.global_batch_size", 2)
    assert "will not stop" not in done.output
    assert done.logged("eval/sample_0")[0].startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\né?")


def test_an_end_outside_of_the_generation_block_is_told(chat, tmp_path, capsys):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "start"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat[0] / "without")
    tokenizer.chat_template = CONTENT_ALONE
    stop_after_turns(model, tokenizer)
    said = capsys.readouterr().out
    assert (
        "ends a turn by <|im_end|>, but outside of its generation block" in said and "data.special_tokens" not in said
    )


@pytest.mark.parametrize("first", ["role", "content"])
@pytest.mark.parametrize("chatml", [True, False], ids=["configs/chat_template.jinja", "the tokenizer's template"])
def test_tokens_and_labels_of_conversations(chat, tmp_path, chatml, first):
    """All is masked but what the assistant says, and the end token by which it learns to stop."""
    data = Data(
        format="chat",
        tokenizer=str(chat[0] / ("without" if chatml else "with")),
        chat_template=str(CHATML) if chatml else None,
    )
    documents = datasets.load_from_disk(write_chats(tmp_path / "chats", first))
    rows = list(tokenize(documents, data, load_tokenizer(data, Model()), tmp_path / "tokens"))
    assert rows == [by_hand(chat, chatml) for chat in CHATS.values()]


CONTENT_ALONE = """{%- for message in messages -%}<|im_start|>{{ message['role'] + '\n' }}
  {%- if message['role'] == 'assistant' -%}
    {%- generation -%}{{ message['content'] }}{%- endgeneration -%}
  {%- else -%}
    {{ message['content'] }}
  {%- endif -%}<|im_end|>{{ '\n' }}
{%- endfor -%}"""


@pytest.mark.parametrize("template", ["with its end", "content alone"])
@pytest.mark.parametrize("kind", ["trimmed", "composed"])
def test_turns_whose_edges_have_no_token_of_their_own(chat, tmp_path, kind, template):
    """Tokenizers may say that spaces have no characters of the text, or make one character of two. What is learned is
    the same. transformers' own mask ends before such a turn, or goes on to the end of the conversation."""
    data = Data(format="chat", tokenizer=str(chat[0] / "without"), chat_template=str(CHATML))
    tokenizer = load_tokenizer(data, Model())
    if template == "content alone":
        tokenizer.chat_template = CONTENT_ALONE
    backend, composed = tokenizer.backend_tokenizer, str
    if kind == "trimmed":
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    else:
        backend.normalizer, composed = normalizers.NFC(), functools.partial(unicodedata.normalize, "NFC")
    odd = [("user", "e\u0301"), ("assistant", " cafe\u0301"), ("user", "secret"), ("assistant", "  or tea  ")]
    encoder = Encoder(tokenizer)
    for turns in [*CHATS.values(), odd]:
        expected = by_hand([(role, composed(content)) for role, content in turns], True)
        if template == "content alone":
            expected["labels"] = [-100 if label == END else label for label in expected["labels"]]
        ids, said = tokenize_turns([{"role": role, "content": content} for role, content in turns], encoder)
        assert ids == expected["input_ids"]
        assert [token if is_said else -100 for token, is_said in zip(ids, said)] == expected["labels"]


def cut(rows: list[dict], length: int, concat: bool) -> list[dict]:
    """The pieces that rows consist of: of each conversation by itself, or of the stream that they form."""
    pieces, at = [], 0
    for row in rows:
        edges = [0, *range(length - (at % length if concat else 0), len(row["input_ids"]), length)]
        for low, high in pairwise([*edges, len(row["input_ids"])]):
            pieces.append({name: values[low:high] for name, values in row.items()})
        at += len(row["input_ids"])
    return pieces


@pytest.mark.parametrize(
    "packing, processes",
    [
        ("none", None),
        ("concat", 2),
        pytest.param("none", 2, marks=pytest.mark.slow),
        pytest.param("concat", None, marks=pytest.mark.slow),
    ],
)
def test_chat_equals_the_plain_loop(chat, tmp_path, packing, processes):
    config = chat[1] | {"data": chat[1]["data"] | {"packing": packing}}
    rows = [by_hand(chat, True) for chat in CHATS.values()]
    pieces = cut(rows, 48, packing == "concat")
    if packing == "concat":  # Each step sees the whole stream, so that the pieces need not be put into rows here.
        size = -(-sum(len(row["input_ids"]) for row in rows) // 48)
        truth = train_reference(config, lambda step: pieces)
    else:
        size, order = 5, shuffled(7, len(pieces), 5 * 8)
        truth = train_reference(config, lambda step: [pieces[i] for i in order[5 * step - 5 : 5 * step]])
    assert truth.losses[-1] < truth.losses[0] - 0.3 and len(pieces) > len(rows)
    settings = "--batch.global_batch_size", size, "--batch.max_micro_batch_size", 2
    if processes:
        done = launch(tmp_path, config, *settings, processes=processes, warm=True)
    else:
        done = run(tmp_path, config, *settings)
    assert done.metrics[0]["plan/num_processes"] == (processes or 1)
    truth.check(done)
    assert done.logged("eval/loss")[-1] == pytest.approx(evaluation_loss(truth.model, pieces), rel=1e-5)

    # The sample is the model's answer to the prompt as a user's turn; the template is exported with the tokenizer.
    ids = prompt = [START, *"user\né?".encode(), END, 10, START, *b"assistant\n"]
    while len(ids) == len(prompt) or len(ids) < len(prompt) + 8 and ids[-1] not in (1, END):  # 1: the model's own end.
        ids = ids + [int(truth.model(torch.tensor([ids])).logits[0, -1].argmax())]
    markers = {END: b"<|im_end|>", END + 1: b"<pad>", START: b"<|im_start|>"}
    text = b"".join(bytes([x]) if x < 256 else markers.get(x, b"") for x in ids).decode(errors="replace")
    assert text.startswith("<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n") and done.logged(
        "eval/sample_0"
    ) == [text]
    exported = transformers.AutoTokenizer.from_pretrained(done.folder / "model")
    assert exported.chat_template == CHATML.read_text()


def other_end(folder: Path, *markers: str) -> str:
    """A tokenizer whose end of text is not the end of a turn, as those of SmolLM and Qwen."""
    byte_tokenizer(folder, None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_chat_model_stops_after_its_turn(chat, tmp_path):
    """Also where the tokenizer's own end is another token: in our samples, and for who loads the model."""
    _, config = chat
    settings = "--data.tokenizer", other_end(tmp_path / "tokenizer"), "--eval.max_new_tokens", 40
    done = run(tmp_path, config, *settings, "--run.max_steps", 60, "--batch.global_batch_size", 4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.folder / "model")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token == "<|endoftext|>" and end == END
    stops = transformers.GenerationConfig.from_pretrained(done.folder / "model").eos_token_id
    assert stops == [END, tokenizer.eos_token_id]
    [sample] = done.logged("eval/sample_0")
    question, answer = sample.split("<|im_start|>assistant\n")
    assert question == "<|im_start|>user\né?<|im_end|>\n"
    assert answer.count("<|im_end|>") <= 1 and answer.partition("<|im_end|>")[2] == ""
    assert "will not stop" not in done.output


def test_conversations_in_a_mixture_stop_as_well(chat, tmp_path):
    """Whoever loads the model knows where its turn ends, though data.format is that of the other source."""
    _, config = chat
    sources = {
        "chats": {"path": config["data"]["path"], "format": "chat", "weight": 0.5},
        "texts": {"path": str(write_rows(tmp_path / "texts", [{"text": "Once upon a time."}] * 9)), "weight": 0.5},
    }
    data = config["data"] | {"format": "text", "path": None, "sources": sources, "eval_source": None}
    data["tokenizer"] = other_end(tmp_path / "tokenizer")
    done = run(tmp_path, config | {"data": data, "eval": {}})
    stops = transformers.GenerationConfig.from_pretrained(done.folder / "model").eos_token_id
    assert stops[0] == END


def test_a_long_prompt_does_not_hide_what_is_learned(chat, tmp_path):
    """The first line of a run shows targets, wherever they are."""
    _, config = chat
    turns = [{"role": "user", "content": "?" * 300}, {"role": "assistant", "content": "A short answer."}]
    path = str(write_rows(tmp_path / "chats", [{"messages": turns}] * 12))
    data = config["data"] | {"path": path, "sequence_length": 400, "packing": "none", "eval_source": None}
    model = {"architecture": {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32}}
    model["architecture"] |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    done = run(tmp_path, config | {"data": data, "eval": {}, "model": model})
    assert "The loss covers, for example: 'A short answer.<|im_end|>" in done.output


def test_markers_that_are_no_tokens_are_said_and_added(chat, tmp_path):
    _, config = chat
    printable = byte_tokenizer(tmp_path / "tokenizer", None)
    path = tmp_path / "tokenizer" / "template.jinja"
    path.write_text(CHATML.read_text().replace("<|im_end|>", "</turn>"))
    settings = "--data.chat_template", path, "--data.tokenizer", printable, "--batch.global_batch_size", 4
    done = run(tmp_path, config, *settings)
    assert "will not stop by itself" in " ".join(done.output.split()) and "data.special_tokens" in done.output
    added = tmp_path / "added"
    added.mkdir()
    done = run(added, config, *settings, "--data.special_tokens", "</turn>")
    assert "will not stop" not in done.output
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.folder / "model")
    assert tokenizer("</turn>").input_ids == [259]
    assert transformers.GenerationConfig.from_pretrained(done.folder / "model").eos_token_id[0] == 259


# LoRA -----------------------------------------------------------------------------------------------------------------

LORA = {
    "some matrices": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "all-linear": {"r": 3, "lora_alpha": 6, "lora_dropout": 0.0, "target_modules": "all-linear"},
}


def adapters(done: Done) -> dict[str, torch.Tensor]:
    """The exported adapters, by the names that they have in a peft model."""
    exported = load_file(done.folder / "model" / "adapter_model.safetensors")
    return {name.replace(".weight", ".default.weight"): tensor for name, tensor in exported.items()}


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """lora(kind): the config, the held-out rows, and what a plain loop over a peft model did with it."""
    folder = tmp_path_factory.mktemp("lora")
    config = tiny_config(folder)
    config["run"] |= {"save_every": 10, "keep_checkpoints": 3, "eval_every": 15}
    config["optim"] |= {"learning_rate": 0.01, "max_grad_norm": 0.8}
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "start")
    with torch.no_grad():  # Adapters learn next to nothing beside the small weights of a new model.
        for matrix in (p for p in base.parameters() if p.ndim > 1):
            matrix *= 5
    base.save_pretrained(folder / "start")
    rows, held_out = (list(datasets.load_from_disk(folder / name)) for name in ("rows", "held-out"))
    order = shuffled(7, len(rows), 300)

    def adapt(lora: dict, model: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(7)  # The run's: the adapters' first halves are random, the second are zero.
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora))

    @cache
    def result(kind: str):
        own = config | {"model": config["model"] | {"lora": LORA[kind]}}
        truth = train_reference(
            own,
            lambda step: [rows[i] for i in order[10 * step - 10 : 10 * step]],
            held_out,
            adapt=lambda model: adapt(LORA[kind], model),
        )
        clipped = sum(norm > 0.8 for norm in truth.grad_norms)
        assert 3 < clipped < 27 and truth.losses[-1] < truth.losses[0] - 0.5
        assert all(weight.abs().max() > 0.01 for weight in truth.weights.values())
        return own, held_out, truth

    return result


def check(done: Done, truth, after: int = 0) -> None:
    np.testing.assert_allclose(done.losses, truth.losses[after:], rtol=1e-6)
    np.testing.assert_allclose(done.logged("train/grad_norm"), truth.grad_norms[after:], rtol=1e-5)
    assert difference(adapters(done), truth.weights) < 1e-5


@pytest.fixture(scope="module")
def lora_runs(lora, tmp_path_factory):
    """lora_runs(kind, how): the finished run, made once."""

    @cache
    def result(kind: str, how: str) -> Done:
        folder, config = (
            tmp_path_factory.mktemp("run"),
            lora(kind)[0] | {"batch": {"global_batch_size": 10, "max_micro_batch_size": 3}},
        )
        if how == "alone":
            return run(folder, config)
        if how == "DDP":
            return launch(folder, config, processes=2, warm=True)
        if how in ("SP", "CP"):
            return launch(folder, config, processes=2, warm=True, env={f"PARALLELISM_CONFIG_{how}_SIZE": "2"})
        return test_launchers.launch(folder, config, "fsdp2", warm=True)

    return result


FSDP2 = pytest.param("some matrices", "FSDP2", marks=pytest.mark.slow)
ALONE = pytest.param("some matrices", "alone", marks=pytest.mark.slow)
ALL_LINEAR = pytest.param("all-linear", "alone", marks=pytest.mark.slow)
SHARED_ROWS = [pytest.param("some matrices", way, marks=pytest.mark.slow) for way in ("SP", "CP")]
LORA_RUNS = [ALONE, ("some matrices", "DDP"), FSDP2, ALL_LINEAR, *SHARED_ROWS]


@pytest.mark.parametrize("kind, how", LORA_RUNS)
def test_lora_equals_the_plain_loop(lora, lora_runs, kind, how):
    done = lora_runs(kind, how)
    assert done.metrics[0]["plan/num_processes"] == (1 if how == "alone" else 2)
    check(done, lora(kind)[2])
    trained = sum(weight.numel() for weight in lora(kind)[2].weights.values())
    assert f", of which {trained:,} are trained, " in done.output
    assert done.logged("eval/loss") == pytest.approx(list(lora(kind)[2].eval_losses.values()), rel=1e-6)
    assert "UserWarning" not in done.output


@pytest.mark.parametrize("how", ["DDP", pytest.param("FSDP2", marks=pytest.mark.slow)])
def test_lora_checkpoint_holds_what_is_trained(lora, lora_runs, how):
    """Each trained tensor, and what the optimizer keeps of it: AdamW three more. No byte of the frozen ones."""
    truth, folder = lora("some matrices")[2], lora_runs("some matrices", how).folder / "checkpoints" / "step-00000020"
    names, size = set(), 0
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        header = int.from_bytes(content[:8], "little")
        names |= json.loads(content[8 : 8 + header]).keys() - {"__metadata__"}
        size += len(content) - 8 - header
    parts = {name.rsplit(".", 1)[1] for name in names if name.startswith("optimizer.")}
    of_optimizer = {f"optimizer.state.{name}.{part}" for name in truth.weights for part in parts}
    assert names == {f"model.{name}" for name in truth.weights} | of_optimizer
    ranks = 1 if how == "DDP" else 2  # AdamW's count is no shard.
    weights = sum(len({*parts, "weight"} - {"step"}) * 4 * weight.numel() for weight in truth.weights.values())
    assert weights + 4 * len(truth.weights) <= size <= weights + 4 * len(truth.weights) * ranks


@pytest.mark.parametrize("how", ["DDP", pytest.param("FSDP2", marks=pytest.mark.slow)])
def test_lora_continues_on_another_number_of_processes(lora, lora_runs, tmp_path, how):
    config, _, truth = lora("some matrices")
    checkpoint = lora_runs("some matrices", how).folder / "checkpoints" / "step-00000010"
    done = run(tmp_path, config, "--run.resume", checkpoint)
    assert done.launches == [10]
    check(done, truth, after=10)


def logits(model: torch.nn.Module, rows: list[dict]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model.eval()(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in rows])


def test_lora_does_not_go_on_above_another_model(lora, tmp_path):
    """A checkpoint holds the adapter alone. What lies below it may have been replaced, under the same name."""
    config, *_ = lora("some matrices")
    base = tmp_path / "base"
    shutil.copytree(config["model"]["pretrained"], base)
    settings = "--model.pretrained", base, "--run.max_steps", 10
    done = run(tmp_path, config, *settings)
    weights = load_file(base / "model.safetensors")
    save_file({name: 1.01 * value for name, value in weights.items()}, base / "model.safetensors", {"format": "pt"})
    message = run(tmp_path, config, *settings[:2], "--run.max_steps", 12, expect=2).output
    assert "frozen weights: " in message and "is another model than before" in message
    manifest = done.folder / "checkpoints" / "step-00000010" / "manifest.json"
    older = json.loads(manifest.read_text())
    del older["config"]["frozen weights"]  # As of a train.py that did not write it.
    manifest.write_text(json.dumps(older))
    assert run(tmp_path, config, *settings[:2], "--run.max_steps", 12).launches == [0, 10]


@pytest.mark.parametrize("kind, how", LORA_RUNS[1:])
def test_lora_export_is_the_trained_model(lora, lora_runs, kind, how):
    """By peft's two ways to load it, and merged into the model by --export.

    With the model as it was before the run, the exported adapters have the run's own last evaluation loss: none of its
    weights had changed.
    """
    (config, held_out, truth), done = lora(kind), lora_runs(kind, how)
    expected, folder = logits(truth.model, held_out), done.folder / "model"
    start = transformers.AutoModelForCausalLM.from_pretrained(config["model"]["pretrained"])
    assert (logits(start, held_out) - expected).abs().max() > 0.1  # What was learned is far above the bounds below.
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    assert done.logged("eval/loss")[-1] == pytest.approx(evaluation_loss(loaded, held_out), rel=1e-6)
    assert {p.name for p in folder.glob("*.safetensors")} == {"adapter_model.safetensors"}
    for model in loaded, peft.PeftModel.from_pretrained(start, folder):
        torch.testing.assert_close(logits(model, held_out), expected, rtol=0, atol=1e-4)
    if how == "DDP":  # Once is enough.
        run(done.folder.parent, config, "--export", "last", "--merge", "--to", done.folder / "merged")
        merged = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "merged")
        assert not any("lora" in name for name in merged.state_dict())
        torch.testing.assert_close(logits(merged, held_out), logits(loaded, held_out), rtol=0, atol=1e-5)
        assert transformers.AutoTokenizer.from_pretrained(done.folder / "merged")("a")["input_ids"]


def test_lora_begins_with_an_adapter_of_its_own_kind(tmp_path):
    """A checkpoint of a whole model holds no adapter, and an adapter is none of another base. Another scale is said."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 2, 0
    whole = run(tmp_path, config, "--run.output_dir", tmp_path / "whole")
    adapter = run(tmp_path, config, "--run.output_dir", tmp_path / "adapter", "--model.lora", "{r: 2, lora_alpha: 4}")
    whole, adapter = (("--run.init_from", done.folder / "checkpoints" / "step-00000002") for done in (whole, adapter))

    message = run(tmp_path, config, *whole, "--model.lora", "{r: 2}", expect=2).output
    assert re.search("run.init_from: .* is of a whole model, .* by --export and .* model.pretrained", message)
    message = run(tmp_path, config, *adapter, expect=2).output
    assert re.search("run.init_from: .* is of an adapter, .* by --export with --merge and .* model.pretrained", message)
    message = run(tmp_path, config, *adapter, "--model.lora", "{r: 2, lora_alpha: 1000}").output
    assert "run.init_from: model.lora.lora_alpha: 4 in the checkpoint, 1000 now" in message

    base = shutil.copytree(config["model"]["pretrained"], tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    save_file({name: 1.01 * value for name, value in weights.items()}, base / "model.safetensors", {"format": "pt"})
    above = *adapter, "--model.lora", "{r: 2, lora_alpha: 4}", "--model.pretrained", base
    above = *above, "--run.output_dir", tmp_path / "above"
    message = run(tmp_path, config, *above, expect=2).output
    assert "other frozen weights" in message and "--run.allow_changes '[frozen weights]'" in message
    assert "other frozen weights" in run(tmp_path, config, *above, "--run.allow_changes", "[frozen weights]").output


def test_lora_of_a_new_model_is_told(tmp_path):
    """What it adapts is in no file, so that its adapter cannot be loaded."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 1}
    config["optim"]["warmup_steps"] = 0
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config["model"] = {"architecture": {"model_type": "llama", **shape}, "lora": {"r": 2}}
    assert "model.lora adapts random weights" in run(tmp_path, config).output


def test_lora_of_a_model_that_generates_no_text():
    """As in the fork of a reward model. peft would miss a method of a model of language."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    kind = transformers.AutoModelForSequenceClassification
    one, other = (kind.from_config(transformers.LlamaConfig(**shape, num_labels=1)) for _ in range(2))
    told = "model.lora: a LlamaForSequenceClassification generates no text; give its task_type, such as SEQ_CLS"
    with pytest.raises(UserError, match=told):
        add_lora(one, {"r": 2})
    adapted = add_lora(other, {"r": 2, "task_type": "SEQ_CLS"})
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert any("score" in name for name in trained)
    # For its export. It has no output layer in the place where other models have one.
    assert {*names_of_adapter(adapted)} - trained == {"base_model.model.model.embed_tokens.weight"}


def test_lora_without_fields_trains_adapters_only(tmp_path):
    """Those that peft has for a Llama, of rank 8: for the queries, from 32 to 32, and for the values, from 32 to 16."""
    config = tiny_config(tmp_path)
    config["model"]["lora"] = {}
    done = run(tmp_path, config, "--run.max_steps", 5)
    matrices = {
        "self_attn.q_proj.lora_A",
        "self_attn.q_proj.lora_B",
        "self_attn.v_proj.lora_A",
        "self_attn.v_proj.lora_B",
    }
    names = {f"base_model.model.model.layers.{layer}.{name}.default.weight" for layer in (0, 1) for name in matrices}
    assert adapters(done).keys() == names
    saved = {name for name in saved_names(done.folder / "checkpoints" / "step-00000005") if name.startswith("model.")}
    assert saved == {f"model.{name}" for name in names}
    assert f", of which {2 * 8 * (32 + 32 + 32 + 16):,} are trained, " in done.output
    assert f"\nFinished: {done.folder}/model (last step) loads with peft's from_pretrained()." in done.output


def test_lora_of_a_mixture_with_a_pattern():
    """To it, peft adds patterns for the names that experts had in earlier transformers, which match nothing."""
    shape = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    found = transformers.MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=2, **shape)
    query = "model.layers.1.self_attn.q_proj"
    lora = {"r": 3, "target_modules": "all-linear", "rank_pattern": {f"^{query}": 2}}
    adapted = add_lora(transformers.AutoModelForCausalLM.from_config(found), lora)
    ranks = {name: layer.r["default"] for name, layer in adapted.named_modules() if hasattr(layer, "r")}
    assert [name for name, rank in ranks.items() if rank == 2] == [f"base_model.model.{query}"]


def test_lora_of_experts_with_a_pattern():
    """It may name the weights of experts, which are no layers. peft warns that it ignores that, and heeds it."""
    shape = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    found = transformers.MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=2, **shape)
    lora = {"r": 3, "target_parameters": ["experts.gate_up_proj"], "rank_pattern": {"experts.gate_up_proj": 4}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        adapted = add_lora(transformers.AutoModelForCausalLM.from_config(found), lora | {"target_modules": ["q_proj"]})
    ranks = [layer.r["default"] for layer in adapted.modules() if hasattr(layer, "r")]
    assert sorted(ranks) == [3, 4]


@pytest.mark.parametrize("tied, targets", [(False, ["embed_tokens", "lm_head", "q_proj"]), (True, ["wte", "lm_head"])])
def test_lora_of_embeddings_and_output_layer(tmp_path, tied, targets):
    """Also where the two are one matrix. The run can be continued, and what it exports is what it trained."""
    config = tiny_config(tmp_path)
    tiny_model(tmp_path / "start", learned_positions=tied)
    config["run"] |= {"max_steps": 4, "save_every": 2}
    config["model"]["lora"] = {"r": 2, "target_modules": targets}
    config["optim"]["warmup_steps"] = 0
    done = run(tmp_path, config)
    assert done.losses[-1] < done.losses[0]
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(done.folder / "model")
    held_out = list(datasets.load_from_disk(tmp_path / "held-out"))
    assert done.logged("eval/loss")[-1] == pytest.approx(evaluation_loss(loaded, held_out), rel=1e-6)
    settings = "--run.resume", done.folder / "checkpoints" / "step-00000002", "--run.output_dir", tmp_path / "more"
    assert run(tmp_path, config, *settings).losses == done.losses[2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, how", [("Llama", "alone"), ("GPT-2", "alone"), ("GPT-2", "DDP"), ("Llama", "FSDP2"), ("GPT-2", "FSDP2")]
)
def test_lora_learns_new_tokens(chat, tmp_path, kind, how):
    """The end of a turn is new to the model. Its rows in embedding and output layer are trained, tied (GPT-2) or not,
    and the model comes to end its turns: nearly as likely as if all its weights were trained."""
    folder, config = chat
    (tmp_path / "template.jinja").write_text(CHATML.read_text().replace("<|im_end|>", "</turn>"))
    data = {"chat_template": str(tmp_path / "template.jinja"), "special_tokens": ["</turn>", "<turn>"]}
    start = tiny_model(tmp_path / "start", learned_positions=kind == "GPT-2")
    small = transformers.AutoModelForCausalLM.from_pretrained(start)
    small.resize_token_embeddings(259)  # Those of the tokenizer before.
    small.save_pretrained(start)
    config = config | {"data": config["data"] | data, "model": {"pretrained": str(start), "lora": {"r": 4}}}
    config["model"]["lora"]["target_modules"] = "all-linear"
    config["run"] = config["run"] | {"max_steps": 100, "save_every": 50, "keep_checkpoints": 2}
    config["batch"] = {"global_batch_size": 4, "max_micro_batch_size": 4}
    config["optim"] = config["optim"] | {"learning_rate": 0.02}
    chunked = ()
    if how == "alone":
        chunked = "--model.chunked_loss", str(kind == "Llama").lower()
        done = run(tmp_path, config, *chunked)
    elif how == "DDP":
        done = launch(tmp_path, config, processes=2, warm=True)
    else:
        done = test_launchers.launch(tmp_path, config, "fsdp2", warm=True)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(done.folder / "model")
    ends = []
    for turns in (CHATS["two turns"], CHATS["several turns after one of the system"], CHATS["the assistant alone"]):
        row = by_hand(turns, chatml=True)
        ids = [259 if token == END else token for token in row["input_ids"]]
        said = [place for place, label in enumerate(row["labels"]) if label == END]
        with torch.no_grad():
            chances = loaded(input_ids=torch.tensor([ids[:64]])).logits[0].softmax(1)
        ends += [chances[place - 1, 259].item() for place in said if place < 64]
    assert np.mean(ends) > 0.4 and len(ends) > 2  # 0.004 where the rows of new tokens stay as they are.
    settings = "--run.resume", done.folder / "checkpoints" / "step-00000050", "--run.output_dir", tmp_path / "more"
    more = run(tmp_path, config, *settings, *chunked)
    # Later, at so high a learning rate, the roundings of other chunks or of another number of ranks show.
    np.testing.assert_allclose(more.losses[:25], done.losses[50:75], rtol=1e-4)
    np.testing.assert_allclose(more.losses, done.losses[50:], rtol=1e-2)  # Other rows differ by several percent.


TIED = ["wte"], ["lm_head"], ["wte", "lm_head"]


@pytest.mark.parametrize("trained", TIED)
def test_lora_trains_layers_that_were_tied(tmp_path, trained):
    """They begin with the numbers of both, of which peft makes copies."""
    start = tiny_model(tmp_path / "start", learned_positions=True)
    before = load_file(start / "model.safetensors")["transformer.wte.weight"]
    settings = Model(pretrained=str(start), lora={"r": 2, "target_modules": ["c_attn"], "modules_to_save": trained})
    model = make_model(settings, transformers.AutoConfig.from_pretrained(start), len(before), seed=7)
    for layer in model.get_input_embeddings(), model.get_output_embeddings():
        for weight in layer.parameters():
            assert torch.equal(weight, before)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [[], *TIED])
def test_lora_of_a_tied_model_in_shards(tmp_path, trained):
    """With the modules around layers that an option of the launcher puts there."""
    config = tiny_config(tmp_path)
    tiny_model(tmp_path / "start", learned_positions=True)
    lora = {"r": 2, "target_modules": ["c_attn"], "modules_to_save": trained or None}
    config["run"]["max_steps"], config["optim"]["warmup_steps"], config["model"]["lora"] = 4, 0, lora
    one = run(tmp_path, config, "--run.output_dir", tmp_path / "one")
    options = "--mixed_precision", "no", "--fsdp_activation_checkpointing", "true"
    done = test_launchers.launch(tmp_path, config, "fsdp2", options=options, warm=True)
    np.testing.assert_allclose(done.losses, one.losses, rtol=1e-6)
    assert adapters(done).keys() == adapters(one).keys() and difference(adapters(done), adapters(one)) < 1e-5


@pytest.mark.parametrize(
    "trained, dtype",
    [(["embed_tokens", "lm_head"], "bfloat16"), (["norm", "mlp"], "bfloat16"), (["norm", "mlp"], "float16")],
)
def test_lora_trains_whole_modules_in_float32(tmp_path, trained, dtype):
    """Beside frozen weights in 16 bits, where most updates of a weight in 16 bits would be rounded away."""
    config = tiny_config(tmp_path)
    config["model"] |= {"dtype": dtype, "lora": {"r": 2, "modules_to_save": trained}}
    done = run(tmp_path, config, "--run.max_steps", 10)
    start = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=dtype).state_dict()
    saved = {name: weight for name, weight in adapters(done).items() if "lora" not in name}
    assert saved and {weight.dtype for weight in saved.values()} == {torch.float32}
    for name, weight in saved.items():
        before = start[name.removeprefix("base_model.model.").replace(".default.", ".")].float()
        moved = (weight != before).float().mean()
        assert moved > (0.1 if "embed_tokens" in name else 0.9)  # Few tokens are in the rows; AdamW decays the others.
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(done.folder / "model")
    held_out = list(datasets.load_from_disk(tmp_path / "held-out"))
    assert done.logged("eval/loss")[-1] == pytest.approx(evaluation_loss(loaded, held_out), rel=2e-2)


@pytest.mark.slow
def test_lora_beside_weights_in_bf16(lora, tmp_path):
    """The frozen weights are bf16 in memory, the adapters are float32 there and in the export."""
    config, _, truth = lora("all-linear")
    settings = Model(**config["model"], dtype="bfloat16")
    found = transformers.AutoConfig.from_pretrained(config["model"]["pretrained"])
    model = make_model(settings, found, VOCABULARY, 7)
    types = {(("lora" in name), p.requires_grad, p.dtype) for name, p in model.named_parameters()}
    assert types == {(True, True, torch.float32), (False, False, torch.bfloat16)}

    run_settings = "--model.dtype", "bfloat16", "--run.max_steps", 5  # All in warmup: the rates are those of 30 steps.
    alone = run(tmp_path, config, *run_settings)
    folder = "--run.output_dir", tmp_path / "sharded"  # As shipped, in mixed precision.
    sharded = test_launchers.launch(tmp_path, config, "fsdp2", *run_settings, *folder, options=(), warm=True)
    for done in alone, sharded:
        np.testing.assert_allclose(done.losses, truth.losses[:5], rtol=1e-2)
        assert done.losses != pytest.approx(truth.losses[:5], rel=1e-6)  # It was not float32.
        assert {tensor.dtype for tensor in adapters(done).values()} == {torch.float32}


@pytest.mark.parametrize("targets", ["all-linear", ["o_proj", "up_proj"]])
def test_lora_flops(targets):
    """A frozen matrix costs 2 FLOPs per parameter forward and 2 backward, for its input's gradient; a trained one 2
    more. In front of the first adapter nothing needs a gradient."""
    hidden, inner, layers, heads, groups, size, vocabulary, length, r = 512, 1024, 3, 8, 2, 64, 4000, 256, 8
    found = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        vocab_size=vocabulary,
        max_position_embeddings=length,
    )
    qkv = {"q_proj": (hidden, heads * size), "k_proj": (hidden, groups * size), "v_proj": (hidden, groups * size)}
    rest = {
        "o_proj": (heads * size, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
    matrices = qkv | rest
    chosen = {name: m for name, m in matrices.items() if targets == "all-linear" or name in targets}
    of_layer, of_qkv = (sum(a * b for a, b in group.values()) for group in (matrices, qkv))
    adapted, attention = sum(r * (a + b) for a, b in chosen.values()), 2 * 2 * heads * size * length
    head = hidden * vocabulary
    flops = layers * (2 * of_layer + attention + 2 * adapted) + 2 * head  # Forward.
    flops += layers * (2 * of_layer + 2 * attention + 4 * adapted) + 2 * head  # Backward.
    if targets == "all-linear":  # The embeddings, which q, k and v of the first layer see, need no gradient.
        flops -= 2 * of_qkv + 2 * r * 3 * hidden
    else:  # Neither do the first layer's attention and what goes into its o_proj.
        flops -= 2 * of_qkv + 2 * attention + 2 * hidden * heads * size + 2 * r * heads * size
    lora = {"r": r, "target_modules": targets}
    assert flops_per_token(found, lora, length) == pytest.approx(flops, rel=0.02)
    assert flops_per_token(found, None, length) > 1.4 * flops


# torch.compile and gradient checkpointing -----------------------------------------------------------------------------

CASES = {
    "full": ("--model.compile", "full"),
    "checkpointing": ("--model.gradient_checkpointing", "true"),
    "selective": ("--model.gradient_checkpointing", "selective"),
    "chunked": ("--model.chunked_loss", "true", "--model.gradient_checkpointing", "true"),
    "regional, checkpointing": ("--model.compile", "regional", "--model.gradient_checkpointing", "true"),
    "regional, selective": ("--model.compile", "regional", "--model.gradient_checkpointing", "selective"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The config, and the run without any of it. Rows are full, so that what is compiled has one shape."""
    folder = tmp_path_factory.mktemp("plain")
    config = tiny_config(folder)
    config["run"] |= {"max_steps": 5}
    config["batch"] = {"global_batch_size": 8, "max_micro_batch_size": 4}
    config["data"] |= {"packing": "best_fit", "eval_source": None}
    return config, run(folder, config)


def saved_names(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.parametrize(
    "how, case",
    [
        pytest.param("alone", "full", marks=pytest.mark.slow),
        ("alone", "checkpointing"),
        ("alone", "selective"),
        pytest.param("DDP", "full", marks=pytest.mark.slow),
        ("DDP", "chunked"),
        pytest.param("DDP", "regional, checkpointing", marks=pytest.mark.slow),
        pytest.param("FSDP2", "selective", marks=pytest.mark.slow),
        pytest.param("FSDP2", "regional, checkpointing", marks=pytest.mark.slow),
        pytest.param("FSDP2", "regional, selective", marks=pytest.mark.slow),
    ],
)
def test_compiled_or_checkpointed_is_the_same_run(plain, tmp_path, monkeypatch, how, case):
    (config, before), settings = plain, CASES[case]
    torch._dynamo.reset()  # As in a process of its own.
    torch._dynamo.utils.counters.clear()
    monkeypatch.setenv("TORCH_LOGS", "dynamo,recompiles")
    if how == "alone":
        if case == "regional":  # To compile for evaluation, too, takes longer than all else.
            settings += "--data.eval_source", f"{{path: {config['data']['path']}}}", "--eval.prompts", "some"
        done = run(tmp_path, config, *settings)
    elif how == "DDP":
        done = launch(tmp_path, config, *settings, processes=2, warm="compile" not in settings[0])
    else:
        done = test_launchers.launch(tmp_path, config, "fsdp2", *settings)
    assert done.metrics[0]["plan/num_processes"] == (1 if how == "alone" else 2)
    np.testing.assert_allclose(done.losses, before.losses, rtol=1e-5)
    assert difference(done.weights, before.weights) < 1e-5

    # It was compiled, as a whole or by the layer, and not in the time that rates are about. Samples are not compiled:
    # their every length and layer would be a case of its own, and after eight torch gives up on the layers for good.
    compiled = "--model.compile" in settings
    summary = {name: done.metrics[-1][f"summary/{name}_seconds"] for name in ("warmup", "micro_steps")}
    assert not compiled or summary["warmup"] > summary["micro_steps"]
    if how == "alone":
        stats = torch._dynamo.utils.counters["stats"]
        # On a CPU the attention is not compiled, which leaves at most five parts of a layer. Regional compiles them for
        # all layers, to train and to evaluate; full compiles those of two layers, to train.
        assert stats["unique_graphs"] <= 5 * 2 * compiled
        assert compiled == bool(stats["calls_captured"])
    elif compiled:
        first = re.search(r"\[0/0\].* start tracing \w+ (\S+)", done.output)[1]
        assert ("modeling_layers" in first) == ("regional" in case)
        assert done.recompiled == []  # Though each micro-batch has its own number of tokens.
    assert "recompile_limit" not in done.output and "FutureWarning" not in done.output

    # No wrapper's name is in what is saved, and from_pretrained() finds all that it looks for.
    for name in "model", "checkpoints/step-00000005":
        assert saved_names(done.folder / name) == saved_names(before.folder / name)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    same = transformers.AutoModelForCausalLM.from_pretrained(before.folder / "model")
    rows = list(datasets.load_from_disk(config["data"]["path"]))
    if "eval/sample_0" in done.metrics[-2]:
        assert done.metrics[-2]["eval/loss"] == pytest.approx(evaluation_loss(loaded, cut(rows, 24, False)), rel=1e-5)
    torch.testing.assert_close(logits(loaded, rows), logits(same, rows), rtol=0, atol=1e-4)


def test_a_chat_template_that_writes_the_date(tmp_path, monkeypatch):
    """Tomorrow it makes other rows, where those of today are not in the cache any more. The reason is told."""
    template = "{{ date_string or strftime_now('%d %B %Y') }}"  # As Llama 3.1 has it.
    template += "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    config = tiny_config(tmp_path)
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 2, 0
    rows = [{"messages": [{"role": "assistant", "content": f"It is {number}."}]} for number in range(12)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "template").write_text(template)
    config["data"] = {"files": str(tmp_path / "chats.jsonl"), "format": "chat", "sequence_length": 24}
    config["data"] |= {"tokenizer": byte_tokenizer(tmp_path / "bytes", None), "packing": "none"}
    config["data"]["chat_template"] = str(tmp_path / "template")
    run(tmp_path, config)
    fixed = "--data.chat_template_kwargs", "{date_string: 26 Jul 2024}", "--run.output_dir", tmp_path / "fixed"
    run(tmp_path, config, *fixed)

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls):
            return cls(2050, 1, 1)

    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    assert "Finished already" in run(tmp_path, config, "--run.log_every", 3).output
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    done = run(tmp_path, config, "--run.max_steps", 3, expect=2)
    [line] = [line for line in done.output.splitlines() if "data fingerprint" in line and "in the checkpoint" in line]
    assert "The chat template writes today's date: fix it by data.chat_template_kwargs" in line
    assert run(tmp_path, config, *fixed, "--run.max_steps", 3).status == {"status": "finished", "step": 3}
