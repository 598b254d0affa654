"""Real tokens per second on rows of chat-like lengths: train.py against transformers' Trainer and TRL's SFTTrainer.

    python tests/benchmarks/useful_tokens.py [--rounds 6] [--core 0] [--tiny]

The lengths are log-normal with sigma 0.8, median 120 and at most 1,024 tokens, seed 0. All train the same tiny Llama in
global batches of 128 rows, at most 8 rows of 1,024 tokens at once, without evaluation or saves. A turn is one step; a
real token is one that is no padding. train.py and batch_rebalance change which rows lie beside each other only inside a
step; group_by_length changes the steps, packing what a row is. A step of 16 packed rows has about as many tokens as one
of 128 documents. best_fit packs as TRL does. On a CPU attention works through packed rows as a whole, and the
tiny model is mostly attention: packed and unpacked compare with their own kind only. --tiny shrinks the steps, only to
see that this runs.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import datasets
import helpers
import numpy as np
import torch
import transformers
from contest import compete, contend, spread

TINY = "--tiny" in sys.argv  # Also of the contenders, which are processes of their own.
GLOBAL, MICRO, LENGTH = (8, 4, 128) if TINY else (128, 8, 1024)  # Rows of a step, rows at once, tokens.
WARMUP = 1  # In turns.
PACKED = 4 if TINY else 16  # Full rows in a step: 128 documents of 165 tokens on average are 21 such rows.
SHAPE = {
    "vocab_size": helpers.VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
    "pad_token_id": 0,
}


def make_rows(steps: int) -> list[dict]:
    lengths = np.random.default_rng(0).lognormal(np.log(120), 0.8, steps * GLOBAL)
    return helpers.make_rows(np.clip(lengths, 2, LENGTH).astype(int).tolist())


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def ours(packing: str, steps: int, turn: Callable, folder: Path) -> dict:
    import train
    from samerun.run import logs
    from samerun.run.meter import Meter

    new_model().save_pretrained(folder / "start")
    rows, size = helpers.write_rows(folder / "rows", make_rows(steps)), GLOBAL if packing == "none" else PACKED
    path = helpers.write_config(
        folder,
        {
            "run": {"max_steps": steps, "log_every": 1, "eval_every": 0, "save_every": 0, "trackers": []},
            "batch": {"global_batch_size": size, "max_micro_batch_size": MICRO},
            "data": {
                "path": str(rows),
                "format": "tokens",
                "tokenizer": "bytes",
                "packing": packing,
                "sequence_length": LENGTH,
            },
            "model": {"pretrained": str(folder / "start")},
        },
    )
    count, say, seen = Meter.count, logs.say, []

    def count_and_keep(meter: Meter, counts: dict[str, int]) -> None:
        count(meter, counts)
        seen[:] = [counts["real_tokens"]]

    def say_and_turn(text: str) -> None:
        say(text)
        if text.startswith("step "):
            turn(seen[0])

    Meter.count, logs.say = count_and_keep, say_and_turn
    assert train.main(["--config", str(path)]) == 0
    return {}


class Counted:
    """A collator that counts the real tokens that it hands out."""

    def __init__(self, collate: Callable):
        self.collate, self.tokens = collate, 0

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        self.tokens += sum(len(row["input_ids"]) for row in rows)
        return self.collate(rows)


def pad(rows: list[dict]) -> dict[str, torch.Tensor]:
    """What DataCollatorForSeq2Seq does, without a tokenizer: pad to the longest of the micro-batch."""
    width = max(len(row["input_ids"]) for row in rows)
    batch = {
        name: torch.full((len(rows), width), fill)
        for name, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", -100))
    }
    for r, row in enumerate(rows):
        ids = torch.as_tensor(row["input_ids"])
        batch["input_ids"][r, : len(ids)] = batch["labels"][r, : len(ids)] = ids
        batch["attention_mask"][r, : len(ids)] = 1
    return batch


def turns(counted: Counted, turn: Callable) -> transformers.TrainerCallback:
    """Ends a turn after each step. The loader is one micro-batch ahead, which evens out."""

    class Turns(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            turn(counted.tokens)
            counted.tokens = 0

    return Turns()


def options(folder: Path, steps: int, size: int) -> dict:
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": MICRO,
        "use_cpu": True,
        "gradient_accumulation_steps": size // MICRO,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }


def trainer(strategy: str, steps: int, turn: Callable, folder: Path) -> dict:
    counted = Counted(pad)
    arguments = transformers.TrainingArguments(**options(folder, steps, GLOBAL), train_sampling_strategy=strategy)
    transformers.Trainer(
        new_model(),
        arguments,
        train_dataset=datasets.Dataset.from_list(make_rows(steps)),
        data_collator=counted,
        callbacks=[turns(counted, turn)],
    ).train()
    return {}


def trl_packing(steps: int, turn: Callable, folder: Path) -> dict:
    import trl

    arguments = trl.SFTConfig(
        **options(folder, steps, PACKED), packing=True, max_length=LENGTH, bf16=False, gradient_checkpointing=False
    )
    trained = trl.SFTTrainer(
        new_model(),
        arguments,
        train_dataset=datasets.Dataset.from_list(make_rows(steps)),
        processing_class=transformers.ByT5Tokenizer(),
    )  # It wants one, for tokenized rows too.
    counted = Counted(trained.data_collator)
    trained.data_collator = counted
    trained.add_callback(turns(counted, turn))
    trained.train()
    return {}


CONTENDERS = {
    "train.py": partial(ours, "none"),
    "train.py, packed": partial(ours, "concat"),
    "train.py, best_fit": partial(ours, "best_fit"),
    "Trainer": partial(trainer, "random"),
    "Trainer, group_by_length": partial(trainer, "group_by_length"),
    "Trainer, batch_rebalance": partial(trainer, "batch_rebalance"),
    "TRL, packed": trl_packing,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="of a step of each contender")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.contender:
        logging.disable()
        transformers.utils.logging.set_verbosity_error()
        steps = WARMUP + args.rounds
        contend(lambda turn: CONTENDERS[args.contender](steps, turn, args.folder))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        options = ["--rounds", args.rounds, *(["--tiny"] if args.tiny else [])]
        rounds, _ = compete(__file__, list(CONTENDERS), args.rounds, WARMUP, 1, Path(folder), args.core, *options)

    def rate(name: str, clock: str, some: list[dict]) -> float:
        return sum(one[name]["count"] for one in some) / sum(one[name][clock] for one in some)

    print(f"{'':26}{'real tokens/s':>14}{'to Trainer':>24}{'in processor time':>24}   all rounds")
    for name in CONTENDERS:
        ratios = [
            [rate(name, clock, [one]) / rate("Trainer", clock, [one]) for one in rounds] for clock in ("wall", "cpu")
        ]
        whole = rate(name, "cpu", rounds) / rate("Trainer", "cpu", rounds)
        print(
            f"{name:26}{rate(name, 'wall', rounds):14,.0f}"
            + "".join(f"{spread(x, '.2f'):>24}" for x in ratios)
            + f"{whole:13.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
