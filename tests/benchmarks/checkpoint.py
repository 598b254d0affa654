"""How long does a save hold up training, against writing as many bytes as a plain file?

    python tests/benchmarks/checkpoint.py [--rounds 5] [--folder FOLDER]

A Llama of 60 million float32 parameters with AdamW's moments, 720 MB, is saved by save_checkpoint(); plain
writes of as many bytes to the same disk alternate with the saves. Of a save, trained_state() collects the tensors,
dcp.save() makes files of them, and a checksum reads these back. Last is the time to copy the tensors in memory: for so
long would a save that goes on in the background hold up training.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import transformers
from accelerate import Accelerator

import train

SHAPE = {"vocab_size": 16_000, "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 8,
         "num_attention_heads": 10, "tie_word_embeddings": False}


def timed(spent: Counter, name: str, function):
    """The function, with the seconds that it takes added to spent[name]."""
    def call(*args, **options):
        before = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            spent[name] += time.perf_counter() - before
    return call


def plain_write(path: Path, content: memoryview, sync: bool) -> None:
    with open(path, "wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; by default the temporary folder")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    bare = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model, optimizer = accelerator.prepare(bare, train.build_optimizer(bare, train.Optim()))
    state = train.trained_state(model, [optimizer.optimizer])  # Makes the moments.
    size = sum(tensor.nbytes for tensor in state.values())
    content, rounds = memoryview(np.random.default_rng(0).bytes(size)), []
    originals = train.trained_state, train.dcp.save, train.zlib.crc32
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        for step in range(args.rounds + 1):  # The first does not count.
            spent = Counter()
            train.trained_state, train.dcp.save = (
                timed(spent, name, function) for name, function in zip(("collect", "dcp.save"), originals))
            train.zlib.crc32 = timed(spent, "checksum", originals[2])
            save = timed(spent, "save", train.save_checkpoint)
            save(folder, 1, model, optimizer.optimizer, {"step": step}, accelerator)
            train.trained_state, train.dcp.save, train.zlib.crc32 = originals
            os.sync()  # What waits in memory of one must not slow the next.
            timed(spent, "plain", plain_write)(folder / "plain", content, sync=False)
            os.sync()
            timed(spent, "plain, on the disk", plain_write)(folder / "plain", content, sync=True)
            timed(spent, "copy", lambda: [tensor.clone() for tensor in state.values()])()
            rounds.append(spent)
    rounds = rounds[1:]
    print(f"{size / 1e6:,.0f} MB, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}; medians [least, greatest]")
    names = {"save": "a save holds up training", "collect": "  collecting the tensors", "dcp.save": "  dcp.save()",
             "checksum": "  checksum", "plain": "plain write", "plain, on the disk": "plain write and fsync",
             "copy": "copy in memory"}
    for name, text in names.items():
        seconds = [spent[name] for spent in rounds]
        ratios = [spent["save"] / spent[name] for spent in rounds]
        print(f"{text:28}{np.median(seconds):7.2f} s [{min(seconds):.2f}, {max(seconds):.2f}]"
              f"{size / np.median(seconds) / 1e6:9,.0f} MB/s   a save is {np.median(ratios):5.2f} times that")
    return 0


if __name__ == "__main__":
    sys.exit(main())
