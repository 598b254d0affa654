"""People fork this template, and take its newer rooms.

Another task, and another method, take few lines of train.py and none of samerun/. So a later commit's samerun/ merges
without a conflict, and what the script promises holds for the fork, too.
"""

import difflib
import functools
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import datasets
import forks
import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from helpers import ROOT, VOCABULARY, difference, launch, tiny_config
from PIL import Image
from reference import shuffled, train_reference
from safetensors.torch import load_file

from samerun.config import Data, Model

pytestmark = pytest.mark.slow
IMAGES, SIDE, CLASSES = 46, 8, 4
PATCHES = (SIDE // 2) ** 2  # Of 2 x 2 pixels.
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = LAYERS | {"image_size": SIDE, "patch_size": 2, "initializer_range": 0.1}


def generate(count: int, seed: int) -> list[tuple[np.ndarray, int]]:
    """Noise with a brighter quadrant, and which quadrant it is."""
    rng, found = np.random.default_rng(seed), []
    for label in rng.integers(0, CLASSES, count).tolist():
        pixels, half = rng.integers(0, 60, (SIDE, SIDE)), SIDE // 2
        top, left = divmod(label, 2)
        pixels[top * half :, left * half :][:half, :half] += 190
        found.append((pixels.astype(np.uint8), label))
    return found


@dataclass(frozen=True)
class Task:
    """A fork, and its task as a plain loop has it."""

    edits: forks.Edits
    kind: type  # The transformers class of its model.
    start: Callable[[Path], None]  # Saves one.
    save: Callable[[Path, list], list[dict]]  # Saves images as data.path takes them. Returns its rows.
    outputs: Callable[[torch.nn.Module, list[dict]], tuple[torch.Tensor, torch.Tensor]]  # (logits, targets) of rows.
    tokens: Callable[[Path, dict], int]  # How many a row has, for the model in this folder.
    adapt: Callable = lambda model: model  # Freezes what is not trained.


def start_classifier(folder: Path) -> None:
    shape = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.ViTConfig(**shape, num_channels=1, num_labels=CLASSES)
    transformers.ViTForImageClassification(config).save_pretrained(folder)


def write_lines(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_labels(folder: Path, images: list) -> list[dict]:
    rows = [{"pixels": pixels.flatten().tolist(), "label": label} for pixels, label in images]
    write_lines(folder / "rows.jsonl", rows)
    return rows


def classify(model: torch.nn.Module, rows: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.tensor([row["pixels"] for row in rows]).float().reshape(-1, 1, SIDE, SIDE) / 255
    return model(pixels).logits, torch.tensor([row["label"] for row in rows])


WORDS = "<pad> <s> </s> <unk> <image> user assistant : where ? bright is it at the top bottom left right corner yes no"
TEMPLATE = """{% for message in messages %}{{ message.role }} : {% for part in message.content %}
{%- if part.type == "image" %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}
{%- if message.role == "assistant" %}</s> {% endif %}{% endfor %}
{%- if add_generation_prompt %}assistant : {% endif %}"""


def start_vlm(folder: Path, template: str = TEMPLATE) -> None:
    """A LLaVA with its processor, whose tokenizer knows a few words and begins each text with <s>."""
    vocabulary = {word: number for number, word in enumerate(WORDS.split())}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, **special, additional_special_tokens=["<image>"]
    )
    images = transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    shape = {"patch_size": 2, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    transformers.LlavaProcessor(images, tokenizer, **shape, chat_template=template).save_pretrained(folder)
    text = {**LAYERS, "initializer_range": 0.1, "num_key_value_heads": 2, "vocab_size": len(vocabulary)}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES).to_dict(),
        text_config=transformers.LlamaConfig(**text, bos_token_id=1, eos_token_id=2, pad_token_id=0).to_dict(),
        image_token_index=vocabulary["<image>"],
        image_seq_length=PATCHES,
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)


def save_answers(folder: Path, images: list) -> list[dict]:
    """PNG files, and questions of several lengths with answers of several."""
    rows = []
    for number, (_, label) in enumerate(images):
        top, left = ("top", "bottom")[label // 2], ("left", "right")[label % 2]
        asked = ("where ?", f"{top} {left}"), ("is it bright at the top ?", "yes" if top == "top" else "no")
        question, answer = (*asked, ("bright is", f"the {left} corner at the {top}"))[number % 3]
        rows.append({"file_name": f"{number}.png", "question": question, "answer": answer})
    write_lines(folder / "metadata.jsonl", rows)
    for row, (pixels, _) in zip(rows, images):
        Image.fromarray(pixels).save(folder / row["file_name"])
    return [row | {"image": Image.fromarray(pixels).convert("RGB")} for row, (pixels, _) in zip(rows, images)]


saved_processor = functools.cache(transformers.AutoProcessor.from_pretrained)


def as_asked(folder: str, row: dict) -> tuple[dict[str, torch.Tensor], int]:
    """A row as its processor has it, and how many of its tokens are the prompt."""
    content = [{"type": "image", "image": row["image"]}, {"type": "text", "text": row["question"]}]
    asked = {"role": "user", "content": content}
    told = {"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]}
    encode = functools.partial(saved_processor(folder).apply_chat_template, tokenize=True, return_dict=True)
    prompt, whole = encode([asked], add_generation_prompt=True), encode([asked, told], return_tensors="pt")
    return whole, len(prompt["input_ids"][0])


def answer(model: torch.nn.Module, rows: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row is alone in the model."""
    logits, targets = [], []
    for row in rows:
        inputs, start = as_asked(model.name_or_path, row)
        logits.append(model(**inputs).logits[0, start - 1 : -1])
        targets.append(inputs["input_ids"][0, start:])
    return torch.cat(logits), torch.cat(targets)


def freeze_tower(model: torch.nn.Module) -> torch.nn.Module:
    for weight in model.model.vision_tower.parameters():
        weight.requires_grad = False
    return model


TASKS = {
    "classifier": Task(
        edits=forks.CLASSIFIER,
        kind=transformers.AutoModelForImageClassification,
        start=start_classifier,
        save=save_labels,
        outputs=classify,
        tokens=lambda start, row: PATCHES,
    ),
    "vlm": Task(
        edits=forks.VLM,
        kind=transformers.AutoModelForImageTextToText,
        start=start_vlm,
        save=save_answers,
        outputs=answer,
        tokens=lambda start, row: as_asked(str(start), row)[0]["input_ids"].numel(),
        adapt=freeze_tower,
    ),
}


@pytest.fixture(scope="module", params=TASKS)
def task(request, tmp_path_factory):
    """The fork, its config, the plain loop's result for it, the tokens of each step, a check of what is exported."""
    folder, it = tmp_path_factory.mktemp(request.param), TASKS[request.param]
    forks.make(folder / "fork", it.edits, ROOT / "tests" / "forks" / f"{request.param}.py")
    start, script = folder / "start", folder / "fork" / "train.py"
    rows, held_out = it.save(folder / "images", generate(IMAGES, 0)), it.save(folder / "held-out", generate(21, 1))
    torch.manual_seed(1)
    it.start(start)
    config = tiny_config(folder / "text")
    config["run"]["save_every"] = 8
    config["batch"]["max_micro_batch_size"] = 2
    tokens = [it.tokens(start, row) for row in rows]
    config["data"] = {"path": str(folder / "images"), "sequence_length": max(tokens)}
    config["data"]["eval_source"] = {"path": str(folder / "held-out")}
    config["model"] = {"pretrained": str(start)}
    config["optim"] |= {"learning_rate": 0.003, "warmup_steps": 3, "max_grad_norm": 2.0}
    order = np.array(shuffled(7, IMAGES, 300)).reshape(30, 10)

    def summed_loss(model: torch.nn.Module, rows: list[dict]) -> tuple[torch.Tensor, int]:
        logits, targets = it.outputs(model, rows)
        return F.cross_entropy(logits, targets, reduction="sum"), len(targets)

    def rows_of(step: int) -> list[dict]:
        return [rows[i] for i in order[step - 1]]

    did = train_reference(config, rows_of, kind=it.kind, summed_loss=summed_loss, adapt=it.adapt)
    assert did.losses[-1] < did.losses[0] / 2 and min(did.grad_norms) < 2 < max(did.grad_norms)
    did.model.save_pretrained(folder / "expected")  # A file may have other names for the weights than the modules.
    did.weights = load_file(folder / "expected" / "model.safetensors")

    def check_export(model: Path) -> tuple[float, float]:
        """Loss and accuracy of what transformers loads from there: the logits are those of the plain loop's model."""
        with torch.no_grad():
            logits, targets = it.outputs(it.kind.from_pretrained(model), held_out)
            expected, _ = it.outputs(did.model, held_out)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        return F.cross_entropy(logits, targets).item(), (logits.argmax(1) == targets).double().mean().item()

    return script, config, did, np.array(tokens)[order].sum(1), check_export


def test_no_name_is_left_over(task):
    subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", task[0]], check=True)


def test_it_takes_few_lines(task):
    """At most 20 lines that train.py does not have, beside a module of its own; lines that went are not counted."""
    ours, theirs = (ROOT / "train.py").read_text().splitlines(), task[0].read_text().splitlines()
    new = [line for line in difflib.ndiff(ours, theirs) if line.startswith("+ ")]
    assert 8 < len(new) <= 20, "\n".join(new)


def check(done, task, processes: int) -> None:
    """Losses, weights and evaluation are those of the plain loop, and the counts those of the plan."""
    _, config, did, tokens, check_export = task
    did.check(done)
    assert done.metrics[0]["plan/num_processes"] == processes  # Of the first launch.
    assert done.metrics[0]["plan/tokens_per_step"] == 10 * config["data"]["sequence_length"]
    lines = [line for line in done.metrics if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert [line["train/rows"] for line in lines] == [10 * line["step"] for line in lines]
    assert [line["train/target_tokens"] for line in lines] == np.cumsum(did.targets).tolist()
    most = 10 * config["data"]["sequence_length"] * np.arange(1, 31)  # With the padding. Images have none.
    assert (np.cumsum(tokens) <= done.tokens).all() and (done.tokens <= most).all()
    timed = [line for line in lines if line["perf/step_seconds"]]
    assert len(timed) >= 20
    for line in timed:
        assert line["perf/rows_per_second"] * line["perf/step_seconds"] == pytest.approx(10)
        real_tokens = line["perf/real_tokens_per_second"] * line["perf/step_seconds"]
        assert real_tokens == pytest.approx(tokens[line["step"] - 1])
    summary = {key: value for key, value in done.metrics[-1].items() if key.endswith("_seconds")}
    assert sum(summary.values()) == pytest.approx(2 * summary["summary/wall_seconds"])

    loss, right = check_export(done.folder / "model")
    assert right > 0.7 and done.logged("eval/accuracy")[-1] == pytest.approx(right)
    assert done.logged("eval/loss")[-1] == pytest.approx(loss, rel=1e-5)


def stop_after_27(done) -> None:
    """Leave the run as if it had been killed then. The last checkpoint is of step 24."""
    shutil.rmtree(done.folder / "model")
    shutil.rmtree(done.folder / "checkpoints" / "step-00000030")
    (done.folder / "status.json").write_text('{"status": "running", "step": 27}')


def test_two_processes(task, tmp_path):
    script, config, *_ = task
    done = launch(tmp_path, config, processes=2, script=script, warm=True)
    assert done.metrics[0]["plan/micro_batch_size"] == 2 and done.metrics[0]["plan/grad_accum_steps"] == 3
    check(done, task, 2)


def test_in_the_shards_of_two(task, tmp_path):
    script, config, *_ = task
    script = ROOT / "tests" / "wrapper_cpu_as_gpu.py", script
    how = {"launcher": "fsdp2", "processes": 2, "options": ("--mixed_precision", "no"), "script": script}
    check(launch(tmp_path, config, **how, warm=True), task, 2)


def test_one_process_continued_on_two(task, tmp_path):
    """The whole run on one; then, as if killed, from the last checkpoint on two, which have the data elsewhere."""
    script, config, *_ = task
    done = launch(tmp_path, config, "--batch.max_micro_batch_size", 3, script=script, warm=True)
    assert done.metrics[0]["plan/micro_batch_size"] == 3 and done.metrics[0]["plan/grad_accum_steps"] == 4
    check(done, task, 1)

    first = done.weights
    stop_after_27(done)
    shutil.copytree(config["data"]["path"], tmp_path / "moved")
    done = launch(tmp_path, config, "--data.path", tmp_path / "moved", processes=2, script=script, warm=True)
    assert done.launches == [0, 24] and difference(done.weights, first) < 1e-5
    check(done, task, 1)


@pytest.mark.parametrize("task", ["vlm"], indirect=True)
def test_other_rows_under_the_same_name_are_refused(task, tmp_path):
    """By another chat template, or by another text."""
    script, config, *_ = task
    model, images = (Path(config[section][name]) for section, name in (("model", "pretrained"), ("data", "path")))
    for folder in model, images:
        shutil.copytree(folder, tmp_path / folder.name)
    config = config | {"model": {"pretrained": str(tmp_path / model.name)}}
    longer = config["data"]["sequence_length"] + 2
    config["data"] = config["data"] | {"path": str(tmp_path / images.name), "sequence_length": longer}
    how = {"script": script, "processes": None, "warm": True}
    done = launch(tmp_path, config, **how)
    assert re.search("The loss covers, for example: 'the (left|right) corner at the (top|bottom) </s>'", done.output)
    stop_after_27(done)
    template, texts = tmp_path / model.name / "chat_template.jinja", tmp_path / images.name / "metadata.jsonl"
    for file, old, new in (template, "{%", "it is {%"), (texts, '"yes"', '"no"'):
        before = file.read_text()
        file.write_text(before.replace(old, new, 1))
        refused = launch(tmp_path, config, **how, expect=2)
        changes = re.findall("^  (.*?): ", refused.output, re.MULTILINE)
        assert changes == ["data fingerprint"], refused.output
        file.write_text(before)


@pytest.mark.parametrize("begin", ["", "<s> "])
def test_rows_are_what_transformers_makes_of_them(tmp_path, monkeypatch, begin):
    """Whether the chat template or the tokenizer begins the text."""
    start_vlm(tmp_path / "start", begin + TEMPLATE)
    rows = save_answers(tmp_path / "images", generate(6, 0))
    monkeypatch.syspath_prepend(ROOT / "tests" / "forks")
    vlm = importlib.import_module("vlm")
    processor = vlm.load_processor(Model(pretrained=str(tmp_path / "start")))
    data, _ = vlm.load_questions(Data(path=str(tmp_path / "images"), sequence_length=32), processor, 0)
    for number, row in enumerate(rows):
        expected, start = as_asked(str(tmp_path / "start"), row)
        pixels, ids, targets = data.read(number)
        assert (pixels == expected["pixel_values"][0].numpy()).all()
        assert ids.tolist() == expected["input_ids"][0].tolist() and ids[:2].tolist() != [1, 1]
        assert targets.tolist() == [-100] * (start - 1) + ids[start:].tolist() + [-100]


def test_rows_of_another_length_are_refused(task, tmp_path):
    script, config, *_ = task
    length = config["data"]["sequence_length"]
    settings = "--data.sequence_length", length - 1
    done = launch(tmp_path, config, *settings, script=script, processes=None, warm=True, expect=2)
    assert re.search(f"error: data.sequence_length: .*{length}", done.output)


def test_auto_is_refused(task, tmp_path):
    """Rows that fit into memory are tried for causal language models only: batch.max_micro_batch_size."""
    script, config, *_ = task
    settings = "--batch.max_micro_batch_size", "auto"
    done = launch(tmp_path, config, *settings, script=script, processes=None, warm=True, expect=2)
    assert "error: batch.max_micro_batch_size: auto is for rows of text only; give a number" in done.output


def test_adapters_that_nobody_adds_are_refused(task, tmp_path):
    """A fork that builds its own model would ignore model.lora, and train all weights."""
    script, config, *_ = task
    done = launch(tmp_path, config, "--model.lora", "{r: 2}", script=script, processes=None, warm=True, expect=2)
    assert "error: model.lora: the model has no adapter, and would be trained itself" in done.output


def test_a_model_of_ones_own(tmp_path, monkeypatch):
    """The run of a plain loop, on one process and in the shards of two, and an export; one line of train.py is new."""
    module = ROOT / "tests/forks/own_model.py"
    forks.make(tmp_path / "fork", forks.OWN_MODEL, module)
    monkeypatch.syspath_prepend(module.parent)
    own_model = importlib.import_module("own_model")
    config, start = tiny_config(tmp_path), tmp_path / "own"
    config["run"]["save_every"] = 20
    config["model"]["pretrained"] = str(start)
    torch.manual_seed(1)
    own_model.OwnModel(own_model.OwnConfig(vocab_size=VOCABULARY, initializer_range=0.1)).save_pretrained(start)
    rows, held_out = (list(datasets.load_from_disk(tmp_path / name)) for name in ("rows", "held-out"))
    order = shuffled(7, len(rows), 300)
    did = train_reference(config, lambda step: [rows[i] for i in order[10 * step - 10 : 10 * step]], held_out)
    script = tmp_path / "fork" / "train.py"
    alone = launch(tmp_path, config, "--run.output_dir", tmp_path / "alone", script=script)
    did.check(alone)
    wrapper = ROOT / "tests" / "wrapper_cpu_as_gpu.py", script
    how = {"launcher": "fsdp2", "processes": 2, "options": ("--mixed_precision", "no"), "script": wrapper}
    settings = "--run.resume", alone.folder / "checkpoints" / "step-00000020", "--batch.max_micro_batch_size", 2
    done = launch(tmp_path, config, *settings, **how)
    assert done.launches == [20] and difference(done.weights, alone.weights) < 1e-5


def test_another_method_passes_the_suite_with_newer_rooms(tmp_path):
    """Another loss with a setting, optimizer, schedule and log line. The tests' reference has the loss, too."""
    forks.make(tmp_path / "fork", forks.METHOD)
    assert "Newer." in (tmp_path / "fork" / "samerun" / "plan.py").read_text()
    exact = "test_equals_the_plain_loop[1 process, a row at a time]", "test_a_step_without_targets_changes_nothing"
    tests = [*(f"tests/test_exact.py::{test}" for test in exact), "tests/test_house.py", "tests/test_shuffle.py"]
    tests += [
        "tests/test_plan.py::test_memory_of_activations",
        "tests/test_bad_input.py::test_bad_input[own-setting-unlike-any]",
    ]
    command = [sys.executable, "-m", "pytest", "-n0", *tests]
    done = subprocess.run(command, cwd=tmp_path / "fork", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
