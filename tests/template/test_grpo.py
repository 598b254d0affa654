"""A fork for reinforcement learning: the same answers are drawn, rewarded and learned on any number of processes."""

import difflib
import json
import math
import shutil
import string

import datasets
import forks
import numpy as np
import pytest
import torch
from helpers import ROOT, Done, difference, launch, tiny_config
from reference import shuffled, train_reference

pytestmark = pytest.mark.slow
MODULE = ROOT / "tests/forks/grpo.py"
SEED, PROMPTS, HELD_OUT, STEPS, ANSWERS, NEW_TOKENS = 7, 23, 3, 16, 6, 5
KINDS = {"small letters": string.ascii_lowercase, "capitals": string.ascii_uppercase}


def make_prompts(count: int, seed: int) -> list[dict]:
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        kind = str(rng.choice(list(KINDS)))
        found.append({"prompt": f"{rng.integers(100)} {kind}:", "rewarded": KINDS[kind]})
    return found


def summed_loss(model: torch.nn.Module, draws: list[tuple]) -> tuple[torch.Tensor, int]:
    """Each answer is drawn alone, without a cache and without padding. Counts the rewards in model.rewards."""
    loss, rewards = 0, []
    for row, place, data in draws:
        random = np.random.default_rng([SEED, data, place])
        prompt = torch.tensor([3 + byte for byte in row["prompt"].encode()])
        ids = prompt.repeat(ANSWERS, 1)
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                scores = model(input_ids=ids, use_cache=False).logits[:, -1]
            scores[:, 1] = -math.inf  # No answer ends early.
            noise = torch.from_numpy(random.gumbel(size=scores.shape)).float()
            ids = torch.cat([ids, (scores + noise).argmax(1, keepdim=True)], dim=1)
        answers = ids[:, len(prompt) :]
        right = {3 + byte for byte in row["rewarded"].encode()}
        reward = torch.tensor([[float(token in right) for token in answer] for answer in answers.tolist()]).mean(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        scores = model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = scores.gather(2, answers[..., None])[..., 0]
        loss = loss - (advantage[:, None] * chosen).sum()
        rewards.append(float(reward.mean()))
    model.rewards = [*getattr(model, "rewards", []), np.mean(rewards)]
    return loss, len(draws) * ANSWERS * NEW_TOKENS


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The fork, its config, and the plain loop's result for it."""
    folder = tmp_path_factory.mktemp("task")
    forks.make(folder / "fork", forks.GRPO, MODULE)
    rows, held_out = make_prompts(PROMPTS, seed=1), make_prompts(HELD_OUT, seed=2)
    for name, some in ("prompts", rows), ("held-out", held_out):
        datasets.Dataset.from_list(some).save_to_disk(folder / name)
    config = tiny_config(folder / "text")
    config["run"] |= {"max_steps": STEPS, "save_every": 8}
    config["batch"]["max_micro_batch_size"] = 3
    config["data"] = {"path": str(folder / "prompts"), "tokenizer": "bytes", "sequence_length": 32}
    config["data"]["eval_source"] = {"path": str(folder / "held-out")}
    file = folder / "text" / "start" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.5}))  # Answers heed none.
    config["sampling"] = {"answers": ANSWERS, "new_tokens": NEW_TOKENS}
    order = shuffled(SEED, PROMPTS, 10 * STEPS)
    did = train_reference(
        config,
        lambda step: [(rows[order[place]], place, 0) for place in range(10 * step - 10, 10 * step)],
        summed_loss=summed_loss,
    )
    evaluated = [(held_out[row], place, 1) for place, row in enumerate(shuffled(SEED, HELD_OUT, HELD_OUT))]
    summed_loss(did.model, evaluated)
    assert np.mean(did.model.rewards[STEPS - 4 : STEPS]) > 1.3 * np.mean(did.model.rewards[:4])  # It has learned.
    return folder / "fork" / "train.py", config, did


def check(done: Done, task) -> None:
    _, _, did = task
    did.check(done)
    assert done.logged("train/target_tokens") == [10 * ANSWERS * NEW_TOKENS * step for step in range(1, STEPS + 1)]
    rewards = done.logged("train/reward") + done.logged("eval/reward")
    assert rewards == pytest.approx(did.model.rewards, rel=1e-5)
    # What is told of tokens comes only for batches with targets.
    assert not done.logged("eval/perplexity") + done.logged("eval/bits_per_byte")
    assert "by sizes()" not in done.output and "\nModel: " in done.output and "The loss covers" not in done.output


def test_it_takes_few_lines(task):
    ours, theirs = (ROOT / "train.py").read_text().splitlines(), task[0].read_text().splitlines()
    new = [line for line in difflib.ndiff(ours, theirs) if line.startswith("+ ")]
    assert 8 < len(new) <= 20, "\n".join(new)


def test_auto_is_refused(task, tmp_path):
    """It would try rows of text."""
    script, config, _ = task
    settings = "--batch.max_micro_batch_size", "auto"
    done = launch(tmp_path, config, *settings, script=script, processes=None, warm=True, expect=2)
    assert "error: batch.max_micro_batch_size: auto is for rows of text only; give a number" in done.output


def test_rows_longer_than_the_plan_counts_are_told(task, tmp_path):
    script, config, _ = task
    settings = "--data.sequence_length", ANSWERS * NEW_TOKENS - 1, "--run.max_steps", 1, "--optim.warmup_steps", 0
    done = launch(tmp_path, config, *settings, script=script, processes=None, warm=True)
    assert "A row has 30 tokens by sizes(), but tokens_per_step counts data.sequence_length, 29." in done.output


def test_a_single_answer_is_refused(task, tmp_path):
    script, config, _ = task
    done = launch(tmp_path, config, "--sampling.answers", 1, script=script, processes=None, warm=True, expect=2)
    assert "sampling.answers: Input should be greater than or equal to 2, not 1" in done.output


def test_in_the_shards_of_two(task, tmp_path):
    script, config, _ = task
    script = ROOT / "tests" / "wrapper_cpu_as_gpu.py", script
    how = {"launcher": "fsdp2", "processes": 2, "options": ("--mixed_precision", "no"), "script": script}
    check(launch(tmp_path, config, **how, warm=True), task)


def test_one_process_continued_on_three(task, tmp_path):
    script, config, _ = task
    done = launch(tmp_path, config, script=script, warm=True)
    check(done, task)
    first = done.weights
    shutil.rmtree(done.folder / "model")
    shutil.rmtree(done.folder / "checkpoints" / f"step-{STEPS:08d}")
    (done.folder / "status.json").write_text('{"status": "running", "step": 12}')
    done = launch(tmp_path, config, processes=3, script=script, warm=True)
    assert done.launches == [0, 8] and difference(done.weights, first) < 1e-5
    check(done, task)
