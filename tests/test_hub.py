"""run.hub: the model of a run on the Hub, here a small server of this machine."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import yaml
from fake_hub import FakeHub
from helpers import launch, run, tiny_config
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import train
from samerun.cli import load_config, take_mode
from samerun.config import Config
from samerun.errors import UserError
from samerun.run import hub as room


def config_of(folder: Path, every: str = "end", **more) -> dict:
    config = tiny_config(folder)
    hub = {"repo_id": "me/tiny", "every": every}
    config["run"] |= {"max_steps": 6, "save_every": 2, "keep_checkpoints": 9, "hub": hub, **more}
    return config


def push(folder: Path, config: dict, hub: FakeHub, *overrides, **options):
    return launch(folder, config, *overrides, processes=None, env=hub.environment, **options)


def as_read(folder: Path, **more) -> Config:
    """The config of a run in this folder, which has ended."""
    config = config_of(folder.parent, output_dir=str(folder), **more)
    (folder / "model").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    (folder / "status.json").write_text('{"status": "finished", "step": 4}')
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return Config.model_validate(config)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def contents(changes: list) -> dict[str, bytes]:
    """What a commit adds."""
    added = [change for change in changes if isinstance(change, huggingface_hub.CommitOperationAdd)]
    found = {}
    for change in added:
        with change.as_file() as file:
            found[change.path_in_repo] = file.read()
    return found


@pytest.fixture
def commits(monkeypatch) -> list[str]:
    """The messages of the commits to a Hub that does nothing else."""
    found, made = [], SimpleNamespace(repo_id="me/tiny")

    def create_commit(name, changes, commit_message):
        found.append(commit_message)
        return SimpleNamespace(repo_url="https://hub/me/tiny")

    api = SimpleNamespace(create_repo=lambda *args, **more: made, create_commit=create_commit)
    api.list_repo_files = lambda name: []
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    return found


def test_what_was_pushed_is_pushed_again_after_another(tmp_path, commits):
    """A longer run has pushed later checkpoints since then, and none of them is better."""
    config = as_read(tmp_path / "run")
    for _ in range(2):
        room.push_export(config)
    assert commits == ["Step 4"]
    room.push(tmp_path / "run" / "model", config, 8)  # As from the background.
    for _ in range(2):
        room.push_export(config)
    assert commits == ["Step 4", "Step 8", "Step 4"]


def test_what_the_run_writes_while_it_is_pushed(tmp_path, monkeypatch, commits):
    """The curves are drawn anew between their checksum and their upload, and a line of metrics is not complete yet."""
    config, run_folder = as_read(tmp_path / "run"), tmp_path / "run"
    (run_folder / "metrics.jsonl").write_text('{"step": 4, "train/loss": 1.5}\n{"step": 4, "eval/lo')
    (run_folder / "curves.png").write_bytes(b"as it was")
    api, sent = huggingface_hub.HfApi(), {}

    def create_commit(name, changes, commit_message):
        (run_folder / "curves.png").write_bytes(b"drawn anew")
        sent.update(contents(changes))
        return SimpleNamespace(repo_url="https://hub/me/tiny")

    monkeypatch.setattr(api, "create_commit", create_commit)
    room.push(run_folder / "model", config, 4)
    assert sent["curves.png"] == b"as it was" and b"| train/loss | 1.5 |" in sent["README.md"]


def test_a_note_that_is_damaged(tmp_path, commits, capsys):
    """The model is pushed once more. What cannot be replaced is said."""
    config, note = as_read(tmp_path / "run"), tmp_path / "run" / "hub.json"
    note.write_bytes(b"\xff\xfe")
    room.push_export(config)
    assert commits == ["Step 4"] and json.loads(note.read_text()) == {"repo_id": "me/tiny", "step": 4}
    note.unlink()
    note.mkdir()
    room.push_export(config)
    assert "run.hub failed: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["2026", "lr=1e-3 #2", "true", "größer 🙂", "a: 'b\"\\"])
def test_a_folder_of_any_name(tmp_path, monkeypatch, name):
    """The command that exports in the background takes it for a text, as the config does."""
    monkeypatch.chdir(tmp_path)
    config, pushed = as_read(Path(name), every="save"), []

    def command(words, **more):
        words, mode = take_mode(words[2:])
        theirs = load_config(words)
        assert theirs.run.output_dir == name and mode.export.which == ["6"]
        return SimpleNamespace(returncode=0, stdout=b"")

    monkeypatch.setattr(subprocess, "run", command)
    monkeypatch.setattr(room, "push", lambda model, config, step: pushed.append(step))
    room.PushCheckpoints(config).run(Path(name) / "checkpoints" / "step-00000006")
    assert pushed == [6]


def test_samples_are_not_in_the_card(tmp_path):
    """Their lines would end its table, and be read as its own."""
    config = as_read(tmp_path / "run")
    line = {"step": 4, "eval/sample_0": "a | b\n\n# c", "eval/loss": 1.5, "plan/precision": "no"}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    card = room.model_card(tmp_path / "run", config, 4)
    assert "| plan/precision | no |\n| eval/loss | 1.5 |\n\n" in card and "# c" not in card


def test_what_the_hub_gets(tmp_path, monkeypatch):
    """A repository of the user; with model.lora, our card in place of peft's; no file of an earlier push. The card has
    nothing of run.tracker_options."""
    got = {}

    def create_repo(repo_id, **more):
        got["repository"] = {"repo_id": repo_id, **more}
        return SimpleNamespace(repo_id="me/tiny")

    def create_commit(name, changes, commit_message):
        got["card"], got["commit"] = contents(changes)["README.md"].decode(), [name, commit_message]
        gone = [change for change in changes if isinstance(change, huggingface_hub.CommitOperationDelete)]
        got["deleted"] = {change.path_in_repo for change in gone}
        return SimpleNamespace(repo_url="https://hub/me/tiny")

    api = SimpleNamespace(create_repo=create_repo, create_commit=create_commit)
    old = {"adapter_model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    api.list_repo_files = lambda name: [*old, "notes.md", ".gitattributes"]
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    options = {"trackers": ["tensorboard"], "tracker_options": {"tensorboard": {"comment": "a password"}}}
    read = as_read(tmp_path / "run", hub={"repo_id": "tiny"}, **options)
    config = read.model_copy(update={"model": read.model.model_copy(update={"lora": {"r": 2}})})
    (tmp_path / "run" / "metrics.jsonl").write_text(
        '{"step": 3, "train/loss": 2.5, "perf/mfu": 1, "train/loss/a": null}\n'
    )
    card = tmp_path / "run" / "model" / "README.md"
    card.write_text("by peft")
    room.push(tmp_path / "run" / "model", config, 3)
    assert got["repository"] == {"repo_id": "tiny", "private": True, "exist_ok": True}
    assert got["commit"] == ["me/tiny", "Step 3"] and got["deleted"] == old
    assert "library_name: peft" in got["card"] and "password" not in got["card"]
    assert re.findall(r"^\| (\S+) \| (\S+) \|$", got["card"], re.M) == [("train/loss", "2.5")]
    assert card.read_text() == "by peft"


def test_what_cannot_be_exported_is_not_pushed(tmp_path, monkeypatch, commits):
    config = as_read(tmp_path / "run", every="save")
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: SimpleNamespace(returncode=2, stdout=b"no room"))
    with pytest.raises(UserError, match="cannot export it: no room"):
        room.PushCheckpoints(config).run(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert not commits


def test_what_is_noted_in_a_checkpoint_later_is_not_pushed_again(tmp_path, monkeypatch):
    """It changes no weight."""
    pushed = []
    monkeypatch.setattr(room.PushCheckpoints, "run", lambda self, checkpoint: pushed.append(checkpoint.name))
    pushes = room.PushCheckpoints(as_read(tmp_path / "run", every="save"))
    for name in "step-2", "step-2", "step-4":
        pushes.begin(tmp_path / name)
        pushes.finish()
    assert pushed == ["step-2", "step-4"]


def test_the_main_process_pushes_alone(tmp_path, monkeypatch, commits):
    config = as_read(tmp_path / "run")
    for rank in 1, 0:
        monkeypatch.setenv("RANK", str(rank))
        room.push_export(config)
        assert commits == ["Step 4"] * (rank == 0)


def test_a_run_of_no_steps_pushes_nothing(tmp_path, commits):
    """It evaluates a model, and has made none."""
    room.push_export(as_read(tmp_path / "run", max_steps=0))
    assert not commits


def test_only_the_best_is_pushed(tmp_path, monkeypatch, commits):
    """All evaluations have the same loss, so that is the first one."""
    pushed = []
    monkeypatch.setattr(room.PushCheckpoints, "run", lambda self, checkpoint: pushed.append(checkpoint.name))
    config = config_of(tmp_path, "best", keep_best=True, eval_every=2)
    config["optim"] |= {"learning_rate": 1e-30, "warmup_steps": 0}
    run(tmp_path, config)
    assert pushed == ["step-00000002"] and commits == ["Step 2"]


@pytest.mark.parametrize("change", [("--run.keep_best", "false"), ("--eval.max_rows", 3)])
def test_a_finished_run_pushes_what_it_has_exported(tmp_path, commits, change):
    """Also if the best checkpoint is not wanted any more, or the evaluation is of other rows."""
    config = config_of(tmp_path, "end", keep_best=True, eval_every=2)
    config["optim"] |= {"learning_rate": 1e-30, "warmup_steps": 0}
    hub = config["run"].pop("hub")
    run(tmp_path, config)
    config["run"]["hub"] = hub
    done = run(tmp_path, config, *change)
    assert "Finished already" in done.output and commits == ["Step 2"]
    assert done.status == {"status": "finished", "step": 6, "exported_step": 2}


def test_the_last_step_is_pushed_if_the_best_one_was_not_exported(tmp_path, commits):
    """As the launch that would have done it was killed, and run.keep_best was turned off."""
    config = config_of(tmp_path, "end", keep_best=True, eval_every=2)
    config["optim"] |= {"learning_rate": 1e-30, "warmup_steps": 0}
    hub = config["run"].pop("hub")
    run(tmp_path, config)
    shutil.rmtree(tmp_path / "run" / "model")
    config["run"] |= {"hub": hub, "keep_best": False}
    for output in "(last step)", "Finished already":
        assert output in run(tmp_path, config).output
    assert commits == ["Step 6"]


def test_a_launch_that_is_stopped_pushes_nothing(tmp_path, monkeypatch, commits):
    """Not even the model of an earlier one, which is still there."""
    config = config_of(tmp_path)
    run(tmp_path, config)
    train_step = train.train_step

    def stopped(*args):
        signal.raise_signal(signal.SIGTERM)
        return train_step(*args)

    monkeypatch.setattr(train, "train_step", stopped)
    done = run(tmp_path, config, "--run.max_steps", 8)
    assert done.status == {"status": "stopped", "step": 7} and commits == ["Step 6"]


@pytest.mark.slow
def test_model_and_card(tmp_path):
    """On two processes. A Hub that cannot be reached ends nothing; later, the same command pushes the files of the
    export and a card that says what the run was, in place of those of an earlier push. A third one pushes nothing."""
    config = config_of(tmp_path, after_save="true password", eval_every=3)
    pushed, run_folder = tmp_path / "hub" / "me" / "tiny", tmp_path / "run"
    pushed.mkdir(parents=True)
    (pushed / "model-00001-of-00002.safetensors").write_bytes(b"of a larger model")
    (pushed / "notes.md").write_text("mine")
    left = run_folder / ".hub-x.tmp" / "model"  # By a launch that was killed.
    left.mkdir(parents=True)
    with FakeHub({}, made=tmp_path / "hub") as hub:
        gone = hub.environment | {"HF_TOKEN": "", "HF_HOME": str(tmp_path / "home")}
    done = launch(tmp_path, config, processes=2, env=gone)
    assert done.status["status"] == "finished" and not left.parent.exists()
    assert len(re.findall("^run.hub failed: .*", done.output, re.M)) == 1 and "Traceback" not in done.output
    assert done.output.count("hf auth login") == 1

    model = done.folder / "model"
    (model / "additional_chat_templates").mkdir()  # As of a tokenizer that has several.
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    with FakeHub({"models/me/tiny": pushed}, made=tmp_path / "hub") as hub:
        again = push(tmp_path, config, hub)
        assert "Finished already" in again.output and hub.commits == ["Step 6"]
        assert hub.is_private == {"me/tiny": True}
        assert f"Pushed: step 6 to {hub.environment['HF_ENDPOINT']}/me/tiny" in again.output
        assert "Finished already" in push(tmp_path, config, hub).output and len(hub.commits) == 1
    names, found = files_in(model), files_in(pushed)
    assert found == names | {"README.md", "curves.png", "notes.md"} and len(names) > 4
    assert all((pushed / name).read_bytes() == (model / name).read_bytes() for name in names)
    card = ModelCard.load(pushed / "README.md")
    assert card.data.library_name == "transformers" and card.data.base_model is None
    last = done.logged("eval/loss")[-1]
    assert f"| eval/loss | {last:.6g} |" in card.text and "| plan/num_processes | 2 |" in card.text
    assert "learning_rate: 0.005" in card.text and "password" not in card.text


@pytest.mark.slow
@pytest.mark.parametrize("every, processes", [("save", None), ("best", 2)])
def test_while_it_trains(tmp_path, every, processes):
    """The models of checkpoints go from the background, where another process exports them."""
    config = config_of(tmp_path, every, keep_best=True, eval_every=2)
    with FakeHub({}, made=tmp_path / "hub") as hub:
        done = launch(tmp_path, config, processes=processes, env=hub.environment)
    assert "failed" not in done.output and set(hub.commits) <= {"Step 2", "Step 4", "Step 6"}
    assert hub.commits[-2:] == ["Step 6"] * 2  # From the background, and at the end.
    pushed = load_file(tmp_path / "hub" / "me" / "tiny" / "model.safetensors")
    assert all(torch.equal(pushed[name], weight) for name, weight in done.weights.items())
    assert not list(done.folder.glob(".hub-*"))


@pytest.mark.slow
def test_the_best_model(tmp_path):
    """Its card is of its step, which is not the last one. A run that has finished already knows it, too."""
    config = config_of(tmp_path, keep_best=True, eval_every=2)
    config["optim"] |= {"learning_rate": 3.0, "warmup_steps": 3}
    with FakeHub({}, made=tmp_path / "hub") as hub:
        done = push(tmp_path, config, hub)
        losses = done.logged("eval/loss")
        best = 2 * (1 + losses.index(min(losses)))
        assert best < 6 and hub.commits == [f"Step {best}"]
        card = (tmp_path / "hub" / "me" / "tiny" / "README.md").read_text()
        assert f"after step {best} " in card and f"| eval/loss | {min(losses):.6g} |" in card
        (done.folder / "hub.json").unlink()
        push(tmp_path, config, hub)
        assert hub.commits == [f"Step {best}"] * 2
