"""People fork train.py. Another task takes few lines, and what the script promises then holds for that task, too."""

import ast
import difflib
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import fork_classifier
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import ROOT, difference, launch
from reference import shuffled, train_reference
from safetensors.torch import load_file
from surgery import Script

pytestmark = pytest.mark.slow
IMAGES, SIDE, CLASSES = 46, 8, 4
PATCHES = (SIDE // 2) ** 2  # Of 2 x 2 pixels.


def fork(source: str) -> str:
    """The script with the changes of fork_classifier.py. Fails if one of them has nothing to change any more."""
    script, changes = Script(source), Script(Path(fork_classifier.__file__).read_text())
    fork_classifier.edit(script)
    for node in changes.tree.body:
        if isinstance(node, ast.ClassDef):
            for method in node.body[1:]:  # Without the docstring.
                script.put(f"{node.name}.{method.name}", changes.text_of(method))
        elif isinstance(node, ast.FunctionDef) and node.name != "edit":
            script.put(node.name, changes.text_of(node))
    script.tidy()
    return script.source


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
    script = folder / "classifier.py"
    script.write_text(fork((ROOT / "train.py").read_text()))
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
    config = {
        "run": {"max_steps": 30, "seed": 7, "log_every": 1, "eval_every": 0, "save_every": 8, "trackers": []},
        "batch": {"global_batch_size": 10, "max_micro_batch_size": 2},
        "data": {
            "path": str(folder / "images"),
            "sequence_length": PATCHES,
            "eval_source": {"path": str(folder / "held-out")},
        },
        "model": {"pretrained": str(folder / "start")},
        "optim": {
            "learning_rate": 0.003,
            "warmup_steps": 3,
            "schedule": "cosine",
            "min_learning_rate_ratio": 0.1,
            "weight_decay": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1e-5,
            "max_grad_norm": 2.0,
        },
    }
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
    """At most 60 lines that train.py does not have; lines that went are not counted."""
    ours, theirs = (ROOT / "train.py").read_text().splitlines(), task[0].read_text().splitlines()
    new = [line for line in difflib.ndiff(ours, theirs) if line.startswith("+ ")]
    assert 20 < len(new) <= 60, "\n".join(new)


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
    assert right > 0.8 and lines[-1]["eval/accuracy"] == pytest.approx(right)
    assert lines[-1]["eval/loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


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
