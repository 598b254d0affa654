"""What gpu.py starts beside train.py, each in a process of its own; and train.py in its turn, or its waits counted.

    python tests/benchmarks/gpu_contenders.py bare|Accelerate|Trainer|TRL|model JSON
    accelerate launch tests/benchmarks/gpu_contenders.py alone|count --config FILE [--section.field VALUE ...]

The first form trains as the JSON says, and prints the seconds and the real tokens of each step. All train the same
model on the same documents, in bf16, with clipping and fused AdamW; bare and Accelerate compile the layers. A contender
waits for the GPU at the end of each step. `model` only makes a model with random weights. The second form runs
train.py. With `count`, it then prints how often the host has waited for the GPU in each step, by torch's own sync debug
mode, and at which lines.

All that is timed gets ready at any time, and waits for its first step until it has locked the file GPU_GATE.
"""

import fcntl
import json
import os
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import datasets
import numpy as np
import torch
import torch.nn.functional as F
import transformers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BETAS = 0.9, 0.95


def new_model(architecture: dict, length: int) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(**architecture, max_position_embeddings=length, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(DEVICE).train()


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def take_the_gpu() -> int:
    """Wait until no other timed run has it. It is given back when this process ends or closes the file returned."""
    gate = os.open(os.environ["GPU_GATE"], os.O_RDWR)
    fcntl.flock(gate, fcntl.LOCK_EX)
    return gate


def bare(architecture: dict, tokens: str, rows: int, micro_batch: int, length: int, steps: int) -> dict:
    """Without train.py or Accelerate: bf16 autocast, compiled layers, rows that are all of one length."""
    ids = rows_of(tokens)
    model = new_model(architecture, length)
    for layer in model.model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=BETAS, weight_decay=0.1, fused=True)
    seconds = []
    take_the_gpu()
    for step in range(steps):
        began = time.perf_counter()
        at = step * rows % (len(ids) - rows + 1)
        for start in range(at, at + rows, micro_batch):
            batch = ids[start : min(start + micro_batch, at + rows)]
            targets = torch.cat([batch[:, 1:], torch.full_like(batch[:, :1], -100)], 1).to(DEVICE)
            with torch.autocast(DEVICE, torch.bfloat16):
                logits = model(input_ids=batch.to(DEVICE), use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / (rows * (length - 1))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # Waits for the device, as reading the loss for a log line does.
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "tokens": [rows * length] * steps}


def rows_of(tokens: str) -> torch.Tensor:
    """[rows, length]: those of documents that are all of one length."""
    rows = datasets.load_from_disk(tokens).with_format("numpy")["input_ids"]
    return torch.from_numpy(np.array(rows, np.int64))


def fsdp2(architecture: dict, tokens: str, rows: int, micro_batch: int, length: int, steps: int) -> dict:
    """A loop on Accelerate with FSDP2, as in its examples: the model's own loss, regional compilation, accumulate()."""
    import accelerate
    from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin

    with socket.socket() as one:
        one.bind(("localhost", 0))
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(one.getsockname()[1]), "RANK": "0"}
    os.environ |= {"WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "ACCELERATE_USE_FSDP": "true"}
    layers = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = accelerate.Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_steps=rows // micro_batch,
        fsdp_plugin=layers,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor", use_regional_compilation=True),
    )
    data = torch.utils.data.TensorDataset(rows_of(tokens))
    loader = torch.utils.data.DataLoader(data, micro_batch, drop_last=True)
    model = new_model(architecture, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=BETAS, weight_decay=0.1, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seconds, began = [], 0.0
    take_the_gpu()
    while len(seconds) < steps:
        for (batch,) in loader:
            began = began or time.perf_counter()
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                loss.item()
                seconds.append(time.perf_counter() - began)
                began = 0.0
    accelerator.end_training()
    return {"seconds": seconds[:steps], "tokens": [rows * length] * steps}


class Timed(transformers.TrainerCallback):
    """The seconds of each step of a transformers Trainer, and the real tokens that its collator has handed out."""

    def __init__(self, collate: Callable):
        self.collate = collate
        self.seconds, self.tokens, self.seen = [], [], 0

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        self.seen += sum(len(row["input_ids"]) for row in rows)
        return self.collate(rows)

    def on_train_begin(self, args, state, control, **_):
        take_the_gpu()
        self.ended = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        wait()
        now = time.perf_counter()
        self.seconds.append(now - self.ended)
        self.tokens.append(self.seen)
        self.ended, self.seen = now, 0

    def result(self) -> dict:
        return {"seconds": self.seconds, "tokens": self.tokens}


def pad(rows: list[dict]) -> dict[str, torch.Tensor]:
    """What transformers' collators do: pad to the longest row of the micro-batch."""
    width = max(len(row["input_ids"]) for row in rows)
    ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        size = len(row["input_ids"])
        ids[number, :size] = labels[number, :size] = torch.as_tensor(row["input_ids"])
        mask[number, :size] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def arguments(folder: str, rows: int, micro_batch: int, steps: int) -> dict:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": rows // micro_batch,
        "bf16": DEVICE == "cuda",
        "use_cpu": DEVICE == "cpu",
        "optim": "adamw_torch_fused",
        "learning_rate": 1e-5,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_pin_memory": DEVICE == "cuda",
        "disable_tqdm": True,
    }


def trainer(architecture: dict, tokens: str, rows: int, micro_batch: int, length: int, steps: int) -> dict:
    """transformers' Trainer as it comes."""
    timed = Timed(pad)
    with tempfile.TemporaryDirectory() as folder:
        transformers.Trainer(
            new_model(architecture, length),
            transformers.TrainingArguments(**arguments(folder, rows, micro_batch, steps)),
            train_dataset=datasets.load_from_disk(tokens),
            data_collator=timed,
            callbacks=[timed],
        ).train()
    return timed.result()


def trl(architecture: dict, tokens: str, rows: int, micro_batch: int, length: int, steps: int) -> dict:
    """TRL's SFTTrainer with its packing."""
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as folder:
        options = arguments(folder, rows, micro_batch, steps)
        packed = {"packing": True, "max_length": length, "gradient_checkpointing": False}
        trained = SFTTrainer(
            new_model(architecture, length),
            SFTConfig(**options, **packed),
            train_dataset=datasets.load_from_disk(tokens),
            processing_class=transformers.ByT5Tokenizer(),  # It wants one, for rows of tokens, too.
        )
        timed = Timed(trained.data_collator)
        trained.data_collator = timed
        trained.add_callback(timed)
        trained.train()
    return timed.result()


def make_model(architecture: dict, length: int, folder: str) -> dict:
    """Save a model in bf16 with random weights, made on the GPU, where that takes no time."""
    config = transformers.AutoConfig.for_model(**architecture, max_position_embeddings=length)
    gate = take_the_gpu()
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.cpu()
    os.close(gate)
    model.save_pretrained(folder)
    return {}


def train_alone(argv: list[str]) -> None:
    """Run train.py. Its first step waits until it has the GPU."""
    import train

    loop = train.training_loop

    def alone(*args) -> None:
        take_the_gpu()
        loop(*args)

    train.training_loop = alone
    sys.exit(train.main(argv))


def count_waits(argv: list[str]) -> None:
    """Run train.py. The first of its `waits` are those of the second step."""
    import train
    from samerun.run.meter import Meter

    waits, after_steps, show = [], [], warnings.showwarning

    def note(message, category, filename, lineno, *more) -> None:
        if "synchronizing CUDA operation" in str(message):
            waits.append(f"{Path(filename).name}:{lineno}")
        else:
            show(message, category, filename, lineno, *more)

    count = Meter.count

    def count_and_note(meter: Meter, counts: dict[str, int]) -> None:
        count(meter, counts)
        after_steps.append(len(waits))

    warnings.showwarning = note
    warnings.filterwarnings("always", ".*synchronizing CUDA operation")
    torch.set_warn_always(True)
    Meter.count = count_and_note
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
    status = train.main(argv)
    print(json.dumps({"waits": np.diff(after_steps).tolist(), "where": Counter(waits)}))
    sys.exit(status)


CONTENDERS = {"bare": bare, "Accelerate": fsdp2, "Trainer": trainer, "TRL": trl, "model": make_model}
SCRIPTS = {"alone": train_alone, "count": count_waits}

if __name__ == "__main__":
    if sys.argv[1] in CONTENDERS:
        print(json.dumps(CONTENDERS[sys.argv[1]](**json.loads(sys.argv[2]))))
    else:
        SCRIPTS[sys.argv[1]](sys.argv[2:])
