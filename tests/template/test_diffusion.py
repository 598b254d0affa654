"""A fork that draws noise: of each row, the same noise in each launch, on any number of processes."""

import difflib
import importlib
import math
import shutil
import sys

import datasets
import forks
import numpy as np
import pytest
import torch
from helpers import ROOT, Done, difference, launch, tiny_config
from reference import shuffled, train_reference

pytestmark = pytest.mark.slow
MODULE = ROOT / "tests/forks/diffusion.py"
IMAGES, HELD_OUT, SEED = 23, 3, 7  # Of 4 processes, one has nothing to evaluate.


def draw(images: list[np.ndarray], place: int, image: int, data: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """(a noisy image, its noise, its time): those of a place of the stream of a data set, where this image is."""
    random = np.random.default_rng([SEED, data, place])
    noise, time = random.standard_normal(64), int(random.integers(1000))

    def squared_cosine(time: float) -> float:
        return math.cos(math.pi / 2 * (time / 1000 + 0.008) / (1 + 0.008)) ** 2

    kept = squared_cosine(time) / squared_cosine(0)
    return math.sqrt(kept) * images[image] + math.sqrt(1 - kept) * noise, noise, time


def summed_loss(model: torch.nn.Module, draws: list[tuple]) -> tuple[torch.Tensor, int]:
    noisy, noise, times = (torch.tensor(np.array(part)) for part in zip(*draws))
    found = model(noisy.float().view(-1, 1, 8, 8), times).flatten(1)
    return (found - noise.float()).pow(2).sum(), noise.numel()


@pytest.fixture(scope="module")
def diffusion():
    """The module, from where a fork has a copy of it."""
    sys.path.insert(0, str(MODULE.parent))
    yield importlib.import_module("diffusion")
    sys.path.remove(str(MODULE.parent))


@pytest.fixture(scope="module")
def task(tmp_path_factory, diffusion):
    """The fork, its config, and the plain loop's result for it."""
    folder = tmp_path_factory.mktemp("task")
    forks.make(folder / "fork", forks.DIFFUSION, MODULE)
    pixels = np.random.default_rng(0).integers(0, 256, (IMAGES + HELD_OUT, 64))
    pixels[:, 24:40] = 255  # Something to find: a bright stripe.
    datasets.Dataset.from_dict({"pixels": pixels[:IMAGES].tolist()}).save_to_disk(folder / "images")
    datasets.Dataset.from_dict({"pixels": pixels[IMAGES:].tolist()}).save_to_disk(folder / "held-out")
    torch.manual_seed(1)
    diffusion.Denoiser(diffusion.DenoiserConfig()).save_pretrained(folder / "start")
    config = tiny_config(folder / "text")
    config["run"] |= {"max_steps": 20, "save_every": 8}
    config["batch"]["max_micro_batch_size"] = 3
    config["data"] = {"path": str(folder / "images"), "sequence_length": 64}
    config["data"]["eval_source"] = {"path": str(folder / "held-out")}
    config["model"] = {"pretrained": str(folder / "start")}
    images, order = list(pixels / 127.5 - 1), shuffled(SEED, IMAGES, 200)
    places = enumerate(shuffled(SEED, HELD_OUT, HELD_OUT))
    held_out = [draw(images[IMAGES:], place, image, data=1) for place, image in places]
    did = train_reference(
        config,
        lambda step: [draw(images, place, order[place]) for place in range(10 * step - 10, 10 * step)],
        kind=diffusion.Denoiser,
        summed_loss=summed_loss,
    )
    did.eval_losses[20] = float(summed_loss(did.model, held_out)[0]) / (HELD_OUT * 64)
    assert np.mean(did.losses[-3:]) < np.mean(did.losses[:3]) / 1.2
    return folder / "fork" / "train.py", config, did


def check(done: Done, task, diffusion) -> None:
    _, _, did = task
    did.check(done)
    assert done.logged("train/target_tokens") == [640 * step for step in range(1, 21)]
    assert done.logged("eval/loss")[-1] == pytest.approx(did.eval_losses[20], rel=1e-5)
    assert not done.logged("eval/perplexity") and "tokenizer" not in done.output  # Neither says anything of images.
    # Nothing is missing in the file, or left over.
    exported = diffusion.Denoiser.from_pretrained(done.folder / "model")
    assert difference(exported.state_dict(), done.weights) == 0


def test_it_takes_few_lines(task):
    ours, theirs = (ROOT / "train.py").read_text().splitlines(), task[0].read_text().splitlines()
    new = [line for line in difflib.ndiff(ours, theirs) if line.startswith("+ ")]
    assert 8 < len(new) <= 20, "\n".join(new)


def test_two_processes(task, diffusion, tmp_path):
    script, config, _ = task
    check(launch(tmp_path, config, processes=2, script=script, warm=True), task, diffusion)


def test_in_the_shards_of_two(task, diffusion, tmp_path):
    script, config, _ = task
    script = ROOT / "tests" / "wrapper_cpu_as_gpu.py", script
    how = {"launcher": "fsdp2", "processes": 2, "options": ("--mixed_precision", "no"), "script": script}
    check(launch(tmp_path, config, **how), task, diffusion)


def test_one_process_continued_on_four(task, diffusion, tmp_path):
    script, config, _ = task
    done = launch(tmp_path, config, script=script, warm=True)
    check(done, task, diffusion)
    first = done.weights
    shutil.rmtree(done.folder / "model")
    shutil.rmtree(done.folder / "checkpoints" / "step-00000020")
    (done.folder / "status.json").write_text('{"status": "running", "step": 18}')
    done = launch(tmp_path, config, processes=4, script=script, warm=True)
    assert done.launches == [0, 16] and difference(done.weights, first) < 1e-5
    check(done, task, diffusion)
