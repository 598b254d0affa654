"""What train.py promises, as a plain torch loop: one process, one big batch, no Accelerate.

It shares no code with train.py on purpose: the row order, the padding, the shift of the targets, the loss, the clipping
and the learning rate are written a second time, from the documentation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from helpers import Done, difference

Row = dict[str, list[int]]  # input_ids and, where not every token is to be learned, labels.


def splitmix64(state: int) -> int:
    """The number that the generator of Steele, Lea and Flood (OOPSLA 2014) gives in this state."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def row_at(seed: int, num_rows: int, epoch: int, position: int) -> int:
    """Black and Rogaway (CT-RSA 2002): a generalized Feistel network, which is left only at a row that exists."""
    lines = 2
    while lines * lines < max(num_rows, 64):
        lines += 2
    columns = next(n for n in range(1, lines + 1) if n * lines >= max(num_rows, 64))
    key, row = splitmix64(splitmix64(seed) + epoch), position
    while True:
        line, column = row // columns, row % columns
        for half in range(12):
            if half % 2 == 0:
                line = (line + splitmix64(key + half * 2**40 + column) // 2) % lines
            else:
                column = (column + splitmix64(key + half * 2**40 + line) // 2) % columns
        row = columns * line + column
        if row < num_rows:
            return row


def shuffled(seed: int, num_rows: int, count: int) -> list[int]:
    """The first `count` row numbers of the endless stream of shuffled epochs."""
    return [row_at(seed, num_rows, *divmod(position, num_rows)) for position in range(count)]


def batch_sizes(batch: dict, max_steps: int) -> list[int]:
    """The rows of each step: those of the warm-up's stages in turn, then always the global batch."""
    sizes = []
    for stage in batch.get("warmup", []):
        sizes += [stage["rows"]] * stage["steps"]
    sizes += [batch["global_batch_size"]] * max_steps
    return sizes[:max_steps]


def learning_rate(optim: dict, step: int, max_steps: int) -> float:
    """Linear warmup, then half a cosine that ends at min_learning_rate_ratio of the peak in the last step."""
    peak, warmup = optim["learning_rate"], optim["warmup_steps"]
    low = peak * optim["min_learning_rate_ratio"]
    if step < warmup:
        return peak / warmup * step
    return low + (peak - low) * (1 + math.cos(math.pi * (step - warmup) / (max_steps - warmup))) / 2


def summed_loss(model: torch.nn.Module, rows: list[Row]) -> tuple[torch.Tensor, int]:
    """(sum of the cross-entropy over all targets of these rows, number of targets)."""
    width = max(len(row["input_ids"]) for row in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
    labels = torch.full_like(ids, -100)
    for r, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[r, :length], mask[r, :length] = torch.tensor(row["input_ids"]), 1
        labels[r, :length] = torch.tensor(row.get("labels", row["input_ids"]))
    scores = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    targets = labels[:, 1:]
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"), int((targets != -100).sum())


def evaluation_loss(model: torch.nn.Module, rows: list[Row]) -> float:
    """Mean over the targets of all rows, each row alone in the model."""
    with torch.no_grad():
        sums, counts = zip(*(summed_loss(model, [row]) for row in rows))
    return float(sum(x.double() for x in sums)) / sum(counts)


def adamw(model: torch.nn.Module, optim: dict) -> list[torch.optim.Optimizer]:
    """AdamW, in which matrices decay and vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.ndim > 1) is many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": optim["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    betas = optim["adam_beta1"], optim["adam_beta2"]
    return [torch.optim.AdamW(groups, lr=optim["learning_rate"], betas=betas, eps=optim["adam_eps"], foreach=False)]


@dataclass
class Reference:
    """What the loop did, a list entry per step."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    eval_losses: dict[int, float] = field(default_factory=dict)
    model: torch.nn.Module | None = None

    def check(self, done: Done) -> None:
        """Compare a whole run of train.py with this; the bounds leave room for rounding in float32 and nothing else.

        A cross-entropy is the difference of a log-sum and a logit. It carries the rounding of these, a few times
        2**-24 of numbers above 1, however small the difference becomes: below 1 its error no longer shrinks with it.
        """
        off = np.abs(np.subtract(done.losses, self.losses))
        assert (off <= 1e-6 * np.maximum(self.losses, 1)).all(), f"losses are off by {off}"
        np.testing.assert_allclose(done.logged("train/grad_norm"), self.grad_norms, rtol=1e-5)
        np.testing.assert_allclose(done.logged("train/learning_rate"), self.learning_rates, rtol=1e-12)
        assert difference(done.weights, self.weights) < 1e-5


def train_reference(
    config: dict,
    rows_of: Callable[[int], list[Row]],
    held_out: list[Row] = (),
    eval_every: int = 15,
    kind=transformers.AutoModelForCausalLM,
    summed_loss=summed_loss,
    adapt: Callable = lambda model: model,
    optimizers: Callable = adamw,
):
    """Train on rows_of(step) for steps 1 to max_steps, what adapt() leaves to train of the config's model folder.

    Each parameter group follows the schedule from the learning rate that optimizers() gave it.
    """
    optim, max_steps, did = config["optim"], config["run"]["max_steps"], Reference()
    folder = config["model"]["pretrained"]
    did.model = model = adapt(kind.from_pretrained(folder, attn_implementation="eager"))
    trainers = optimizers(model, optim)
    groups = [group for trainer in trainers for group in trainer.param_groups]
    peaks = [group["lr"] for group in groups]
    for step in range(1, max_steps + 1):
        total, targets = summed_loss(model, rows_of(step))
        loss = total / targets
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim["max_grad_norm"])
        for group, peak in zip(groups, peaks):
            group["lr"] = learning_rate(optim | {"learning_rate": peak}, step, max_steps)
        for trainer in trainers:
            if targets:
                trainer.step()
            trainer.zero_grad()
        did.losses.append(loss.item())
        did.grad_norms.append(norm.item())
        did.learning_rates.append(groups[0]["lr"])
        did.targets.append(targets)
        if held_out and step % eval_every == 0:
            did.eval_losses[step] = evaluation_loss(model, held_out)
    did.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return did
