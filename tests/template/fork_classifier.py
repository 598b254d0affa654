# ruff: noqa: F821  The names are those of train.py.
"""An image classifier as a fork of train.py. test_fork.py makes it and trains it.

edit() takes out what is about text. Then a function of this file replaces the one of the same name, and a class the
methods that it has here. The loop, plan, meter, checkpoints, resume and signals stay.

A row is an image of 8 x 8 pixels and its class. Its length is its number of patches, which is what the model computes
on, so that tokens per step and per second, MFU and data.sequence_length are about patches.
"""

from __future__ import annotations

from features import samples
from surgery import Script


def edit(script: Script) -> None:
    script.replace("", "transformers.AutoModelForCausalLM", "transformers.AutoModelForImageClassification")
    script.replace("SHOWN", "'eval/loss'", '"eval/loss", "eval/accuracy"')
    # The tokenizer
    samples(script)
    script.drop_definition("load_tokenizer")
    script.drop_parameter("load_data", "tokenizer")
    script.drop_field("Setup.tokenizer")
    script.drop_statements("export_model", "setup.tokenizer")
    script.drop_statements("announce", "example")
    script.drop_statements("announce", "setup.tokenizer")
    script.drop_statements("build_setup", "check_model")
    script.drop_statements("build_setup", "stop_after_turns")
    script.drop_statements("build_setup", "use_special_tokens")
    script.drop_field("Setup.token_bytes", None)
    script.drop_statements("build_setup", "token_bytes")
    # Its vocabulary
    script.drop_definition("check_token_ids")
    script.drop_field("Setup.vocabulary")
    script.drop_statements("build_setup", "vocabulary_size")
    script.drop_definition("extend_embeddings")
    script.drop_element("model_config", "vocab_size")
    for function in "model_config", "build_model":
        script.drop_parameter(function, "vocab_size")


class Dataset:
    """Rows of images, and the endless stream of shuffled epochs over them."""

    def __init__(self, images: datasets.Dataset, length: int, seed: int):
        self.images = images.with_format("numpy")
        self.length = length
        self.tokens = len(images) * length
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> str:
        """What tells these images from others."""
        return self.images._fingerprint

    def read_rows(self, rows: np.ndarray) -> list[np.ndarray]:
        """A rank without rows gets one without a class, because all ranks must take part in a pass."""
        return [self.read(row) for row in rows] or [np.append(np.zeros(64, int), -100)]

    def attention_length(self) -> int:
        """How many patches a patch sees."""
        return self.length

    def read(self, row: int) -> np.ndarray:
        """int64 [65]: 8 x 8 pixels, 0 to 255, and the class."""
        image = self.images[int(row)]
        return np.append(image["pixels"].astype(np.int64), image["label"])

    def sizes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(patches, targets) of each row. The target is the class."""
        return np.full(len(rows), self.length), np.ones(len(rows), int)


def load_data(config: Data, seed: int) -> tuple[Dataset, dict[str, Dataset]]:
    def as_rows(source: Source) -> Dataset:
        return Dataset(load_source(source), config.sequence_length, seed)

    return as_rows(config), {name: as_rows(source) for name, source in config.eval_sources.items()}


def collate(rows: list[np.ndarray], device: torch.device, joined: bool) -> dict[str, torch.Tensor]:
    """Images [rows, 1, 8, 8] and classes [rows, 1]."""
    pixels, targets = np.split(np.stack(rows), [64], axis=1)
    batch = {"images": torch.from_numpy(pixels.reshape(-1, 1, 8, 8)) / 255, "targets": torch.from_numpy(targets)}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def compute_loss(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], chunked: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the cross-entropy over a micro-batch's images, in float32, and how many of them are found."""
    logits, targets = model(batch["images"]).logits, batch["targets"].flatten()
    loss, sums = token_loss(logits, targets)
    return loss, sums | {"accuracy": (logits.argmax(1) == targets).sum()}


def longest_row(config: Data, joined: bool) -> np.ndarray:
    return np.zeros(65, int)


def flops_per_token(found: transformers.PreTrainedConfig, lora: dict[str, Any] | None, length: int) -> float:
    """Forward and backward matrix FLOPs per patch, counted by torch on a model without storage."""
    impossible = explained(f"model.architecture: no pass is possible with {found.to_diff_dict()}")
    with impossible, torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = transformers.AutoModelForImageClassification.from_config(
            copy.deepcopy(found), attn_implementation="eager"
        )
        (add_lora(model, lora) if lora else model)(torch.zeros(1, 1, 8, 8)).logits.sum().backward()
    return counter.get_total_flops() / length
