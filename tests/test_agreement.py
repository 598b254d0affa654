"""One run on all ranks: nodes that differ are refused before the first step, and copies that drift apart are noticed.

Nodes are two processes of `python train.py` on loopback, with the environment that a launcher would give them.
"""

import hashlib
import importlib
import json
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import datasets
import helpers
import numpy as np
import pytest
import torch
import yaml
from helpers import (
    ROOT,
    Done,
    free_port,
    kill_tree,
    launch,
    make_rows,
    run,
    start,
    tiny_config,
    tiny_model,
    write_rows,
)
from safetensors.torch import load_file, save_file

import train
from samerun.run import checkpoint
from samerun.run.agreement import checksums_of_code, differences
from samerun.run.replicas import checksum_of_bits, sample_of_weights


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = tiny_config(tmp_path_factory.mktemp("data"))
    config["run"] |= {"max_steps": 6, "save_every": 2, "keep_checkpoints": 9}
    return config


def start_nodes(folder: Path, config: dict, *overrides, other: tuple = (), script=ROOT / "train.py", **environment):
    """Two processes that share folder/run, and are otherwise on machines of their own: folder/node-0 and node-1.

    `other` are settings of the second one alone. The values of the environment are pairs.
    """
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(free_port())
    scripts = script if isinstance(script, list) else [script, script]
    found = []
    for rank in range(2):
        home = folder / f"node-{rank}"
        home.mkdir(exist_ok=True)
        env = common | {"RANK": str(rank), "HF_DATASETS_CACHE": str(home / "cache")}
        env |= {name: values[rank] for name, values in environment.items()}
        settings = "--run.output_dir", folder / "run", *overrides, *(other if rank else ())
        found.append(start(home, config, *settings, processes=None, script=scripts[rank], env=env, cwd=home, warm=True))
    return found


def finish(*nodes) -> tuple[list[int], list[str]]:
    """Exit statuses and outputs."""
    with ExitStack() as stack:
        for node in nodes:
            stack.callback(kill_tree, node)
        outputs = [node.communicate(timeout=240)[0] for node in nodes]
    return [node.returncode for node in nodes], outputs


def fork(path: Path, code: str) -> Path:
    """A script that runs train.py after this code, which may use `train` and `rank`."""
    path.write_text(
        f"import os, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport train\n"
        f"rank = int(os.environ.get('RANK', 0))\n{code}\nsys.exit(train.main())\n"
    )
    return path


def assert_refused(folder: Path, nodes, *words: str) -> None:
    """By one message of one process with these words, before anything is written."""
    codes, outputs = finish(*nodes)
    told = "\n".join(outputs)
    assert codes == [2, 2], told
    assert (
        re.findall("^error: .*", told, re.M) == re.findall("^error: launch: .*", outputs[0], re.M) and "error:" in told
    )
    for word in words:
        assert word in outputs[0], told
    assert "Traceback" not in told and not (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "setting, before, value",
    [
        ("run.seed", 7, 8),
        pytest.param("batch.global_batch_size", 10, 12, marks=pytest.mark.slow),
        pytest.param("run.save_every", 2, 3, marks=pytest.mark.slow),
        pytest.param("run.max_steps", 6, 5, marks=pytest.mark.slow),
        pytest.param("optim.learning_rate", 0.005, 0.01, marks=pytest.mark.slow),
        pytest.param("data.sequence_length", 24, 12, marks=pytest.mark.slow),
    ],
)
def test_other_settings(config, tmp_path, setting, before, value):
    nodes = start_nodes(tmp_path, config, other=(f"--{setting}", value))
    assert_refused(tmp_path, nodes, f"  {setting}: {before} on ", f"(rank 0), {value} on ", "(rank 1)")


@pytest.mark.parametrize("lengths", ["others", pytest.param("half", marks=pytest.mark.slow)])
def test_other_rows_under_the_same_path(config, tmp_path, lengths):
    """And the same rows under another path are no difference; see test_rows_elsewhere."""
    rows = make_rows([5, 9, 24] * 10, seed=4)
    others = make_rows([5, 9, 24] * 10, seed=5) if lengths == "others" else rows[:15]
    for rank, found in enumerate((rows, others)):
        (tmp_path / f"node-{rank}").mkdir()
        write_rows(tmp_path / f"node-{rank}" / "here", found)
    nodes = start_nodes(tmp_path, config, "--data.path", "here")
    assert_refused(tmp_path, nodes, "  data: fingerprint of the rows: ")


@pytest.mark.slow
def test_other_rows_to_evaluate_on(config, tmp_path):
    for rank in range(2):
        (tmp_path / f"node-{rank}").mkdir()
        write_rows(tmp_path / f"node-{rank}" / "here", make_rows([8] * 5, seed=rank))
    nodes = start_nodes(tmp_path, config, "--data.eval_source.path", "here")
    assert_refused(tmp_path, nodes, "  Evaluation: fingerprint of the rows: ")


@pytest.mark.slow
def test_other_weights_under_the_same_path(config, tmp_path):
    for rank in range(2):
        (tmp_path / f"node-{rank}").mkdir()
        tiny_model(tmp_path / f"node-{rank}" / "start")
    weights = tmp_path / "node-1" / "start" / "model.safetensors"
    save_file({name: value * 1.01 for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    nodes = start_nodes(tmp_path, config, "--model.pretrained", "start")
    assert_refused(tmp_path, nodes, "  model: sample of lm_head.weight: ")


def test_other_code(config, tmp_path):
    """Of the script; that of samerun/ is compared in the same way."""
    scripts = []
    for rank in range(2):
        (tmp_path / f"copy-{rank}").mkdir()
        scripts.append(tmp_path / f"copy-{rank}" / "train.py")
        code = (ROOT / "train.py").read_text().replace("from samerun import early", SEES_SAMERUN, 1)
        scripts[rank].write_text(code + "# Other code.\n" * rank)
    nodes = start_nodes(tmp_path, config, script=scripts)
    assert_refused(tmp_path, nodes, "  code of train.py: ")


def test_code_beside_the_script(tmp_path, monkeypatch):
    """Where a fork has its data or its model."""
    (tmp_path / "train.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "own_task", None)
    for text in "A = 1", "A = 2":
        (tmp_path / "own_task.py").write_text(text)
        sys.modules.pop("own_task")
        importlib.import_module("own_task")
        found = checksums_of_code(tmp_path / "train.py")
        assert found["own_task.py"] == hashlib.sha256(text.encode()).hexdigest()[:12]


@pytest.mark.slow
def test_other_versions(config, tmp_path):
    script = fork(
        tmp_path / "fork.py",
        "known = train.library_versions\n"
        "train.library_versions = lambda folder: known(folder) | {'torch': '1.0' if rank else '2.0'}",
    )
    assert_refused(tmp_path, start_nodes(tmp_path, config, script=script), "  version of torch: '2.0' on ")


SEES_SAMERUN = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom samerun import early"


@pytest.mark.parametrize(
    "name, values, words",
    [
        pytest.param(
            "ACCELERATE_MIXED_PRECISION",
            ("no", "bf16"),
            "launcher: mixed_precision: 'no' on ",
            marks=pytest.mark.slow,
        ),
        ("PARALLELISM_CONFIG_TP_SIZE", ("1", "2"), "launcher: parallelism_config_tp_size: '1' on "),
    ],
)
def test_other_launcher(config, tmp_path, name, values, words):
    assert_refused(tmp_path, start_nodes(tmp_path, config, **{name: values}), words)


def test_folders_that_are_not_shared(config, tmp_path):
    """A launch before has left a lock in each of them."""
    for rank in range(2):
        (tmp_path / f"node-{rank}" / "mine").mkdir(parents=True)
        (tmp_path / f"node-{rank}" / "mine" / ".lock").touch()
    codes, outputs = finish(*start_nodes(tmp_path, config, "--run.output_dir", "mine"))
    assert codes == [2, 2], outputs
    [error] = re.findall("^error: .*", "\n".join(outputs), re.M)
    assert error == f"error: run.output_dir mine is another folder on {socket.gethostname()}; share one"
    for rank in range(2):
        assert [path.name for path in (tmp_path / f"node-{rank}" / "mine").iterdir()] == [".lock"]


def test_rows_elsewhere(config, tmp_path):
    """The same rows, at another place on each machine, are one run: that of one process."""
    write_rows(tmp_path / "rows", helpers.datasets.load_from_disk(config["data"]["path"]).to_list())
    nodes = start_nodes(tmp_path, config, other=("--data.path", tmp_path / "rows"))
    codes, outputs = finish(*nodes)
    assert codes == [0, 0], outputs
    (tmp_path / "one").mkdir()
    whole = run(tmp_path / "one", config)
    np.testing.assert_allclose(Done(0, "", tmp_path / "run").losses, whole.losses, rtol=1e-6)


def test_differences():
    """Of three ranks, with the number of those that are not as the main process."""
    told = [("a", {"x": 1, "y": [2]}), ("b", {"x": 1, "y": [2]}), ("b", {"x": 1, "y": None}), ("c", {"x": 1, "z": 0})]
    assert differences(told) == [
        "  y: [2] on a (rank 0), None on b (rank 2 and 1 more)",
        "  z: None on a (rank 0), 0 on c (rank 3)",
    ]


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_checkpoint_under_the_same_path(config, tmp_path):
    """With FSDP2, the shards of two runs would make a model that nobody has trained."""
    for rank in range(2):
        home = tmp_path / f"node-{rank}"
        home.mkdir()
        run(home, config, "--optim.learning_rate", 0.01 / (1 + rank))
        (home / "run" / "checkpoints").rename(home / "before")
    codes, outputs = finish(*start_nodes(tmp_path, config, "--run.init_from", "before/step-00000006"))
    assert codes == [2, 2], outputs
    [message] = re.findall("^error: .*", "\n".join(outputs), re.M)
    assert "before/step-00000006 is another checkpoint on " in message


def test_another_number_of_processes(config, tmp_path):
    codes, outputs = finish(*start_nodes(tmp_path, config, "--run.timeout_minutes", 0.5, WORLD_SIZE="23"))
    told = "\n".join(outputs)
    assert "  launcher: processes: '2' on " in told and "Traceback" not in told and 2 in codes
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_checkpoint_without_a_tensor_is_not_kept(config, tmp_path, monkeypatch):
    save = checkpoint.dcp.save

    def save_less(state, **how):
        """All but one tensor of the second checkpoint reach the disk."""
        planned = save(state, **how)
        [file] = Path(how["storage_writer"].path).glob("*.safetensors")
        if "step-00000004" in str(file):
            tensors = load_file(file)
            tensors.pop("model.lm_head.weight")
            save_file(tensors, file)
        return planned

    monkeypatch.setattr(checkpoint.dcp, "save", save_less)
    done = run(tmp_path, config, expect=1)
    assert "lacks parts of 1 of " in done.output and "model.lm_head.weight" in done.output
    assert [name for name in done.checkpoints if name[0] != "."] == ["step-00000002"]


def test_a_checkpoint_without_a_shard_is_not_kept(config, tmp_path):
    """As when the ranks save different steps, and so into different folders."""
    script = fork(
        tmp_path / "fork.py",
        "from samerun.run import checkpoint\nsave = checkpoint.dcp.save\n"
        "def save_elsewhere(state, storage_writer, **how):\n"
        "    if rank == 1 and 'step-00000004' in str(storage_writer.path):\n"
        "        path = str(storage_writer.path) + '-elsewhere'\n"
        "        storage_writer = checkpoint.dcp.HuggingFaceStorageWriter(path, save_distributed=True)\n"
        "    return save(state, storage_writer=storage_writer, **how)\n"
        "checkpoint.dcp.save = save_elsewhere\n",
    )
    done = launch(tmp_path, config, processes=2, script=script, warm=True, expect=None)
    assert done.code and "lacks parts of " in done.output, done.output
    assert [name for name in done.checkpoints if name[0] != "."] == ["step-00000002"]


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_checksum_sees_each_bit(kind):
    """Every single bit of a tensor, and two numbers that have changed places."""
    torch.manual_seed(0)
    whole = torch.randint(0, 256, (7 * 8,), dtype=torch.uint8)
    before = checksum_of_bits(whole.view(kind))
    for bit in range(8 * len(whole)):
        flipped = whole.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        assert checksum_of_bits(flipped.view(kind)) != before
    numbers = whole.view(kind)
    assert checksum_of_bits(numbers[[1, 0, *range(2, len(numbers))]]) != before


def test_checksum_of_more_than_one_part():
    """The last number of many, where the sum is made of several, and two numbers at the same place of their parts."""
    numbers = torch.arange(2**18 + 3, dtype=torch.float32)
    other, swapped = numbers.clone(), numbers.clone()
    other[-1] += 1
    swapped[[0, 2**18]] = numbers[[2**18, 0]]
    assert len({int(checksum_of_bits(one)) for one in (numbers, other, swapped)}) == 3


def test_the_sample_is_of_each_weight():
    """Or of each that is frozen."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[0].requires_grad_(False)
    whole, frozen, changes = sample_of_weights(model), sample_of_weights(model, frozen=True), []
    for weight in model.parameters():
        before = weight.data
        weight.data = before + 1
        changes.append((sample_of_weights(model) != whole, sample_of_weights(model, frozen=True) != frozen))
        weight.data = before
    assert changes == [(True, True)] * 2 + [(True, False)] * 2


FLIPS = """
step_of_run = train.train_step
def train_step(setup, batch, *more):
    done = step_of_run(setup, batch, *more)
    if batch.step == 4 and rank == RANK:
        parts = dict(setup.model.named_parameters())
        part = parts['WEIGHT'].detach()
        part = part.to_local() if hasattr(part, 'to_local') else part
        part.view(-1).view(train.torch.int32)[0] ^= 1
    return done
train.train_step = train_step
"""


@pytest.mark.parametrize(
    "strategy, rank, weight, whose",
    [
        ("DDP", 1, "model.layers.1.mlp.up_proj.weight", r"rank 1 on \S+ has"),
        pytest.param("HSDP", 3, "model.layers.0.mlp.up_proj.weight", r"rank 3 on \S+ has", marks=pytest.mark.slow),
        pytest.param("tensor", 1, "model.norm.weight", r"rank 1 on \S+ has", marks=pytest.mark.slow),
        pytest.param("pipeline, DDP", 3, "model.norm.weight", r"rank 3 on \S+ has", marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit(config, tmp_path, strategy, rank, weight, whose):
    """The lowest bit of one number on one rank: the checkpoint of step 4 is not kept, and the run ends."""
    script = fork(tmp_path / "fork.py", FLIPS.replace("RANK", str(rank)).replace("WEIGHT", weight))
    launcher, options, processes, settings, environment = helpers.STRATEGIES[strategy]
    how = {"launcher": launcher, "processes": processes, "env": environment, "warm": True, "expect": None}
    how |= {"options": (*options, "--mixed_precision", "no"), "timeout": 600}
    script = ROOT / "tests" / "wrapper_cpu_as_gpu.py", script
    done = launch(tmp_path, config, *settings, "--batch.max_micro_batch_size", 2, script=script, **how)
    [error] = re.findall("^error: .*", done.output, re.M) or [done.output]
    assert done.code and "copies of the weights have drifted apart" in error and re.search(whose, error), done.output
    assert done.checkpoints == ["step-00000002"]
    assert done.status["status"] == "failed" and "drifted apart" in done.status["reason"]


# What is recorded -----------------------------------------------------------------------------------------------------


def test_launch_is_recorded(config, tmp_path, monkeypatch):
    """Printed, in config.yaml, the manifest and metrics.jsonl; and another precision is told."""
    done = run(tmp_path, config, "--run.max_steps", 5)
    assert "Launch: precision no, launcher DDP, layout one device\n" in done.output
    assert done.metrics[0]["plan/precision"] == "no" and done.metrics[0]["plan/launcher"] == "DDP"
    text = (done.folder / "config.yaml").read_text()
    assert text.endswith('# {"precision": "no", "launcher": "DDP", "layout": "one device"}\n')
    assert yaml.safe_load(text)["run"]["max_steps"] == 5
    manifest = json.loads((done.folder / "checkpoints" / "step-00000005" / "manifest.json").read_text())
    assert manifest["launch"] == {"precision": "no", "launcher": "DDP", "layout": "one device"}

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    done = run(tmp_path, config)
    assert "The launch is not as before: precision no in the checkpoint, bf16 now.\n" in done.output
    assert done.logged("plan/precision") == ["no", "bf16"]


def test_other_libraries_are_told(config, tmp_path, monkeypatch):
    """They may compute something else. On any layout the run is the same, and of the code, the files are compared."""
    run(tmp_path, config, "--run.max_steps", 5)
    version = datasets.__version__
    monkeypatch.setattr(datasets, "__version__", "1.2.3")
    changed = run(tmp_path, config, "--run.max_steps", 6)
    path = changed.folder / "checkpoints" / "step-00000006" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["launch"]["layout"] = manifest["versions"]["git"] = "another"
    path.write_text(json.dumps(manifest))
    again = run(tmp_path, config, "--run.max_steps", 7)
    assert f"The launch is not as before: datasets {version} in the checkpoint, 1.2.3 now.\n" in changed.output
    assert "is not as before" not in again.output


def test_other_code_is_told(config, tmp_path, monkeypatch):
    """A fork's loss may have changed. The settings would not tell."""
    run(tmp_path, config, "--run.max_steps", 5)
    same = run(tmp_path, config, "--run.max_steps", 6)
    copy = tmp_path / "train.py"
    copy.write_text((ROOT / "train.py").read_text() + "# Other code.\n")
    monkeypatch.setattr(train, "__file__", str(copy))
    changed = run(tmp_path, config, "--run.max_steps", 7)
    assert "code is not" not in same.output and "The code is not as it was before: train.py.\n" in changed.output


def test_commit_is_that_of_the_script(config, tmp_path, monkeypatch):
    """Not of the repository that is the current folder."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "another"], check=True)
    monkeypatch.chdir(tmp_path)
    done = run(tmp_path, config, "--run.max_steps", 5)
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    ours = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    manifest = json.loads((done.folder / "checkpoints" / "step-00000005" / "manifest.json").read_text())
    assert manifest["versions"]["git"] == ours
