"""Denoising diffusion on train.py: the module that such a fork has beside it.

If each process drew its own noise, a run would depend on their number. Here a row is a draw: a place in the endless
stream of images. The image, its time and its noise are functions of the seed and of that place, so a run is the same on
any number of processes and after a restart, with the same numpy. An evaluation has the same draws each time.

Tokens per step and per second, MFU and data.sequence_length are about pixels. The rows of a step that is not finite are
places, too.
"""

import math
import zlib
from dataclasses import dataclass

import datasets
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.utils.flop_counter import FlopCounterMode

from samerun.config import Data, Model, Source
from samerun.data.order import Order, shuffle
from samerun.data.rows import Dataset
from samerun.data.sources import load_source
from samerun.errors import require

SIDE = 8
PIXELS = SIDE * SIDE
TIMES = 1000


class Draws(Dataset):
    """A row's number is its place in the stream, not that of an image: each epoch shows an image with new noise."""

    def __init__(self, images: datasets.Dataset, seed: int, number: int):
        self.images = images.with_format("numpy")
        self.seed = seed
        self.number = number  # Of the data set. An evaluation has other noise than the training.
        self.tokens = len(images) * PIXELS
        self.order = Order(len(images), seed)  # Checkpoints note its name.

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> int:
        """A checksum of some rows as the model gets them, wherever the images lie. So other noise counts, too."""
        checksum = len(self)
        for place in np.linspace(0, len(self) - 1, 100, dtype=int):
            checksum = zlib.crc32(self.read(place), checksum)
        return checksum

    def rows_at(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count)

    def read_rows(self, rows: np.ndarray) -> list[np.ndarray]:
        """A rank without rows gets one without targets, because all ranks must take part in a pass."""
        return [self.read(row) for row in rows] or [np.zeros(2 * PIXELS + 2)]

    def read(self, place: int) -> np.ndarray:
        """float64 [2 * PIXELS + 2]: pixels from -1 to 1, their noise, the time, and whether the noise is learned."""
        image = shuffle(np.array([place]), len(self), self.seed)[0]
        random = np.random.default_rng([self.seed, self.number, place])
        pixels = self.images[int(image)]["pixels"] / 127.5 - 1
        return np.concatenate([pixels, random.standard_normal(PIXELS), [random.integers(TIMES), 1]])

    def sizes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(pixels, targets) of each row. The target is the noise of each pixel."""
        return np.full(len(rows), PIXELS), np.full(len(rows), PIXELS)


@dataclass(frozen=True)
class NoisyImages:
    images: torch.Tensor  # float32 [rows, 1, 8, 8]
    times: torch.Tensor  # int64 [rows], 0 to 999.
    noise: torch.Tensor  # float32 [rows, 1, 8, 8]: what is to be found in the images.
    learned: torch.Tensor  # float32 [rows, 1, 1, 1]: 1, or 0 for a row without targets.


def load_draws(config: Data, seed: int) -> tuple[Draws, dict[str, Draws]]:
    def as_draws(source: Source, number: int) -> Draws:
        return Draws(load_source(source), seed, number)

    require(config.sequence_length == PIXELS, f"data.sequence_length: an image has {PIXELS} pixels; use {PIXELS}")
    evaluations = enumerate(config.eval_sources.items(), start=1)
    return as_draws(config, 0), {name: as_draws(source, number) for number, (name, source) in evaluations}


def add_noise(rows: list[np.ndarray], device: torch.device, joined: bool) -> NoisyImages:
    """In place of collate(). The cosine schedule of Nichol and Dhariwal (arXiv:2102.09672), equation 17."""
    pixels, noise, times, learned = np.split(np.stack(rows), [PIXELS, 2 * PIXELS, 2 * PIXELS + 1], axis=1)
    kept = (np.cos((times / TIMES + 0.008) / 1.008 * math.pi / 2) / math.cos(0.008 / 1.008 * math.pi / 2)) ** 2
    noisy = np.sqrt(kept) * pixels + np.sqrt(1 - kept) * noise
    noisy, noise = (torch.from_numpy(part).float().view(-1, 1, SIDE, SIDE).to(device) for part in (noisy, noise))
    learned = torch.from_numpy(learned).float().view(-1, 1, 1, 1)
    return NoisyImages(noisy, torch.from_numpy(times.flatten()).long().to(device), noise, learned.to(device))


def denoising_loss(model: torch.nn.Module, batch: NoisyImages) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over a micro-batch's pixels of the squared error of the noise, in float32."""
    errors = (model(batch.images, batch.times).float() - batch.noise).square() * batch.learned
    return errors.sum(), {"loss": errors.detach().sum()}


class DenoiserConfig(transformers.PreTrainedConfig):
    model_type = "denoiser"

    hidden_size: int = 16
    num_hidden_layers: int = 2


class Block(torch.nn.Module):
    """Convolutions whose channels are shifted by what the time says."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = torch.nn.GroupNorm(4, width)
        self.before, self.after = (torch.nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.shift = torch.nn.Linear(width, width)

    def forward(self, states: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """states: [rows, width, 8, 8]. times: [rows, width]."""
        found = self.before(self.norm(states)) + self.shift(times)[:, :, None, None]
        return states + self.after(F.silu(found))


class Denoiser(transformers.PreTrainedModel):
    config_class = DenoiserConfig
    _no_split_modules = ["Block"]  # What FSDP2 shards one by one.

    def __init__(self, config: DenoiserConfig):
        super().__init__(config)
        width = config.hidden_size
        self.first, self.last = torch.nn.Conv2d(1, width, 3, padding=1), torch.nn.Conv2d(width, 1, 3, padding=1)
        self.time = torch.nn.Linear(width, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        """Accelerate asks for them under FSDP2."""
        return self.first

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """The noise [rows, 1, 8, 8] in images [rows, 1, 8, 8] of these times [rows]."""
        count = self.config.hidden_size // 2
        waves = times[:, None] * TIMES ** (-torch.arange(count, device=times.device) / count)
        times = F.silu(self.time(torch.cat((waves.sin(), waves.cos()), dim=1)))
        states = self.first(images)
        for block in self.blocks:
            states = block(states, times)
        return self.last(F.silu(states))


# The config of model.pretrained is found by this name.
transformers.AutoConfig.register(DenoiserConfig.model_type, DenoiserConfig)


def build_denoiser(config: Model, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Denoiser.from_pretrained(config.pretrained)


def flops_per_pixel(found: DenoiserConfig, length: int) -> float:
    """Forward and backward FLOPs per pixel, counted by torch on a model without storage."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        images, times = torch.zeros(1, 1, SIDE, SIDE), torch.zeros(1, dtype=torch.long)
        Denoiser(found)(images, times).sum().backward()
    return counter.get_total_flops() / length
