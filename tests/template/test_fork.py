"""People fork this template, and take its newer rooms.

Another task, and another method, take few lines of train.py and none of samerun/. So a later commit's samerun/ merges
without a conflict, and what the script promises holds for the fork, too.
"""

import difflib
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import forks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import ROOT, VOCABULARY, difference, launch, tiny_config
from reference import shuffled, train_reference
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
IMAGES, SIDE, CLASSES = 46, 8, 4
PATCHES = (SIDE // 2) ** 2  # Of 2 x 2 pixels.


def generate(folder: Path, count: int, seed: int) -> list[dict]:
    """Noise with a brighter quadrant, saved as a dataset that data.path takes. The class says which quadrant."""
    rng, rows = np.random.default_rng(seed), []
    for label in rng.integers(0, CLASSES, count).tolist():
        pixels, half = rng.integers(0, 60, (SIDE, SIDE)), SIDE // 2
        top, left = divmod(label, 2)
        pixels[top * half :, left * half :][:half, :half] += 190
        rows.append({"pixels": pixels.flatten().tolist(), "label": label})
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    return rows


def as_tensors(rows: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.tensor([row["pixels"] for row in rows]).float().reshape(-1, 1, SIDE, SIDE) / 255
    return pixels, torch.tensor([row["label"] for row in rows])


def summed_loss(model: torch.nn.Module, rows: list[dict]) -> tuple[torch.Tensor, int]:
    images, labels = as_tensors(rows)
    return F.cross_entropy(model(images).logits, labels, reduction="sum"), len(rows)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The fork, its config, the plain loop's result for it, and the held-out images."""
    folder = tmp_path_factory.mktemp("task")
    forks.make(folder / "fork", forks.CLASSIFIER, ROOT / "tests/forks/classifier.py")
    script = folder / "fork" / "train.py"
    rows, held_out = generate(folder / "images", IMAGES, 0), generate(folder / "held-out", 21, 1)
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.ViTForImageClassification(
        transformers.ViTConfig(
            **shape,
            image_size=SIDE,
            patch_size=2,
            num_channels=1,
            num_labels=CLASSES,
            initializer_range=0.1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).save_pretrained(folder / "start")
    config = tiny_config(folder / "text")
    config["run"]["save_every"] = 8
    config["batch"]["max_micro_batch_size"] = 2
    config["data"] = {"path": str(folder / "images"), "sequence_length": PATCHES}
    config["data"]["eval_source"] = {"path": str(folder / "held-out")}
    config["model"] = {"pretrained": str(folder / "start")}
    config["optim"] |= {"learning_rate": 0.003, "warmup_steps": 3, "max_grad_norm": 2.0}
    order = shuffled(7, IMAGES, 300)
    kind = transformers.AutoModelForImageClassification
    did = train_reference(
        config, lambda step: [rows[i] for i in order[10 * step - 10 : 10 * step]], kind=kind, summed_loss=summed_loss
    )
    assert did.losses[-1] < did.losses[0] / 2 and min(did.grad_norms) < 2 < max(did.grad_norms)
    trained = kind.from_pretrained(folder / "start")
    trained.load_state_dict(did.weights)
    trained.save_pretrained(folder / "expected")  # A file has other names for the weights of a ViT than its modules.
    did.weights = load_file(folder / "expected" / "model.safetensors")
    return script, config, did, held_out


def test_no_name_is_left_over(task):
    subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", task[0]], check=True)


def test_it_takes_few_lines(task):
    """At most 20 lines that train.py does not have, beside a module of its own; lines that went are not counted."""
    ours, theirs = (ROOT / "train.py").read_text().splitlines(), task[0].read_text().splitlines()
    new = [line for line in difflib.ndiff(ours, theirs) if line.startswith("+ ")]
    assert 8 < len(new) <= 20, "\n".join(new)


def check(done, task, processes: int) -> None:
    """Losses, weights and evaluation are those of the plain loop, and the counts those of the plan."""
    _, _, did, held_out = task
    did.check(done)
    assert done.metrics[0]["plan/num_processes"] == processes  # Of the first launch.
    assert done.metrics[0]["plan/tokens_per_step"] == 10 * PATCHES
    lines = [line for line in done.metrics if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert [line["train/rows"] for line in lines] == [line["train/target_tokens"] for line in lines]
    assert [line["train/tokens"] for line in lines] == [10 * PATCHES * line["step"] for line in lines]
    timed = [line for line in lines if line["perf/step_seconds"]]
    assert len(timed) >= 20
    for line in timed:
        assert line["perf/rows_per_second"] * line["perf/step_seconds"] == pytest.approx(10)
        assert line["perf/tokens_per_second"] == pytest.approx(PATCHES * line["perf/rows_per_second"])
    summary = {key: value for key, value in done.metrics[-1].items() if key.endswith("_seconds")}
    assert sum(summary.values()) == pytest.approx(2 * summary["summary/wall_seconds"])

    model = transformers.AutoModelForImageClassification.from_pretrained(done.folder / "model")
    images, labels = as_tensors(held_out)
    with torch.no_grad():
        logits = model(images).logits
    right = (logits.argmax(1) == labels).double().mean().item()
    assert right > 0.8 and done.logged("eval/accuracy")[-1] == pytest.approx(right)
    assert done.logged("eval/loss")[-1] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_two_processes(task, tmp_path):
    script, config, *_ = task
    done = launch(tmp_path, config, processes=2, script=script, warm=True)
    assert done.metrics[0]["plan/micro_batch_size"] == 2 and done.metrics[0]["plan/grad_accum_steps"] == 3
    check(done, task, 2)


def test_one_process_continued_on_two(task, tmp_path):
    """The whole run on one; then, as if killed after step 27, from the checkpoint of step 24 on two."""
    script, config, *_ = task
    done = launch(tmp_path, config, "--batch.max_micro_batch_size", 3, script=script, warm=True)
    assert done.metrics[0]["plan/micro_batch_size"] == 3 and done.metrics[0]["plan/grad_accum_steps"] == 4
    check(done, task, 1)

    first = done.weights
    shutil.rmtree(done.folder / "model")
    shutil.rmtree(done.folder / "checkpoints" / "step-00000030")
    (done.folder / "status.json").write_text('{"status": "running", "step": 27}')
    done = launch(tmp_path, config, processes=2, script=script, warm=True)
    assert done.launches == [0, 24] and difference(done.weights, first) < 1e-5
    check(done, task, 1)


def test_auto_is_refused(task, tmp_path):
    """Rows that fit into memory are tried for text only: batch.max_micro_batch_size."""
    script, config, *_ = task
    settings = "--batch.max_micro_batch_size", "auto"
    done = launch(tmp_path, config, *settings, script=script, processes=None, warm=True, expect=2)
    assert "error: batch.max_micro_batch_size: auto is for text only; give a number" in done.output


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
