"""What does the loop cost? The same tiny training in a bare torch loop, train.py, transformers' Trainer and Accelerate.

    python tests/benchmarks/overhead.py [--launches 4] [--rounds 20] [--core 0] [--against COMMIT]

All train the same Llama on the same rows in the same order, with fused AdamW, clipping, cosine and a log line every 50
steps, without evaluation or saves; a step takes about 7 ms on one idle core, so that overhead shows. All must end
with the same model: its loss may differ by 1e-5 (relative) from the bare loop's. A round has one log line, and short
turns, because the speed of many machines changes within a second, see contest.py. All is launched several times: where
the memory of a process happens to lie makes a difference of 1 %.

With --against, the train.py of another commit is one more contender: before a change lands, this shows what it costs.
That script may train on other rows, as those before 4e80ca4 do, so that its model is not compared.
"""

import argparse
import io
import itertools
import json
import logging
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import torch
import transformers
import yaml
from contest import compete, contend, spread
from torch.optim.optimizer import register_optimizer_step_post_hook

ROOT = Path(__file__).resolve().parents[2]

VOCABULARY = 384  # That of the bytes tokenizer, so that train.py leaves the model's embedding as it is.
ROWS, LENGTH, LOG_EVERY, SEED, WARMUP = 8, 64, 50, 3, 2  # ROWS of a step; WARMUP in rounds of LOG_EVERY steps.
TURNS = 2  # Of a round. In a shorter turn, steps would pay for what other contenders have left in the CPU's caches.
PEAK, LOW, BETAS, EPS, CLIP, DECAY = 1e-3, 0.1, (0.9, 0.95), 1e-6, 1.0, 0.1
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}


def make_ids(steps: int) -> np.ndarray:
    """[rows, LENGTH] token ids of one epoch, as they are stored."""
    rng = np.random.default_rng(0)
    starts, strides = rng.integers(3, 60, (steps * ROWS, 1)), rng.integers(1, 6, (steps * ROWS, 1))
    noise = rng.integers(0, 3, (steps * ROWS, LENGTH))  # So that no contender can reach a loss of nothing.
    return (starts + strides * np.arange(LENGTH) + noise) % (VOCABULARY - 3) + 3


def in_order(ids: np.ndarray) -> torch.Tensor:
    """The rows in the order in which train.py takes them: for those that do not shuffle for themselves."""
    from reference import shuffled  # Not above, because it imports this commit's train.py.

    return torch.from_numpy(ids[shuffled(SEED, len(ids), len(ids))])


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def new_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) is many], "weight_decay": DECAY * many}
        for many in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=PEAK, betas=BETAS, eps=EPS, fused=True)


def share(step: int, steps: int) -> float:
    """Learning rate of a step, 1 to steps, as a share of the peak: a cosine without warmup."""
    return LOW + (1 - LOW) * 0.5 * (1 + np.cos(np.pi * step / steps))


class Rows(torch.utils.data.Dataset):
    """What the loaders of Trainer and Accelerate read: rows in memory, so that they lose nothing on reading."""

    def __init__(self, ids: torch.Tensor):
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[row], "labels": self.ids[row]}


def bare_loop(ids: np.ndarray, steps: int, folder: Path) -> torch.nn.Module:
    model = new_model()
    optimizer, batches = new_optimizer(model), in_order(ids).view(steps, ROWS, LENGTH)
    with open(folder / "log.jsonl", "w") as log:
        for step, batch in enumerate(batches, 1):
            for group in optimizer.param_groups:
                group["lr"] = PEAK * share(step, steps)
            logits = model(input_ids=batch).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                values = loss.item(), norm.item(), group["lr"]
                log.write(json.dumps({"step": step, **dict(zip(("loss", "norm", "lr"), values))}) + "\n")
    return model


def this_script(ids: np.ndarray, steps: int, folder: Path, tree: Path = ROOT) -> torch.nn.Module:
    """The train.py in a folder. Nothing else of this process may have imported another one."""
    sys.path.insert(0, str(tree))
    import train

    new_model().save_pretrained(folder / "start")
    datasets.Dataset.from_list([{"input_ids": row} for row in ids.tolist()]).save_to_disk(folder / "rows")
    config = {
        "run": {
            "output_dir": str(folder / "run"),
            "max_steps": steps,
            "seed": SEED,
            "log_every": LOG_EVERY,
            "eval_every": 0,
            "save_every": 0,
            "trackers": [],
        },
        "batch": {"global_batch_size": ROWS, "max_micro_batch_size": ROWS},
        "data": {
            "path": str(folder / "rows"),
            "format": "tokens",
            "tokenizer": "bytes",
            "packing": "none",
            "sequence_length": LENGTH,
        },
        "model": {"pretrained": str(folder / "start")},
        "optim": {
            "learning_rate": PEAK,
            "min_learning_rate_ratio": LOW,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_eps": EPS,
            "weight_decay": DECAY,
            "max_grad_norm": CLIP,
        },
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert not train.main(["--config", str(path)])
    return transformers.LlamaForCausalLM.from_pretrained(folder / "run" / "model")


def check_out(commit: str, folder: Path) -> None:
    """All files of a commit, because its train.py may stand on others."""
    files = subprocess.run(["git", "archive", "--format=tar", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(folder, filter="data")


def trainer(ids: np.ndarray, steps: int, folder: Path) -> torch.nn.Module:
    model = new_model()
    optimizer = new_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: share(done + 1, steps))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        max_grad_norm=CLIP,
        use_cpu=True,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        report_to="none",
        include_num_input_tokens_seen="all",
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    transformers.Trainer(
        model,
        arguments,
        train_dataset=Rows(in_order(ids)),
        data_collator=transformers.default_data_collator,
        optimizers=(optimizer, scheduler),
    ).train()
    return model


def accelerate_loop(ids: np.ndarray, steps: int, folder: Path) -> torch.nn.Module:
    """The loop of Accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    bare = new_model()
    optimizer = new_optimizer(bare)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: share(done + 1, steps))
    loader = torch.utils.data.DataLoader(Rows(in_order(ids)), batch_size=ROWS)
    model, optimizer, loader, scheduler = accelerator.prepare(bare, optimizer, loader, scheduler)
    with open(folder / "log.jsonl", "w") as log:
        for step, batch in enumerate(loader, 1):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                values = accelerator.gather(loss).mean().item(), norm.item(), scheduler.get_last_lr()[0]
                log.write(json.dumps({"step": step, **dict(zip(("loss", "norm", "lr"), values))}) + "\n")
    return bare


def loop(contender: Callable, steps: int, folder: Path, turn: Callable) -> dict[str, float]:
    """Train, and return the trained model's loss on the first rows."""
    ids, done = make_ids(steps), itertools.count(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    def after_step(*_) -> None:
        if next(done) % (LOG_EVERY // TURNS) == 0:
            turn()

    register_optimizer_step_post_hook(after_step)
    model = contender(ids, steps, folder).eval()
    probe = torch.from_numpy(ids[:64])
    with torch.no_grad():
        return {"loss": model(input_ids=probe, labels=probe).loss.item()}


BASE = "bare torch loop"
CONTENDERS = {BASE: bare_loop, "train.py": this_script, "Trainer": trainer, "Accelerate": accelerate_loop}


def ratios(rounds: list[dict], name: str, base: str) -> list[str]:
    """What a step of one contender takes in that of another, by the wall clock and in processor time."""
    return [spread([one[name][clock] / one[base][clock] for one in rounds]) for clock in ("wall", "cpu")]


def print_table(rounds: list[dict], names: list[str]) -> None:
    width = max(map(len, names)) + 1
    print(f"{'':{width}}{'ms per step':>24}{'to the bare loop':>24}{'in processor time':>24}")
    for name in names:
        milliseconds = spread([one[name]["wall"] / LOG_EVERY * 1e3 for one in rounds], ".2f")
        cells = [milliseconds, *ratios(rounds, name, BASE)]
        print(f"{name:{width}}" + "".join(f"{cell:>24}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=4, help="of all contenders")
    parser.add_argument("--rounds", type=int, default=20, help=f"of a launch: {LOG_EVERY} steps of each contender")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--against", metavar="COMMIT", help="its train.py is one more contender")
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    contenders, other = dict(CONTENDERS), f"train.py, {args.against}"
    if args.against:
        contenders[other] = partial(this_script, tree=args.tree)
    if args.contender:
        logging.disable()
        contend(partial(loop, contenders[args.contender], (WARMUP + args.rounds) * LOG_EVERY, args.folder))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        options = ["--rounds", args.rounds]
        if args.against:
            tree = Path(folder) / "commit"
            check_out(args.against, tree)
            options += ["--against", args.against, "--tree", tree]
        names, counts, rounds = list(contenders), (args.rounds, WARMUP, TURNS), []
        for launch in range(args.launches):
            (home := Path(folder) / str(launch)).mkdir()
            of_launch, results = compete(__file__, names, *counts, home, args.core, *options)
            rounds += of_launch
    print_table(rounds, names)
    if args.against:
        wall, processor = ratios(rounds, "train.py", other)
        print(f"train.py to that of {args.against}: {wall}, in processor time {processor}")
    loss = results[BASE]["loss"]
    worst = max(abs(results[name]["loss"] / loss - 1) for name in CONTENDERS)
    print(f"loss of the trained model {loss:.5f}, greatest relative difference {worst:.1e}")
    assert worst < 1e-5, "the contenders did not train the same model"
    return 0


if __name__ == "__main__":
    sys.exit(main())
