"""How long does a save hold up training, against one that waits until all is written, and against a plain file?

    python tests/benchmarks/checkpoint.py [--rounds 5] [--folder FOLDER] [--tiny]

A Llama of 60 million float32 parameters with AdamW's moments, 720 MB. Training waits while trained_state() collects the
tensors and the stager copies them; save_checkpoint() then writes them in the background, here at once, so that both are
timed. Plain writes of as many bytes to the same disk alternate with the saves. The first round, in which the copy's
memory is new, is reported by itself. --tiny shrinks the model, only to see that this runs.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import transformers
from accelerate import Accelerator
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

import train
from samerun.config import Optim
from samerun.parallel.state import trained_state
from samerun.run.checkpoint import save_checkpoint

SHAPE = {
    "vocab_size": 16_000,
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "tie_word_embeddings": False,
}
TINY = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


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
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    bare = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SHAPE | TINY if args.tiny else SHAPE)))
    optimizers = train.build_optimizer(bare, Optim())
    model, *_ = accelerator.prepare(bare, *optimizers)
    size = sum(tensor.nbytes for tensor in trained_state(model, optimizers).values())  # Makes them.
    stager = StateDictStager()
    content, rounds = memoryview(np.random.default_rng(0).bytes(size)), []
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        for step in range(args.rounds + 1):
            os.sync()  # What waits in memory of one must not slow the next.
            marks = [time.perf_counter()]
            state = stager.stage(trained_state(model, optimizers))
            marks.append(time.perf_counter())
            save_checkpoint(folder, 1, state, {"step": step, "best_checkpoint": ""}, None)
            marks.append(time.perf_counter())
            os.sync()
            marks.append(time.perf_counter())
            plain_write(folder / "plain", content, sync=False)
            marks.append(time.perf_counter())
            os.sync()
            marks.append(time.perf_counter())
            plain_write(folder / "plain", content, sync=True)
            marks.append(time.perf_counter())
            stall, written, _, plain, _, on_disk = np.diff(marks)
            rounds.append((stall, stall + written, plain, on_disk))
    print(
        f"{size / 1e6:,.0f} MB, load {os.getloadavg()[0]:.1f}; seconds: the first, of {args.rounds} more the median "
        "[least, greatest]"
    )
    names = "training waits", "a save that blocks", "plain write", "plain write and fsync"
    for name, (first, *more), shares in zip(names, zip(*rounds), zip(*(row[0] / np.array(row) for row in rounds[1:]))):
        print(
            f"{name:24}{first:7.2f}{np.median(more):9.2f} [{min(more):.2f}, {max(more):.2f}]   training waits for "
            f"{np.median(shares):.2f} [{min(shares):.2f}, {max(shares):.2f}] of that"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
