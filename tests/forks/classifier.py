"""An image classifier on train.py: the module that such a fork has beside it.

A row is an image of 8 x 8 pixels and its class. Its length is its number of patches, which is what the model computes
on, so that tokens per step and per second, MFU and data.sequence_length are about patches.
"""

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import datasets
import numpy as np
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from samerun.config import Data, Model, Source
from samerun.data.order import Order
from samerun.data.rows import Dataset
from samerun.data.sources import load_source
from samerun.errors import require
from samerun.model.recompute import recompute_layers

PATCHES = 16  # Of 2 x 2 pixels.


class Images(Dataset):
    """Rows of images, and the endless stream of shuffled epochs over them."""

    def __init__(self, images: datasets.Dataset, seed: int):
        self.images = images.with_format("numpy")
        self.tokens = len(images) * PATCHES
        self.order = Order(len(images), seed)

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> int:
        """A checksum of some rows as the model gets them, wherever they lie."""
        checksum = len(self)
        for row in np.linspace(0, len(self) - 1, 100, dtype=int):
            checksum = zlib.crc32(self.read(row), checksum)
        return checksum

    def read_rows(self, rows: np.ndarray) -> list[np.ndarray]:
        """A rank without rows gets one without a class, because all ranks must take part in a pass."""
        return [self.read(row) for row in rows] or [np.append(np.zeros(64, int), -100)]

    def read(self, row: int) -> np.ndarray:
        """int64 [65]: 8 x 8 pixels, 0 to 255, and the class."""
        image = self.images[int(row)]
        return np.append(image["pixels"].astype(np.int64), image["label"])

    def sizes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(patches, targets) of each row. The target is the class."""
        return np.full(len(rows), PATCHES), np.ones(len(rows), int)


@dataclass(frozen=True)
class ImageBatch:
    images: torch.Tensor  # float32 [rows, 1, 8, 8]
    targets: torch.Tensor  # int64 [rows], -100 for none.


def load_images(config: Data, seed: int) -> tuple[Images, dict[str, Images]]:
    def as_rows(source: Source) -> Images:
        return Images(load_source(source), seed)

    require(config.sequence_length == PATCHES, f"data.sequence_length: an image has {PATCHES} patches; use {PATCHES}")
    return as_rows(config), {name: as_rows(source) for name, source in config.eval_sources.items()}


def collate_images(rows: list[np.ndarray], device: torch.device, joined: bool) -> ImageBatch:
    pixels, targets = np.split(np.stack(rows), [64], axis=1)
    images = torch.from_numpy(pixels.reshape(-1, 1, 8, 8)) / 255
    return ImageBatch(images.to(device), torch.from_numpy(targets.flatten()).to(device))


def build_classifier(config: Model, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageClassification.from_pretrained(
        config.pretrained, attn_implementation=config.attention
    )
    if config.gradient_checkpointing:
        recompute_layers(model, "model.gradient_checkpointing", config.gradient_checkpointing == "selective")
    return model


def classification_loss(
    model: torch.nn.Module, batch: ImageBatch, token_loss: Callable
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the cross-entropy over a micro-batch's images, in float32, and how many of them are found."""
    logits = model(batch.images).logits
    loss, metrics = token_loss(logits, batch.targets)
    sums = {name: terms.detach().sum() for name, terms in metrics.items()}
    return loss, sums | {"accuracy": (logits.argmax(1) == batch.targets).sum()}


def flops_per_patch(found: transformers.PreTrainedConfig, length: int) -> float:
    """Forward and backward matrix FLOPs per patch, counted by torch on a model without storage."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = transformers.AutoModelForImageClassification.from_config(
            copy.deepcopy(found), attn_implementation="eager"
        )
        model(torch.zeros(1, 1, 8, 8)).logits.sum().backward()
    return counter.get_total_flops() / length
