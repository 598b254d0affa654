"""What goes wrong while training: damaged checkpoints, numbers that are not finite, too little memory, a full disk."""

import concurrent.futures
import contextlib
import errno
import functools
import io
import itertools
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import zlib
from pathlib import Path

import helpers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from matplotlib.figure import Figure
from reference import shuffled
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import is_fake
from transformers import LlamaForCausalLM

import train
from samerun import files
from samerun.data.rows import longest_row
from samerun.meeting import Meeting
from samerun.optim import Guard
from samerun.run.checkpoint import find_checkpoint, progress_in
from samerun.run.folder import RunFolder
from samerun.run.launch import StopSignal, report
from samerun.run.logs import draw_curves


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(config, finished run): 6 steps of one forward pass each, checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    config = helpers.tiny_config(folder)
    config["run"] |= {"max_steps": 6, "save_every": 2, "keep_checkpoints": 9}
    return config, helpers.run(folder, config)


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of the finished run's folder, in the place where helpers.run(tmp_path, ...) continues it."""
    return shutil.copytree(whole[1].folder, tmp_path / "run")


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def tensors(folder):
    """Every tensor of a checkpoint, optimizer state included."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def complete(folder):
    """Whether a checkpoint holds what its manifest lists, and all of it can be read."""
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    return {path.name for path in folder.iterdir()} == {*listed, "manifest.json"} and tensors(folder)


def leftovers(folder):
    return [path for path in folder.rglob(".*") if path.name != ".lock"]


def assert_like_uninterrupted(done, reference):
    assert same(done.weights, reference.weights)
    assert done.logged("train/loss") == reference.losses  # Each logged step once.
    assert done.status == {"status": "finished", "step": 6}
    assert done.checkpoints == reference.checkpoints
    for name in done.checkpoints:
        assert complete(done.folder / "checkpoints" / name)
    assert not leftovers(done.folder)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def truncate(path):
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 4])


def alter(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, alter, remove])
@pytest.mark.parametrize("pattern", ["*.safetensors", "manifest.json"])
def test_damaged_checkpoint_is_passed_over(whole, copy, tmp_path, damage, pattern):
    folder = copy / "checkpoints" / "step-00000006"
    file = next(folder.glob(pattern))
    damage(file)
    done = helpers.run(tmp_path, whole[0])
    assert str(file if file.suffix == ".safetensors" else folder) in done.output
    assert re.search(f"Continuing .*from {copy}/checkpoints/step-00000004", done.output)
    assert_like_uninterrupted(done, whole[1])


def test_all_checkpoints_damaged(whole, copy, tmp_path):
    for file, damage in zip(sorted(copy.glob("checkpoints/*/*.safetensors")), (truncate, alter, remove)):
        damage(file)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    done = helpers.run(tmp_path, whole[0], expect=2)
    assert len(re.findall("^error: ", done.output, re.MULTILINE)) == 1
    for step in 2, 4, 6:  # Each is named before.
        assert f"step-0000000{step}" in done.output
    assert {path: path.read_bytes() for path in before} == before


KNOWN = ("config", "step", "skipped_steps", "skipped_in_a_row", "rows", "tokens", "real_tokens", "target_tokens")
KNOWN += ("evaluated_step", "best_loss", "best_checkpoint", "lowest_loss", "evaluations_in_vain", "own", "files")
KNOWN += ("sources", "model", "max_steps", "code", "launch")  # With these a resume compares the launch.


def test_damaged_fields_of_a_manifest(copy):
    """Each is taken away, or made what it cannot be. Those that nobody reads may be anything."""
    newest = copy / "checkpoints" / "step-00000006"
    whole = json.loads((newest / "manifest.json").read_text())
    passed_over = set()
    for name, change in itertools.product(whole, (None, [], "x", -1, "gone")):
        damaged = {**whole, name: change}
        if change == "gone":
            del damaged[name]
        (newest / "manifest.json").write_text(json.dumps(damaged))
        found, manifest = find_checkpoint("auto", copy / "checkpoints", Meeting(1))
        progress_in(manifest)
        if found != newest:
            passed_over.add((name, str(change)))
    expected = {(name, change) for name in KNOWN for change in ("None", "[]", "x", "-1")}
    expected |= {(name, "gone") for name in ("config", "step", "files")}  # The others may be newer than a checkpoint.
    expected |= {(f"source_{name}", change) for name in ("sums", "targets") for change in ("[]", "x", "-1")}
    expected |= {("expert_load", change) for change in ("x", "-1")}
    may_be_lower = "best_loss", "lowest_loss", "evaluated_step", "evaluations_in_vain", "max_steps"
    usable = {("best_checkpoint", "x"), *((name, "-1") for name in may_be_lower)}
    assert passed_over == expected - usable


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "1", "NaN", "\x00"])
def test_manifests_that_are_none(copy, text):
    (copy / "checkpoints" / "step-00000006" / "manifest.json").write_text(text)
    assert find_checkpoint("auto", copy / "checkpoints", Meeting(1))[0].name == "step-00000004"


def test_checkpoints_on_another_disk(whole, copy, tmp_path):
    """checkpoints/ is a link. The run saves, prunes, cleans up and continues there, and deletes nothing of others."""
    disk = tmp_path / "disk"
    (copy / "checkpoints").rename(disk)
    (copy / "checkpoints").symlink_to(disk)
    truncate(next(disk.glob("step-00000006/*.safetensors")))
    (disk / ".step-00000005.tmp").mkdir()
    for name in ".step-mine.tmp", "step-mine", "mine":
        (disk / name).mkdir()
    done = helpers.run(tmp_path, whole[0], "--run.keep_checkpoints", 1)
    assert same(done.weights, whole[1].weights) and "after step 4" in done.output
    assert done.checkpoints == [".step-mine.tmp", "mine", "step-00000006", "step-mine"]
    assert (copy / "checkpoints").is_symlink() and complete(disk / "step-00000006")


def test_a_checkpoint_on_another_disk(whole, copy, tmp_path):
    """One of them is a link. It stays, and so does what it leads to."""
    linked = copy / "checkpoints" / "step-00000004"
    linked.rename(tmp_path / "disk")
    linked.symlink_to(tmp_path / "disk")
    done = helpers.run(tmp_path, whole[0], "--run.max_steps", 8, "--run.keep_checkpoints", 1)
    assert done.checkpoints == ["step-00000004", "step-00000008"] and complete(linked)


@pytest.mark.parametrize("target_exists", [True, False])
def test_model_on_another_disk(whole, copy, tmp_path, target_exists):
    """model is a link. What it leads to stays as it is; the new export takes the link's place."""
    disk = tmp_path / "disk"
    (copy / "model").rename(disk)
    (copy / "model").symlink_to(disk if target_exists else "nowhere")
    (copy / ".model.old.tmp").symlink_to(disk)  # As a kill between the two renames leaves it.
    done = helpers.run(tmp_path, whole[0], "--run.max_steps", 7)
    assert not (copy / "model").is_symlink() and not os.path.lexists(copy / ".model.old.tmp")
    assert same(load_file(disk / "model.safetensors"), whole[1].weights)
    assert not same(done.weights, whole[1].weights)


@pytest.mark.parametrize("name", ["copy.safetensors", "shard-00001-model-00001-of-00001 (copy).safetensors"])
def test_weights_of_others_in_a_checkpoint(whole, copy, tmp_path, name):
    """torch would read every file of weights that it finds in the folder."""
    newest = copy / "checkpoints" / "step-00000006"
    shutil.copy(next(copy.glob("checkpoints/step-00000002/*.safetensors")), newest / name)
    done = helpers.run(tmp_path, whole[0])
    assert re.search(f"Checkpoint passed over: .*{re.escape(name)} beside it", done.output)
    assert "after step 4" in done.output
    assert same(done.weights, whole[1].weights)


@pytest.mark.parametrize("line", [b"merged by hand}\n", b'{"step": 6, "note": "\xff"}\n'])
def test_damaged_metrics(whole, copy, tmp_path, line):
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(line)
    before = (copy / "metrics.jsonl").read_bytes()
    done = helpers.run(tmp_path, whole[0], "--run.max_steps", 7, expect=2)
    assert len(re.findall("^error: run.output_dir: .*metrics.jsonl is damaged", done.output, re.MULTILINE)) == 1
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_half_written_files_are_removed(whole, copy, tmp_path):
    truncate(next(copy.glob("checkpoints/step-00000006/*.safetensors")))
    for name in "checkpoints/.step-00000006.tmp", "checkpoints/.step-00000005.tmp", ".model.tmp":
        (copy / name).mkdir()
        (copy / name / "half.safetensors").write_bytes(b"half")
    (copy / ".metrics.jsonl.tmp").write_text("half")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')
    (copy / ".shared-0.tmp").touch()
    (copy / ".status.json.tmp").write_text("half")
    assert_like_uninterrupted(helpers.run(tmp_path, whole[0]), whole[1])


# Numbers that are not finite -----------------------------------------------------------------------------------------


def patch_forward(monkeypatch, before=lambda call, ids: None, after=lambda call, logits: logits):
    """Call `before` and `after` at every training pass of a Llama, with the number of the pass."""
    forward, calls = LlamaForCausalLM.forward, itertools.count(1)

    @functools.wraps(forward)
    def patched(self, input_ids, **inputs):
        is_step = self.training and torch.is_grad_enabled()  # Not evaluation, nor checks before the first step.
        if not is_step or is_fake(next(self.parameters())):  # The count of FLOPs.
            return forward(self, input_ids, **inputs)
        before(call := next(calls), input_ids)
        output = forward(self, input_ids, **inputs)
        output.logits = after(call, output.logits)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", patched)


def in_the_loss(logits):
    return logits * float("nan")


def in_the_gradient(logits):
    """The loss stays finite."""
    logits.register_hook(lambda gradient: gradient * float("inf"))
    return logits


def poison(monkeypatch, passes, how):
    patch_forward(monkeypatch, after=lambda call, logits: how(logits) if call in passes else logits)


@pytest.mark.parametrize("how", [in_the_loss, in_the_gradient])
# Found at the log line, or before the save of a later step, which has no log line.
@pytest.mark.parametrize("log_every, step", [(1, 5), (100, 3)])
def test_not_finite_stop(whole, tmp_path, monkeypatch, how, log_every, step):
    config, reference = whole
    good = f"step-0000000{step - 1}"
    with monkeypatch.context() as patch:
        poison(patch, {step}, how)
        done = helpers.run(tmp_path, config, "--run.log_every", log_every, expect=1)
    (message,) = re.findall("^error: .*", done.output, re.MULTILINE)
    assert f"step {step}" in message and good in message
    # The rows of step 5 are at positions 40 to 49 of the stream of shuffled epochs of 23 rows.
    named = set(map(int, re.findall(r"\d+", re.search(r"[Rr]ows:? \[([\d, ]+)", message)[1])))
    assert named and named <= set(shuffled(7, 23, 10 * step)[10 * step - 10 :])
    assert done.checkpoints[-1] == good and not (done.folder / "model").exists()
    last_logged = 4 if log_every == 1 else 0
    reason = message.removeprefix("error: ")
    assert done.status == {"status": "failed", "step": last_logged, "saved_step": step - 1, "reason": reason}
    assert all(tensor.isfinite().all() for tensor in tensors(done.folder / "checkpoints" / good).values())
    assert same(helpers.run(tmp_path, config).weights, reference.weights)


def test_a_file_that_may_only_be_read():
    """A checksum leaves it as it is: of another user, on a disk that is mounted read-only, or empty."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "weights"
        for content in b"a" * 5000, b"":
            path.write_bytes(content)
            path.chmod(0o444)
            user = os.geteuid()
            if user == 0:
                os.seteuid(65534)  # Root may write everywhere.
            try:
                assert files.size_and_checksum(path) == [len(content), zlib.crc32(content)]
            finally:
                os.seteuid(user)
            path.chmod(0o644)
        assert path.read_bytes() == b""


def test_a_folder_whose_last_replacement_was_killed(tmp_path):
    for name in "model", ".model.old.tmp", "draft":
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    files.replace_folder(tmp_path / "draft", tmp_path / "model")
    assert (tmp_path / "model" / "weights").read_text() == "draft" and os.listdir(tmp_path) == ["model"]


def test_curves_of_a_line_that_a_full_disk_has_cut(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n{"step": 2, "tr')
    draw_curves(tmp_path)
    assert capsys.readouterr().out.startswith("curves.png could not be drawn: ")


def test_curves_that_a_full_disk_has_cut(tmp_path, capsys, monkeypatch):
    """The old picture stays."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/tokens": 10, "train/loss": 2.0}\n')
    draw_curves(tmp_path)
    picture = (tmp_path / "curves.png").read_bytes()

    def cut(self, path, **options) -> None:
        Path(path).write_bytes(picture[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", cut)
    draw_curves(tmp_path)
    assert "curves.png could not be drawn: [Errno 28]" in capsys.readouterr().out
    assert (tmp_path / "curves.png").read_bytes() == picture


def test_what_curves_show(tmp_path, monkeypatch):
    """Each number against the tokens by then, in millions, that of run.eval_every too; and where a launch went on."""
    lines = [
        {"step": 0, "plan/num_processes": 1},
        {"step": 1, "train/tokens": 1e6, "train/loss": 3.0, "perf/tokens_per_second": 9, "train/learning_rate": 0.1},
        {"step": 2, "train/tokens": 2e6, "train/loss": None, "perf/tokens_per_second": 8, "train/learning_rate": 0.2},
        {"step": 2, "train/tokens": 2e6, "eval/loss": 2.5},
        {"step": 2, "plan/num_processes": 2},
        {"step": 3, "train/tokens": 4e6, "train/loss": 1.0, "perf/tokens_per_second": 7, "train/learning_rate": 0.3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = []

    def keep(figure, path, **options) -> None:
        drawn.append([[line.get_xydata().tolist() for line in axes.lines] for axes in figure.axes])
        Path(path).touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    draw_curves(tmp_path, at_most_every=60)
    continued = [[2, 0], [2, 1]]
    assert drawn == [
        [
            [[[1, 3], [4, 1]], [[2, 2.5]], continued],
            [[[1, 9], [2, 8], [4, 7]], continued],
            [[[1, 0.1], [2, 0.2], [4, 0.3]], continued],
        ]
    ]
    draw_curves(tmp_path, at_most_every=60)
    assert len(drawn) == 1
    os.utime(tmp_path / "curves.png", (time.time() - 61,) * 2)
    draw_curves(tmp_path, at_most_every=60)
    assert len(drawn) == 2
    for seconds in 60, 0:  # In a run, and at its end.
        os.utime(tmp_path / "curves.png", (time.time() + 99,) * 2)
        draw_curves(tmp_path, at_most_every=seconds)
    assert len(drawn) == 4


def test_curves_of_many_metrics_take_little_memory(tmp_path):
    """As with many sources: only those that are drawn are kept."""
    others = {f"train/loss/{number}": 2.3456789012 for number in range(500)}
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 1001):
            file.write(json.dumps({"step": step, "train/tokens": 100 * step, "train/loss": 1 / step, **others}) + "\n")
    draw_curves(tmp_path)  # Imports what it needs.
    tracemalloc.start()
    draw_curves(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < (tmp_path / "metrics.jsonl").stat().st_size
    tracemalloc.stop()
    assert (tmp_path / "curves.png").exists()


def test_no_memory_outside_of_a_step(capsys):
    """Such as for the weights of a model that is too large."""
    assert report(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")) == 1
    assert "the model does not fit: shard it" in capsys.readouterr().err


def test_a_sample_of_a_model_that_is_not_finite(tmp_path):
    """The step after it ends the run."""
    config = helpers.tiny_config(tmp_path)
    settings = "--optim.learning_rate", 1e10, "--optim.warmup_steps", 0, "--run.eval_every", 1, "--eval.prompts", "[a]"
    done = helpers.run(tmp_path, config, *settings, expect=1)
    assert re.search(r"^error: the loss or gradient norm of step \d+ is not finite", done.output, re.M), done.output


def test_weights_of_another_model_begin_a_run(whole, tmp_path):
    """Such as for longer rows. Their shapes do not tell, so the run does."""
    config, done = whole
    first = done.folder / "checkpoints" / "step-00000006"
    shutil.copytree(config["model"]["pretrained"], tmp_path / "other")
    settings = json.loads((tmp_path / "other" / "config.json").read_text())
    settings["rope_parameters"]["rope_theta"] = 5e5
    (tmp_path / "other" / "config.json").write_text(json.dumps(settings))
    done = helpers.run(tmp_path, config, "--model.pretrained", tmp_path / "other", "--run.init_from", first)
    assert re.search(r"^run.init_from: the model of these weights differs in rope\S+theta: 10000.0 ", done.output, re.M)


def test_a_model_that_is_not_finite(tmp_path):
    config = helpers.tiny_config(tmp_path)
    config["data"]["packing"] = "concat"
    weights = tmp_path / "start" / "model.safetensors"
    save_file({name: tensor * math.nan for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    done = helpers.run(tmp_path, config, expect=2)
    assert "error: model: the loss is nan before any step; check the weights of model.pretrained" in done.output


# A fused optimizer decides on the device, and for one that is not (muon) the host does.
@pytest.mark.parametrize("how, optimizer", [(in_the_loss, "adamw"), (in_the_gradient, "adamw"), (in_the_loss, "muon")])
def test_not_finite_skip(whole, tmp_path, monkeypatch, how, optimizer):
    poison(monkeypatch, {3, 5}, how)
    settings = "--run.max_skipped_steps", 1, "--run.save_every", 1, "--optim.name", optimizer
    done = helpers.run(tmp_path, whole[0], *settings)
    assert done.logged("train/skipped_steps") == [0, 0, 1, 1, 2, 2]
    saved = [tensors(done.folder / "checkpoints" / name) for name in done.checkpoints]
    assert [same(a, b) for a, b in itertools.pairwise(saved)] == [False, True, False, True, False]
    assert all(tensor.isfinite().all() for tensor in saved[-1].values())
    assert "NaN" not in (done.folder / "metrics.jsonl").read_text()  # It is no JSON.


def test_not_finite_gives_up(whole, tmp_path, monkeypatch):
    poison(monkeypatch, {2, 4, 5, 6}, in_the_loss)
    done = helpers.run(tmp_path, whole[0], "--run.max_skipped_steps", 1, expect=1)
    (message,) = re.findall("^error: .*", done.output, re.MULTILINE)
    assert "step 4" in message and "step-00000004" in message  # Not step 2, which was skipped and survived.
    assert [line["step"] for line in done.metrics if "train/loss" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize("allowed", [0, 1])
def test_steps_without_targets_among_skipped_ones(allowed):
    """They end a row. If that is too long already, its first step stays the one that is named."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    guard, optimizers = Guard(allowed, 0, 0, torch.device("cpu")), [torch.optim.AdamW([parameter], fused=True)]
    number, nothing = torch.tensor(1.0), torch.tensor(float("nan"))
    guard.skip()
    guard.update(optimizers, number, number)
    assert guard.read() == (1, 0)
    for _ in range(allowed):
        guard.update(optimizers, nothing, number)
        guard.skip()
        guard.update(optimizers, number, number)
    assert guard.read() == (1 + 2 * allowed, 0) and optimizers[0].state[parameter]["step"] == 1 + allowed
    for _ in range(allowed + 1):
        guard.update(optimizers, number, nothing)
    guard.skip()
    guard.update(optimizers, number, number)
    assert guard.read() == (4 + 3 * allowed, 3 + allowed)


def test_overflow(whole, tmp_path):
    done = helpers.run(tmp_path, whole[0], "--optim.learning_rate", "1e30", expect=1)
    assert len(re.findall("^error: .*step 2 .*not finite", done.output, re.MULTILINE)) == 1
    assert not list(done.folder.glob("checkpoints/*"))


# Power ---------------------------------------------------------------------------------------------------------------


def test_a_complete_checkpoint_is_on_the_disk(whole, tmp_path, monkeypatch):
    """Each of its files, and their names, before it gets its own, which is then on the disk before the next save."""
    events, sync, replace = [], files.sync, os.replace
    monkeypatch.setattr(files, "sync", lambda path: events.append(Path(path).name) or sync(path))
    monkeypatch.setattr(
        os, "replace", lambda old, new: events.append((Path(old).name, Path(new).name)) or replace(old, new)
    )
    done, last = helpers.run(tmp_path, whole[0]), 0
    for name in done.checkpoints:
        renamed = events.index((f".{name}.tmp", name))
        before = max(at for at, event in enumerate(events[:renamed]) if event == f".{name}.tmp")
        written = {path.name for path in (done.folder / "checkpoints" / name).iterdir()}
        assert len(written) > 1 and written <= set(events[last:before])
        assert events[renamed + 1] == "checkpoints"
        last = renamed


# Memory --------------------------------------------------------------------------------------------------------------


def no_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def limit_memory(monkeypatch, rows, where="forward"):
    """Memory for so many rows of full length in one pass."""
    most = rows * 24  # The sequence_length of tiny_config().

    def before(call, ids):
        if where == "forward" and ids.numel() > most:
            no_memory()

    def after(call, logits):
        if where == "backward" and logits[..., 0].numel() > most:
            logits.register_hook(no_memory)
        widths.append(logits[..., 0].numel())
        return logits

    def update(*args, **options):
        if where == "optimizer" and widths[-1] > most:
            no_memory()
        return adam(*args, **options)

    module, widths = sys.modules["torch.optim.adam"], []  # torch.optim hides its name.
    adam = module.adam
    patch_forward(monkeypatch, before, after)
    monkeypatch.setattr(module, "adam", update)


@pytest.mark.parametrize(
    "rows, where, micro_batch_size",
    [(1, "forward", 1), (3, "forward", 3), (4, "backward", 4), (7, "forward", 5), (99, "forward", 10)],
)
def test_auto_finds_what_fits(whole, tmp_path, monkeypatch, rows, where, micro_batch_size):
    limit_memory(monkeypatch, rows, where)
    results = []
    for name, limit in ("auto", "auto"), ("explicit", min(rows, 10)):
        (tmp_path / name).mkdir()
        results.append(helpers.run(tmp_path / name, whole[0], "--batch.max_micro_batch_size", limit))
    auto, explicit = results
    plan = auto.metrics[0]
    assert (plan["plan/micro_batch_size"], plan["plan/global_batch_size"]) == (micro_batch_size, 10)
    assert same(auto.weights, explicit.weights) and auto.losses == explicit.losses
    for checkpoint in auto.folder.glob("checkpoints/*"):
        assert json.loads((checkpoint / "manifest.json").read_text())["plan"]["micro_batch_size"] == micro_batch_size


def test_auto_finds_what_fits_beside_gradients_and_moments(whole, tmp_path, monkeypatch):
    """Which the first passes of a launch do not need yet, with batch.max_micro_batch_size auto either."""
    build_optimizer, made = train.build_optimizer, []
    monkeypatch.setattr(train, "build_optimizer", lambda *args: made.extend(build_optimizer(*args)) or made)

    def before(call, ids):
        weights = [weight for group in made[0].param_groups for weight in group["params"]]
        if ids.numel() > 3 * 24 and made[0].state and any(weight.grad is not None for weight in weights):
            no_memory()

    patch_forward(monkeypatch, before)
    done = helpers.run(tmp_path, whole[0], "--batch.max_micro_batch_size", "auto")
    assert done.metrics[0]["plan/micro_batch_size"] == 3


def test_auto_tries_what_a_step_computes(whole, tmp_path, monkeypatch):
    """With batch.max_micro_batch_size auto: in the precision of the launch, with documents as the model has them."""
    token_loss, is_cast, are_joined = train.token_loss, set(), []

    def noted(logits, targets, **settings):
        if torch.is_grad_enabled():
            is_cast.add(torch.is_autocast_enabled("cpu"))
        return token_loss(logits, targets, **settings)

    monkeypatch.setattr(train, "token_loss", noted)
    monkeypatch.setattr(
        "samerun.run.setup.longest_row", lambda data, joined: are_joined.append(joined) or longest_row(data, joined)
    )
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    settings = "--batch.max_micro_batch_size", "auto", "--run.max_steps", 1, "--optim.warmup_steps", 0
    for attention in "sdpa", "eager":
        folder = tmp_path / attention
        helpers.run(tmp_path, whole[0], *settings, "--model.attention", attention, "--run.output_dir", folder)
    assert is_cast == {True} and are_joined == [True, False]


def test_auto_tries_a_step_of_two_micro_steps(whole, tmp_path, monkeypatch):
    """With batch.max_micro_batch_size auto: what FSDP2 keeps of the first one then depends on batch.accumulation."""
    forward_backward, counts = train.forward_backward, []

    def noted(parallel, model, micro_batches, scale):
        counts.append([batch.targets.numel() // 24 for batch in micro_batches])
        return forward_backward(parallel, model, micro_batches, scale)

    monkeypatch.setattr(train, "forward_backward", noted)
    limit_memory(monkeypatch, 9)
    helpers.run(tmp_path, whole[0], "--batch.max_micro_batch_size", "auto")
    assert counts[:2] == [[10, 10], [9, 9]]


@pytest.mark.slow
def test_auto_on_three_processes(whole, tmp_path):
    """Of 10 rows, one has 4."""
    done = helpers.launch(tmp_path, whole[0], "--batch.max_micro_batch_size", "auto", processes=3, warm=True)
    assert done.metrics[0]["plan/micro_batch_size"] == 4
    assert done.losses == pytest.approx(whole[1].losses, rel=1e-6)


def test_not_even_one_row_fits(whole, tmp_path, monkeypatch):
    limit_memory(monkeypatch, 0)
    done = helpers.run(tmp_path, whole[0], "--batch.max_micro_batch_size", "auto", expect=2)
    assert len(re.findall("^error: .*one row.*data.sequence_length", done.output, re.MULTILINE)) == 1


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])  # Whose state is made in the first step.
def test_out_of_memory_while_training(whole, tmp_path, monkeypatch, where):
    limit_memory(monkeypatch, 5, where)
    done = helpers.run(tmp_path, whole[0], expect=1)
    (message,) = re.findall("^error: .*", done.output, re.MULTILINE)
    assert "out of memory" in message and re.search("result .*(same|not change)", message)
    advice = re.search(r"batch\.max_micro_batch_size (?:to )?(\d+)", message)[1]  # What to write, and it works:
    done = helpers.run(tmp_path, whole[0], "--batch.max_micro_batch_size", advice)
    assert done.losses == pytest.approx(whole[1].losses, rel=1e-6)
    assert all(torch.allclose(done.weights[k], v, rtol=0, atol=1e-5) for k, v in whole[1].weights.items())


def test_out_of_memory_with_one_row(whole, tmp_path, monkeypatch):
    limit_memory(monkeypatch, 0)
    done = helpers.run(tmp_path, whole[0], "--batch.max_micro_batch_size", 1, expect=1)
    (message,) = re.findall("^error: .*", done.output, re.MULTILINE)
    assert "step 1" in message and "data.sequence_length" in message and "max_micro_batch_size" not in message


# The disk ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def largest_file(size):
    """No file can grow beyond so many bytes, as on a full disk: the write fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_disk_full(done, checkpoints):
    messages = re.findall("^error: .*", done.output, re.MULTILINE)
    assert len(messages) == 1 and "Traceback" not in done.output
    assert re.search("File too large|No space left", messages[0])
    assert re.search(f"{done.folder}|run folder", messages[0])
    assert [name for name in done.checkpoints if not name.startswith(".")] == checkpoints
    for name in checkpoints:
        assert complete(done.folder / "checkpoints" / name)


def test_disk_full_while_saving(whole, copy, tmp_path):
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    shutil.rmtree(copy / "model")
    with largest_file(50_000):
        done = helpers.run(tmp_path, whole[0], expect=1)
    assert_disk_full(done, ["step-00000002", "step-00000004"])
    assert not (done.folder / "model").exists()
    assert_like_uninterrupted(helpers.run(tmp_path, whole[0]), whole[1])


def test_folder_is_free_after_a_failed_save(whole, copy, tmp_path, monkeypatch):
    """However late the thread that saved comes to its end, main() can be called again."""

    def tell_early(future, error):
        set_exception(future, error)
        time.sleep(1)  # The main thread knows it by now.

    set_exception = concurrent.futures.Future.set_exception
    monkeypatch.setattr(concurrent.futures.Future, "set_exception", tell_early)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    with largest_file(50_000):
        helpers.run(tmp_path, whole[0], expect=1)
    monkeypatch.setattr(RunFolder, "PATIENCE", 0)
    helpers.run(tmp_path, whole[0])


def test_what_is_half_removed_is_no_checkpoint(whole, tmp_path, monkeypatch):
    """Interrupted after the first file, where an older checkpoint goes: those that are listed are complete."""
    config, rmtree = {**whole[0], "run": whole[0]["run"] | {"keep_checkpoints": 1}}, shutil.rmtree

    def interrupted(folder, *args, **options):
        if folder.exists():
            next(folder.glob("*.safetensors")).unlink()
            raise OSError("interrupted")

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    done = helpers.run(tmp_path, config, expect=1)
    listed = list((done.folder / "checkpoints").glob("step-*"))
    assert "interrupted" in done.output and leftovers(done.folder) and listed and all(map(complete, listed))
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    done = helpers.run(tmp_path, config)
    assert done.checkpoints == ["step-00000006"] and same(done.weights, whole[1].weights)


def test_a_checkpoint_with_settings_for_other_programs(whole, tmp_path):
    """It is one all the same, and neither a model nor an adapter."""
    done = helpers.run(tmp_path, whole[0])
    for name in "config.json", "adapter_config.json":
        (done.folder / "checkpoints" / done.checkpoints[-1] / name).write_text("{}")
    output = helpers.run(tmp_path, whole[0]).output
    assert "Finished already" in output and "passed over" not in output


def test_training_goes_on_while_a_checkpoint_is_written(whole, tmp_path, monkeypatch):
    """Step 2 is saved no sooner than step 3 has begun; what is saved is the state after step 2 all the same."""
    begun, rate, write = threading.Event(), train.learning_rate_at, dcp.save

    def learning_rate_at(config, step, max_steps, peak):
        if step == 4:
            begun.set()
        return rate(config, step, max_steps, peak)

    monkeypatch.setattr(train, "learning_rate_at", learning_rate_at)
    monkeypatch.setattr(dcp, "save", lambda *args, **options: begun.wait(30) and write(*args, **options))
    done = helpers.run(tmp_path, whole[0], "--run.keep_checkpoints", 3)
    assert begun.is_set() and done.checkpoints == ["step-00000002", "step-00000004", "step-00000006"]
    for name in done.checkpoints[:-1]:
        resumed = tmp_path / name
        resumed.mkdir()
        again = helpers.run(resumed, whole[0], "--run.resume", done.folder / "checkpoints" / name)
        assert same(again.weights, whole[1].weights)


def test_a_stop_right_after_a_save_saves_no_more(whole, tmp_path, monkeypatch):
    """To write a checkpoint anew would first remove it: for a moment there would be none."""
    answers, saves, write = iter([False, False, True]), [], dcp.save
    monkeypatch.setattr(StopSignal, "agreed", lambda self: next(answers))
    monkeypatch.setattr(dcp, "save", lambda *args, **options: saves.append(1) or write(*args, **options))
    done = helpers.run(tmp_path, whole[0])
    assert done.status == {"status": "stopped", "step": 2} and done.checkpoints == ["step-00000002"] and len(saves) == 1


def test_terminal_that_knows_few_characters(whole, tmp_path, monkeypatch):
    """What it cannot show of a sample ends no run."""
    monkeypatch.setattr(train, "draw_curves", lambda *args, **options: None, raising=False)  # A fork may have none.
    monkeypatch.setattr(train, "flops_per_token", helpers.flops_per_token)
    config = helpers.write_config(tmp_path, whole[0] | {"eval": {"prompts": ["é😀"], "max_new_tokens": 1}})
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="ascii")) as terminal:
        assert train.main(["--config", str(config), "--run.max_steps", "5"]) == 0
    terminal.seek(0)
    assert "--- sample 0\n??" in terminal.read()


def test_disk_full_while_exporting(whole, copy, tmp_path):
    shutil.rmtree(copy / "model")
    (copy / "status.json").write_text('{"status": "running", "step": 6}')
    with largest_file(50_000):
        done = helpers.run(tmp_path, whole[0], expect=1)
    assert_disk_full(done, whole[1].checkpoints)
    assert not (done.folder / "model").exists()
    assert_like_uninterrupted(helpers.run(tmp_path, whole[0]), whole[1])


def test_disk_full_while_logging(whole, tmp_path, monkeypatch):
    learning_rate_at = train.learning_rate_at

    def full_at_step_3(config, step, max_steps, peak):
        if step == 3:
            while not (tmp_path / "run" / "checkpoints" / "step-00000002").exists():  # It is saved in the background.
                time.sleep(0.01)
            limit.enter_context(largest_file((tmp_path / "run" / "metrics.jsonl").stat().st_size + 10))
        return learning_rate_at(config, step, max_steps, peak)

    with monkeypatch.context() as patch, contextlib.ExitStack() as limit:
        patch.setattr(train, "learning_rate_at", full_at_step_3)
        done = helpers.run(tmp_path, whole[0], expect=1)
    assert_disk_full(done, ["step-00000002"])
    assert_like_uninterrupted(helpers.run(tmp_path, whole[0]), whole[1])


def test_a_log_that_cannot_be_written(whole, tmp_path, monkeypatch):
    """The disk of the checkpoints may be another one: the run ends after the step, and saves it."""
    learning_rate_at, metrics = train.learning_rate_at, tmp_path / "run" / "metrics.jsonl"

    def without_log_from_step_3_on(config, step, *more):
        if step == 3 and metrics.is_file():
            metrics.rename(tmp_path / "aside")
            metrics.mkdir()
        return learning_rate_at(config, step, *more)

    with monkeypatch.context() as patch:
        patch.setattr(train, "learning_rate_at", without_log_from_step_3_on)
        done = helpers.run(tmp_path, whole[0], expect=1)
    assert len(re.findall("^error: .*metrics.jsonl", done.output, re.MULTILINE)) == 1
    assert done.checkpoints == ["step-00000002", "step-00000003"]
    metrics.rmdir()
    (tmp_path / "aside").rename(metrics)
    again = helpers.run(tmp_path, whole[0])
    assert again.launches == [0, 3] and same(again.weights, whole[1].weights)


def test_disk_really_full(whole, tmp_path):
    disk = tmp_path / "run"
    disk.mkdir()
    size = sum(path.stat().st_size for path in (whole[1].folder / "checkpoints" / "step-00000002").iterdir())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size * 3 // 2}", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk takes privileges")
    try:
        done = helpers.run(tmp_path, whole[0], expect=1)  # Room for one checkpoint.
        assert_disk_full(done, ["step-00000002"])
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        assert_like_uninterrupted(helpers.run(tmp_path, whole[0]), whole[1])
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


# One rank of two -----------------------------------------------------------------------------------------------------

ONE_RANK = """
import os, runpy, sys, pytest
sys.path[:0] = {path}
import test_damage
if os.environ["RANK"] == "{rank}":
    {patch}
runpy.run_path({script!r}, run_name="__main__")
"""


def launch(tmp_path, patch, config, *overrides, expect=0, rank=1):
    """Two processes, with `patch` executed on one rank before train.py."""
    script = tmp_path / "train_patched.py"
    path = [str(helpers.ROOT / "tests"), str(helpers.ROOT)]
    script.write_text(ONE_RANK.format(path=path, rank=rank, patch=patch, script=str(helpers.ROOT / "train.py")))
    done = helpers.launch(tmp_path, config, *overrides, processes=2, expect=expect, script=script, warm=True)
    return done, re.findall("^error: .*", done.output, re.MULTILINE)


@pytest.mark.slow
def test_not_finite_on_one_rank(whole, tmp_path):
    patch = "test_damage.poison(pytest.MonkeyPatch(), {3}, test_damage.in_the_loss)"
    done, messages = launch(tmp_path, patch, whole[0], expect=1)
    assert len(messages) == 1 and "step 3" in messages[0]
    assert done.checkpoints == ["step-00000002"]


@pytest.mark.slow
def test_less_memory_on_one_rank(whole, tmp_path):
    patch = "test_damage.limit_memory(pytest.MonkeyPatch(), 2)"
    done, messages = launch(tmp_path, patch, whole[0], "--batch.max_micro_batch_size", "auto")
    assert not messages and done.metrics[0]["plan/micro_batch_size"] == 2
    assert done.losses == pytest.approx(whole[1].losses, rel=1e-6)


@pytest.mark.slow
def test_out_of_memory_on_one_rank(whole, tmp_path):
    patch = "test_damage.limit_memory(pytest.MonkeyPatch(), 2)"
    done, messages = launch(tmp_path, patch, whole[0], expect=1)
    assert len(messages) == 1 and "max_micro_batch_size" in messages[0]
    assert "Connection closed" not in done.output


def slow_rename(monkeypatch):
    """The main process takes a second to give a checkpoint its name, as one does that has large files to read."""
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: time.sleep("step-" in str(new)) or replace(old, new))


@pytest.mark.slow
def test_other_ranks_wait_for_the_best_checkpoint(whole, tmp_path):
    """The last step is the best. No rank looks for it before the main process has given it its name."""
    patch = "test_damage.slow_rename(pytest.MonkeyPatch())"
    done, messages = launch(tmp_path, patch, whole[0], "--run.keep_best", "true", rank=0)
    losses = done.logged("eval/loss")
    assert not messages and losses and min(losses) == losses[-1] and "(step-00000006)" in done.output
    assert all(torch.allclose(done.weights[k], v, rtol=0, atol=1e-5) for k, v in whole[1].weights.items())
