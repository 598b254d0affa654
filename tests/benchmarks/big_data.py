"""Does a start on 1e8 rows cost what one on 1e4 rows costs, at any step, and so does reading a row?

    python tests/benchmarks/big_data.py [--rows 100000000] [--packing none|concat] [--sparse] [--folder FOLDER]
    python tests/benchmarks/big_data.py --shuffle

Writes that many documents of 1 to 7 tokens as memory-mapped Arrow in the small record batches that `datasets` writes,
and 10,000 of the same kind. train.py's own functions load both, each start in a process of its own: the first start,
which makes the index, and later ones at step 1, in the middle of the second epoch, and at the end of the 100th. Then
train.py itself trains a tiny model on both for one step. Prints a table, and ends with exit status 1 if a later start
on the many rows takes more than 2 s of processor time or 200 MiB of own memory more than one on the few, or if reading
a row again takes more than twice as long. The first time takes longer with many rows, because the system then maps the
page that the row is on, and few rows share one.

--sparse writes documents of 4 equal tokens, which take no room on the disk, so that 1e9 rows need only their index: 8
bytes a row with packing none.

With --shuffle it measures only how long it takes to find out which rows come next, for data of several sizes.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import BinaryIO

import datasets
import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LENGTH, LONGEST, SEED, FEW = 7, 7, 0, 10_000
GLOBAL_BATCH = 512
READS = 20_000
MIB = 2**20
VOCABULARY = 256
MODEL = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}


class SparseFile(io.RawIOBase):
    """A file in which blocks of zeros are holes."""

    def __init__(self, file: BinaryIO):
        self.file = file

    def writable(self) -> bool:
        return True

    def write(self, block) -> int:
        if np.frombuffer(block, np.uint8).any():
            return self.file.write(block)
        self.file.seek(len(block), os.SEEK_CUR)
        return len(block)


def write_documents(folder: Path, rows: int, sparse: bool = False) -> None:
    """A save_to_disk folder, written in pieces: no Python object per row, and never all of it in memory."""
    kind = pa.list_(pa.uint16(), 4) if sparse else pa.list_(pa.uint16())
    first = pa.table({"input_ids": pa.array([[0] * 4], kind)})
    datasets.Dataset(first).save_to_disk(folder)
    schema = pa.schema([("input_ids", kind)])
    (file,) = folder.glob("*.arrow")
    rng, piece = np.random.default_rng(SEED), 1_000_000
    with open(file, "wb") as opened:
        with pa.ipc.new_stream(SparseFile(opened), schema) as writer:
            for start in range(0, rows, piece):
                column = some_documents(min(piece, rows - start), sparse, rng)
                writer.write_table(pa.table([column], schema=schema), max_chunksize=1000)
        opened.truncate()  # The end may be a hole, too.


def some_documents(count: int, sparse: bool, rng: np.random.Generator) -> pa.Array:
    if sparse:
        return pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4 * count, np.uint16)), 4)
    offsets = np.cumsum(np.append(0, rng.integers(1, LONGEST + 1, count)), dtype=np.int32)
    values = pa.array(rng.integers(0, VOCABULARY, offsets[-1], dtype=np.uint16))
    return pa.ListArray.from_arrays(pa.array(offsets), values)


class PeakMemory:
    """The most memory of this process' own while it is open, in bytes; pages of the mapped file are the system's."""

    def __enter__(self) -> "PeakMemory":
        self.peak, self.open = 0, True
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.open = False
        self.thread.join()

    def now(self) -> int:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines["RssAnon"].split()[0]) * 1024

    def watch(self) -> None:
        while self.open:
            self.peak = max(self.peak, self.now())
            time.sleep(0.005)


def measure(folder: Path, packing: str, where: float) -> dict[str, float]:
    """Start as train.py does, at a step `where` epochs into the stream, and then read rows from anywhere."""
    import torch  # Not by the parent: what the libraries hold is to be in `before`.

    import train
    from samerun.config import Data
    from samerun.data.batches import load_step
    from samerun.data.load import load_data
    from samerun.plan import Stage

    config = Data(path=str(folder), format="tokens", packing=packing, sequence_length=LENGTH)
    with PeakMemory() as memory:
        before, begin, busy = memory.now(), time.perf_counter(), time.process_time()
        data, _ = load_data(config, None, SEED)
        data.fingerprint()
        stage = Stage(1, 0, train.plan_batch(GLOBAL_BATCH, GLOBAL_BATCH, 1, LENGTH))
        step = max(1, int(where * len(data)) // GLOBAL_BATCH)
        load_step(step, data, stage, 0, True, torch.device("cpu"))
        seconds, processor = time.perf_counter() - begin, time.process_time() - busy
        held = memory.now() - before
        some = np.random.default_rng(SEED).integers(0, len(data), READS)
        reads = []
        for _ in range(2):
            busy = time.process_time()
            for row in some:
                data.read(row)
            reads.append((time.process_time() - busy) / READS * 1e6)
    return {
        "rows": f"{len(data):,}",
        "step": f"{step:,}",
        "seconds": seconds,
        "processor, s": processor,
        "memory, held, MiB": held / MIB,
        "memory, peak, MiB": (memory.peak - before) / MIB,
        "read a row, us": reads[0],
        "again, us": reads[1],
    }


def measure_launch(folder: Path, packing: str) -> dict[str, float]:
    """One whole launch of train.py that trains for a step."""
    import train

    config = {
        "run": {"max_steps": 1, "trackers": []},
        "batch": {"global_batch_size": GLOBAL_BATCH, "max_micro_batch_size": GLOBAL_BATCH},
        "data": {"path": str(folder), "format": "tokens", "packing": packing, "sequence_length": LENGTH},
        "model": {"architecture": MODEL | {"num_attention_heads": 1, "vocab_size": VOCABULARY}},
    }
    with tempfile.TemporaryDirectory() as run, PeakMemory() as memory:
        config["run"]["output_dir"] = run
        begin, busy = time.perf_counter(), time.process_time()
        Path(run, "config.json").write_text(json.dumps(config))  # Every JSON is YAML.
        code = train.main(["--config", f"{run}/config.json"])
        assert code == 0
        seconds, processor = time.perf_counter() - begin, time.process_time() - busy
    return {"seconds": seconds, "processor, s": processor, "memory, peak, MiB": memory.peak / MIB}


def measure_shuffle() -> None:
    """The median time of train.py's shuffle() for the rows of a step, and for a million positions."""
    from samerun.data.order import shuffle

    print("rows             1,024 positions, ms    1,000,000 positions, s")
    for count in 10_000, 100_000_000, 1_000_000_000:
        seconds = []
        for size, times in (1024, 200), (1_000_000, 5):
            took = []
            for number in range(times):
                begin = time.perf_counter()
                shuffle(np.arange(number * size, (number + 1) * size), count, SEED)
                took.append(time.perf_counter() - begin)
            seconds.append(np.median(took))
        print(f"{count:<13,} {seconds[0] * 1000:22.2f} {seconds[1]:25.2f}")


def start(folder: Path, packing: str, where: float | None) -> dict[str, float]:
    """What measure() finds in a process of its own, or measure_launch() if `where` is None."""
    command = [sys.executable, __file__, "--folder", folder, "--packing", packing, "--measure", json.dumps(where)]
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder.parent / "cache")}  # The index goes there.
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def compare(folder: Path, args: argparse.Namespace) -> int:
    """Measure all starts, print them, and return the exit status."""
    few, many = folder / "few", folder / "many"
    for part, rows in ((few, min(FEW, args.rows)), (many, args.rows)):
        if not part.exists():
            write_documents(part, rows, args.sparse)
    starts = {
        "few, first": start(few, args.packing, 0),
        "few": start(few, args.packing, 0),
        "many, first": start(many, args.packing, 0),
        "many": start(many, args.packing, 0),
        "many, middle": start(many, args.packing, 1.5),
        "many, late": start(many, args.packing, 99.99),
        "few, train.py": start(few, args.packing, None),
        "many, train.py": start(many, args.packing, None),
    }
    names = list(starts["few"])
    print(f"| {args.packing} | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}")
    for label, found in starts.items():
        print(f"| {label} | {' | '.join(shown(found.get(name)) for name in names)} |")

    worst = {}
    for name in ("processor, s", "memory, held, MiB", "memory, peak, MiB"):
        more = [starts[label][name] - starts["few"][name] for label in ("many", "many, middle", "many, late")]
        if name in starts["many, train.py"]:
            more.append(starts["many, train.py"][name] - starts["few, train.py"][name])
        worst[name] = max(more)
    first, again = (starts["many"][name] / starts["few"][name] for name in ("read a row, us", "again, us"))
    print("\nmore than on few rows, at most: " + ", ".join(f"{name} {value:.2f}" for name, value in worst.items()))
    print(f"a row is read in {first:.2f} times the time, and again in {again:.2f} (bounds: 2 s, 200 MiB, 2 times)")
    seconds, *memory = worst.values()
    return int(seconds > 2 or max(memory) > 200 or again > 2)


def shown(value: float | str | None) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value or "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000_000, help="documents")
    parser.add_argument("--packing", choices=("none", "concat"), default="none")
    parser.add_argument("--sparse", action="store_true", help="documents that take no room on the disk")
    parser.add_argument("--folder", type=Path, help="kept afterwards; by default a temporary one")
    parser.add_argument("--shuffle", action="store_true", help="measure only the order of the rows")
    parser.add_argument("--measure", type=json.loads, default=False, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shuffle:
        measure_shuffle()
        return 0
    if args.measure is not False:
        if args.measure is None:
            found = measure_launch(args.folder, args.packing)
        else:
            found = measure(args.folder, args.packing, args.measure)
        print(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        return compare((args.folder or Path(temporary)).resolve(), args)


if __name__ == "__main__":
    sys.exit(main())
