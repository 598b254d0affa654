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

    with FakeHub({"models/me/tiny": pushed}, made=tmp_path / "hub") as hub:
        again = push(tmp_path, config, hub)
        assert "Finished already" in again.output and hub.commits == ["Step 6"]
        assert hub.is_private == {"me/tiny": True}
        assert f"Pushed: step 6 to {hub.environment['HF_ENDPOINT']}/me/tiny" in again.output
        assert "Finished already" in push(tmp_path, config, hub).output and len(hub.commits) == 1
    model = done.folder / "model"
    names = {path.name for path in model.iterdir()}
    assert {path.name for path in pushed.iterdir()} == names | {"README.md", "curves.png", "notes.md"}
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
