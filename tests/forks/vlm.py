"""A vision-language model on train.py: the module that such a fork has beside it.

A row is an image, a question and its answer, which alone is learned. Its length is that of its text, where as many
tokens stand for each image, as in LLaVA.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import datasets
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText, AutoProcessor, ProcessorMixin

from samerun.config import Data, Model, Source
from samerun.data.order import Order
from samerun.data.rows import Dataset
from samerun.data.sources import load_source
from samerun.errors import require

Row = tuple[np.ndarray, np.ndarray, np.ndarray]  # float32 [3, height, width], and int64 [tokens]: ids and targets.


def load_processor(config: Model) -> ProcessorMixin:
    return AutoProcessor.from_pretrained(config.pretrained)


class Questions(Dataset):
    """Rows of images and text, and the endless stream of shuffled epochs over them."""

    def __init__(self, rows: datasets.Dataset, processor: ProcessorMixin, limit: int, seed: int):
        self.rows, self.processor = rows, processor
        image = processor(text=processor.image_token, images=rows[0]["image"].convert("RGB")).input_ids
        self.image_tokens = np.count_nonzero(np.array(image) == processor.image_token_id)
        self.texts = [self.encode(**row) for row in rows.select_columns(["question", "answer"])]
        self.lengths, self.targets = np.array([(len(ids), np.sum(targets >= 0)) for ids, targets in self.texts]).T
        longest = self.lengths.max()
        require(longest <= limit, f"data.sequence_length: a row has {longest} tokens; use at least as many")
        self.tokens = int(self.lengths.sum())
        self.order = Order(len(rows), seed)

    def encode(self, question: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a row, and its targets: the token that follows, or -100 before it is one of the answer."""
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
        told = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
        prompt = self.processor.apply_chat_template([asked], add_generation_prompt=True)
        text = self.processor.apply_chat_template([asked, told])
        require(text.startswith(prompt), "data: with an answer, the chat template writes another prompt than without")
        tokenizer = self.processor.tokenizer
        is_begun = prompt.startswith(tokenizer.bos_token or "\0")  # If not, the tokenizer may begin it.
        before = tokenizer(prompt, add_special_tokens=not is_begun).input_ids
        learned = tokenizer(text.removeprefix(prompt), add_special_tokens=False).input_ids
        ids, targets = np.array(before + learned), np.array([-100] * (len(before) - 1) + learned + [-100])
        counts = np.where(ids == self.processor.image_token_id, self.image_tokens, 1)
        return ids.repeat(counts), targets.repeat(counts)

    def __len__(self) -> int:
        return len(self.rows)

    def fingerprint(self) -> int:
        """A checksum of some rows as the model gets them: another processor counts, and another place does not."""
        checksum = len(self)
        for row in np.linspace(0, len(self) - 1, 100, dtype=int):
            checksum = zlib.crc32(b"".join(part.tobytes() for part in self.read(row)), checksum)
        return checksum

    def read_rows(self, rows: np.ndarray) -> list[Row]:
        """A rank without rows gets one without an answer, because all ranks must take part in a pass."""
        if len(rows):
            return [self.read(row) for row in rows]
        pixels, ids, targets = self.read(0)
        return [(pixels, ids, np.full_like(targets, -100))]

    def read(self, row: int) -> Row:
        image = self.rows[int(row)]["image"].convert("RGB")
        return self.processor.image_processor(image, return_tensors="np").pixel_values[0], *self.texts[row]

    def sizes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets) of each row."""
        return self.lengths[rows], self.targets[rows]


@dataclass(frozen=True)
class AnswerBatch:
    images: torch.Tensor  # float32 [rows, 3, height, width]
    ids: torch.Tensor  # int64 [rows, tokens], padded on the right. That needs no mask: no token sees what follows it.
    targets: torch.Tensor  # int64 [rows, tokens], -100 for none.


def load_questions(config: Data, processor: ProcessorMixin, seed: int) -> tuple[Questions, dict[str, Questions]]:
    def as_rows(source: Source) -> Questions:
        return Questions(load_source(source), processor, config.sequence_length, seed)

    return as_rows(config), {name: as_rows(source) for name, source in config.eval_sources.items()}


def collate_questions(rows: list[Row], device: torch.device, joined: bool) -> AnswerBatch:
    images, ids, targets = ([torch.from_numpy(part) for part in parts] for parts in zip(*rows))
    parts = torch.stack(images), pad_sequence(ids, True), pad_sequence(targets, True, padding_value=-100)
    return AnswerBatch(*(part.to(device) for part in parts))


def build_vlm(config: Model, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_pretrained(config.pretrained, attn_implementation=config.attention)
    # As LLaVA. To train it, freeze what no pass uses, such as its last norm: DDP waits for each gradient.
    model.model.vision_tower.requires_grad_(False)
    return model


def answer_loss(
    model: torch.nn.Module, batch: AnswerBatch, token_loss: Callable
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the cross-entropy over a micro-batch's answers, in float32, and how many of their tokens are found."""
    logits = model(input_ids=batch.ids, pixel_values=batch.images, use_cache=False).logits
    loss, metrics = token_loss(logits.flatten(0, 1), batch.targets.flatten())
    sums = {name: terms.detach().sum() for name, terms in metrics.items()}
    return loss, sums | {"accuracy": (logits.argmax(2) == batch.targets).sum()}
