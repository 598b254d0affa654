"""Reinforcement learning with verifiable rewards on train.py: the module that such a fork has beside it.

In each step the policy answers each prompt of the global batch several times, a rule rewards the answers, and the
policy learns from how much better than its others an answer was: GRPO (arXiv:2402.03300), with one update for each
answer, so that nothing is clipped, and without its KL term.

Here a row is a draw: a place in the endless stream of prompts, with all answers to that prompt. The numbers that are
drawn for them are functions of the seed and of that place, and a step's micro-batches all see the same weights. So a
run is the same on any number of processes, up to rounding: where rounding decides a token, runs on other process counts
part, but a run that is continued on the same count does not. An evaluation has the same draws each time.

A target is a token of an answer. All answers are equally long: none may end early, which the loss does not know. Its
value says little: for run.keep_best and run.patience, give `-metrics["eval/reward"]` to both calls in evaluate_step().
"""

import zlib
from dataclasses import dataclass

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from pydantic import Field

from samerun.config import Data, Section, Source
from samerun.data.batches import collate
from samerun.data.order import Order, shuffle
from samerun.data.rows import Dataset
from samerun.data.sources import load_source
from samerun.model.attention import attention
from samerun.model.loss import joins_documents, model_inputs
from samerun.model.outline import unwrapped


class Sampling(Section):
    answers: int = Field(8, ge=2)
    """Answers to each prompt. An answer is compared with the others."""
    new_tokens: int = 8
    """Tokens of an answer."""


@dataclass(frozen=True)
class Prompt:
    ids: np.ndarray  # int64 [tokens]
    rewarded: np.ndarray  # int64: the ids that the rule rewards.
    seed: tuple[int, ...]  # Of the answers.
    learned: float = 1.0  # 0: a rank without rows takes part in the pass.


@dataclass(frozen=True)
class PromptBatch:
    prompts: list[Prompt]
    device: torch.device


class Prompts(Dataset):
    """A row's number is its place in the stream, not that of a prompt: each epoch answers a prompt anew."""

    def __init__(self, rows: datasets.Dataset, tokenizer, seed: int, number: int, sampling: Sampling):
        self.rows = [
            tuple(np.array(tokenizer(row[name])["input_ids"]) for name in ("prompt", "rewarded")) for row in rows
        ]
        self.seed = seed
        self.number = number  # Of the data set. An evaluation has other answers than the training.
        self.size = sampling.answers * sampling.new_tokens
        self.longest = max(len(prompt) for prompt, _ in self.rows) + sampling.new_tokens
        self.tokens = len(rows) * self.size
        self.order = Order(len(rows), seed)  # Checkpoints note its name.

    def __len__(self) -> int:
        return len(self.rows)

    def attention_length(self) -> float:
        return float(self.longest)

    def fingerprint(self) -> int:
        return zlib.crc32(repr([self.size, *(ids.tolist() for row in self.rows for ids in row)]).encode())

    def rows_at(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count)

    def read_rows(self, rows: np.ndarray) -> list[Prompt]:
        return [self.read(row) for row in rows] or [Prompt(*self.rows[0], seed=(0,), learned=0.0)]

    def read(self, place: int) -> Prompt:
        row = shuffle(np.array([place]), len(self), self.seed)[0]
        return Prompt(*self.rows[row], seed=(self.seed, self.number, int(place)))

    def sizes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets) of each row: those of its answers."""
        return np.full(len(rows), self.size), np.full(len(rows), self.size)


def load_prompts(config: Data, tokenizer, seed: int, sampling: Sampling) -> tuple[Prompts, dict[str, Prompts]]:
    def as_prompts(source: Source, number: int) -> Prompts:
        return Prompts(load_source(source), tokenizer, seed, number, sampling)

    evaluations = enumerate(config.eval_sources.items(), start=1)
    return as_prompts(config, 0), {name: as_prompts(source, number) for number, (name, source) in evaluations}


def collate_prompts(rows: list[Prompt], device: torch.device, joined: bool) -> PromptBatch:
    return PromptBatch(rows, device)


class Chance(transformers.LogitsProcessor):
    """Adds Gumbel noise to logits, so that the largest of them is a draw from their softmax."""

    def __init__(self, prompts: list[Prompt], answers: int):
        self.random = [np.random.default_rng(prompt.seed) for prompt in prompts]
        self.answers = answers

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = np.concatenate([random.gumbel(size=(self.answers, scores.shape[1])) for random in self.random])
        return scores.float() + torch.from_numpy(noise).float().to(scores.device)


@torch.no_grad()
def answer(model: transformers.PreTrainedModel, batch: PromptBatch, sampling: Sampling) -> torch.Tensor:
    """int64 [prompts, answers, new_tokens]"""
    width, was_training = max(len(prompt.ids) for prompt in batch.prompts), model.training
    ids, mask = torch.zeros((2, len(batch.prompts), width), dtype=torch.int64)
    for number, prompt in enumerate(batch.prompts):
        ids[number, width - len(prompt.ids) :] = torch.from_numpy(prompt.ids)
        mask[number, width - len(prompt.ids) :] = 1
    ids, mask = (part.repeat_interleave(sampling.answers, dim=0).to(batch.device) for part in (ids, mask))
    model.eval()
    with attention(model, "sdpa"):  # With the masks of transformers.
        found = model.generate(
            ids,
            attention_mask=mask,
            use_cache=True,
            synced_gpus=dist.is_initialized(),  # Sharded weights need all ranks.
            do_sample=False,  # Chance draws.
            repetition_penalty=1.0,  # Whatever the model's own generation_config.json says: the loss has none.
            logits_processor=[Chance(batch.prompts, sampling.answers)],
            max_new_tokens=sampling.new_tokens,
            min_new_tokens=sampling.new_tokens,
            pad_token_id=0,
        )
    model.train(was_training)
    return found[:, width:].view(-1, sampling.answers, sampling.new_tokens)


def reward(prompt: Prompt, answers: torch.Tensor) -> torch.Tensor:
    """float32 [answers]: the share of an answer's tokens that the rule rewards. Put yours in its place."""
    return torch.isin(answers, torch.from_numpy(prompt.rewarded).to(answers.device)).float().mean(-1)


def policy_loss(
    wrapped: torch.nn.Module, batch: PromptBatch, sampling: Sampling
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over the tokens of all answers of -advantage * log probability, and of the answers' rewards."""
    model = unwrapped(wrapped)
    answers = answer(model, batch, sampling)
    rewards = torch.stack([reward(prompt, some) for prompt, some in zip(batch.prompts, answers)])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)

    rows = []
    for prompt, some in zip(batch.prompts, answers.cpu().numpy()):
        for tokens in some:  # As Dataset.read() has rows: ids, targets and positions.
            ids = np.concatenate([prompt.ids, tokens])
            targets = np.where(np.arange(1, len(ids) + 1) < len(prompt.ids), -100, np.append(ids[1:], -100))
            rows.append(np.stack([ids, targets, np.arange(len(ids))]))
    tokens = collate(rows, batch.device, joins_documents(model))
    logits, targets = wrapped(**model_inputs(model, tokens)).logits.flatten(0, 1), tokens.targets.flatten()
    log_probabilities = -F.cross_entropy(logits[targets != -100].float(), targets[targets != -100], reduction="none")

    learned = torch.tensor([prompt.learned for prompt in batch.prompts], device=batch.device)
    log_probabilities = log_probabilities.view(answers.shape) * learned[:, None, None]
    loss = -(advantages[..., None] * log_probabilities).sum()
    return loss, {"loss": loss.detach(), "reward": (rewards * learned[:, None]).sum() * sampling.new_tokens}
