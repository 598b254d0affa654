"""run.hub: the model of a run on the Hub, here a small server of this machine."""

import re
from pathlib import Path

import pytest
import torch
from fake_hub import FakeHub
from helpers import launch, tiny_config
from huggingface_hub import ModelCard
from safetensors.torch import load_file


def config_of(folder: Path, every: str = "end", **more) -> dict:
    config = tiny_config(folder)
    hub = {"repo_id": "me/tiny", "every": every}
    config["run"] |= {"max_steps": 6, "save_every": 2, "keep_checkpoints": 9, "hub": hub, **more}
    return config


def push(folder: Path, config: dict, hub: FakeHub, *overrides, **options):
    return launch(folder, config, *overrides, processes=None, env=hub.environment, **options)


def test_model_and_card(tmp_path):
    """On two processes; the files are those of the export, and the card says what the run was. What is pushed already
    is not pushed again."""
    config = config_of(tmp_path, after_save="true password", eval_every=3)
    with FakeHub({}, made=tmp_path / "hub") as hub:
        done = launch(tmp_path, config, processes=2, env=hub.environment)
        assert hub.commits == ["Step 6"] and hub.is_private == {"me/tiny": True}, done.output
        assert f"Pushed: step 6 to {hub.environment['HF_ENDPOINT']}/me/tiny" in done.output
        pushed, model = tmp_path / "hub" / "me" / "tiny", done.folder / "model"
        names = {path.name for path in model.iterdir()}
        assert {path.name for path in pushed.iterdir()} == names | {"README.md", "curves.png"}
        assert all((pushed / name).read_bytes() == (model / name).read_bytes() for name in names)
        card = ModelCard.load(pushed / "README.md")
        assert card.data.library_name == "transformers" and card.data.base_model is None
        last = done.logged("eval/loss")[-1]
        assert f"| eval/loss | {last:.6g} |" in card.text and "| plan/num_processes | 2 |" in card.text
        assert "learning_rate: 0.005" in card.text and "password" not in card.text
        assert "Finished already" in push(tmp_path, config, hub).output and len(hub.commits) == 1


def test_a_failure_ends_nothing_and_the_same_command_pushes(tmp_path):
    config = config_of(tmp_path)
    with FakeHub({}, made=tmp_path / "hub") as hub:
        gone = hub.environment | {"HF_TOKEN": "", "HF_HOME": str(tmp_path / "home")}
    left = tmp_path / "run" / ".hub-x.tmp" / "model"  # By a launch that was killed.
    left.mkdir(parents=True)
    done = launch(tmp_path, config, processes=None, env=gone)
    assert not left.parent.exists()
    assert done.status["status"] == "finished" and len(re.findall("^run.hub failed: .*", done.output, re.M)) == 1
    assert "Traceback" not in done.output and done.output.count("hf auth login") == 1
    with FakeHub({}, made=tmp_path / "hub") as hub:
        assert "Finished already" in push(tmp_path, config, hub).output
        assert hub.commits == ["Step 6"] and (tmp_path / "hub/me/tiny/model.safetensors").is_file()


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


def test_an_earlier_push_leaves_no_files(tmp_path):
    """Such as the shards of a model that had more of them."""
    pushed = tmp_path / "hub" / "me" / "tiny"
    pushed.mkdir(parents=True)
    (pushed / "model-00001-of-00002.safetensors").write_bytes(b"old")
    (pushed / "notes.md").write_text("mine")
    with FakeHub({"models/me/tiny": pushed}, made=tmp_path / "hub") as hub:
        push(tmp_path, config_of(tmp_path), hub)
    names = {path.name for path in pushed.iterdir()}
    assert "model-00001-of-00002.safetensors" not in names and {"model.safetensors", "notes.md"} <= names
