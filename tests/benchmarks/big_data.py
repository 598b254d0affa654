"""Does a start on 1e8 rows cost what one on 1e4 rows costs, at any step, and so does reading a row?

    python tests/benchmarks/big_data.py [--rows 100000000] [--packing none|concat] [--sparse | --megatron]
                                        [--longest 7] [--eval_fraction 0] [--folder FOLDER]
    python tests/benchmarks/big_data.py --shuffle | --hashes

Writes that many documents of 1 to 7 tokens as memory-mapped Arrow in the small record batches that `datasets` writes,
and 10,000 of the same kind. train.py's own functions load both, each start in a process of its own: the first start,
which makes the index, and later ones at step 1, in the middle of the second epoch, and at the end of the 100th. Then
train.py itself trains a tiny model on both for one step. Prints a table, and ends with exit status 1 if a later start
on the many rows takes more than 2 s of processor time or 200 MiB of own memory more than one on the few, or if reading
a row again takes more than twice as long. The first time takes longer with many rows, because the system then maps the
page that the row is on, and few rows share one.

--sparse writes documents of 4 equal tokens, which take no room on the disk, so that 1e9 rows need only their index: 8
bytes a row with packing none.

--megatron writes the same tokens as Megatron does, in a .bin and an .idx. With --eval_fraction, the first start also
compares all documents with those that are held out; --longest is the most tokens of a document.

With --shuffle it measures only how long it takes to find out which rows come next, for data of several sizes.
With --hashes, only how long it takes to compare 10,000,000 documents with 100,000 that are held out; their hashes are
measured on fewer documents.
"""

import argparse
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SEED, FEW = 0, 10_000
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


def write_documents(folder: Path, rows: int, args: argparse.Namespace) -> None:
    """A save_to_disk folder, written in pieces: no Python object per row, and never all of it in memory."""
    rng, piece = np.random.default_rng(SEED), 1_000_000
    sizes = [min(piece, rows - start) for start in range(0, rows, piece)]
    if args.megatron:
        return write_megatron(folder, rows, (some_documents(size, args, rng) for size in sizes))
    kind = pa.list_(pa.uint16(), 4) if args.sparse else pa.list_(pa.uint16())
    first = pa.table({"input_ids": pa.array([[0] * 4], kind)})
    datasets.Dataset(first).save_to_disk(folder)
    schema = pa.schema([("input_ids", kind)])
    (file,) = folder.glob("*.arrow")
    with open(file, "wb") as opened:
        with pa.ipc.new_stream(SparseFile(opened), schema) as writer:
            for size in sizes:
                column = some_documents(size, args, rng)
                writer.write_table(pa.table([column], schema=schema), max_chunksize=1000)
        opened.truncate()  # The end may be a hole, too.


def write_megatron(folder: Path, rows: int, pieces: Iterator[pa.ListArray]) -> None:
    """The header of the .idx is as in megatron/core/datasets/indexed_dataset.py."""
    folder.mkdir()
    lengths = []
    with open(folder / "tokens.bin", "wb") as opened:
        for piece in pieces:
            piece.values.to_numpy().tofile(opened)
            lengths.append(piece.value_lengths().to_numpy())
    lengths = np.concatenate(lengths)
    with open(folder / "tokens.idx", "wb") as opened:
        opened.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, rows, rows + 1))
        lengths.astype(np.int32).tofile(opened)
        ((np.cumsum(lengths, dtype=np.int64) - lengths) * 2).tofile(opened)
        np.arange(rows + 1).tofile(opened)


def some_documents(count: int, args: argparse.Namespace, rng: np.random.Generator) -> pa.Array:
    if args.sparse:
        return pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4 * count, np.uint16)), 4)
    offsets = np.cumsum(np.append(0, rng.integers(1, args.longest + 1, count)), dtype=np.int32)
    values = pa.array(rng.integers(0, VOCABULARY, offsets[-1], dtype=np.uint16))
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def data_of(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    source = {"files": [str(folder / "tokens.bin")]} if args.megatron else {"path": str(folder)}
    packing = {"packing": args.packing, "sequence_length": args.longest}
    return source | packing | {"format": "tokens", "eval_fraction": args.eval_fraction}


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


def measure(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Start as train.py does, at a step args.measure epochs into the stream, and then read rows from anywhere."""
    import torch  # Not by the parent: what the libraries hold is to be in `before`.

    import train
    from samerun.config import Data
    from samerun.data.batches import collate, load_step
    from samerun.data.load import load_data
    from samerun.plan import Stage

    config = Data(**data_of(folder, args))
    with PeakMemory() as memory:
        before, begin, busy = memory.now(), time.perf_counter(), time.process_time()
        data, _ = load_data(config, None, SEED)
        data.fingerprint()
        stage = Stage(1, 0, train.plan_batch(GLOBAL_BATCH, GLOBAL_BATCH, 1, args.longest))
        step = max(1, int(args.measure * len(data)) // GLOBAL_BATCH)
        load_step(step, data, stage, 0, True, torch.device("cpu"), collate)
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


def measure_launch(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """One whole launch of train.py that trains for a step."""
    import train

    config = {
        "run": {"max_steps": 1, "trackers": []},
        "batch": {"global_batch_size": GLOBAL_BATCH, "max_micro_batch_size": GLOBAL_BATCH},
        "data": data_of(folder, args),
        "eval": {"max_rows": GLOBAL_BATCH},
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


def measure_hashes() -> None:
    """The processor time of hash_documents() for documents of several lengths, and that of the comparison."""
    from samerun.data.overlap import are_among, hash_documents

    rng, count = np.random.default_rng(SEED), 10_000_000
    for length, measured in (4, 1_000_000), (500, 100_000), (4000, 20_000):
        offsets = np.arange(measured + 1) * length
        ids = pa.array(rng.integers(0, 50_000, offsets[-1], dtype=np.uint16))
        table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), ids)})
        documents = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="hashes")
        busy = time.process_time()
        hash_documents(documents)
        seconds = (time.process_time() - busy) / measured * count
        print(f"hashes of {count:,} documents of {length:,} tokens: {seconds:.1f} s, from {measured:,} of them")
    hashes = rng.integers(-(2**63), 2**63, count, dtype=np.int64)
    busy = time.process_time()
    are_among(hashes, [hashes[:100_000].copy()])
    print(f"{count:,} hashes against 100,000: {time.process_time() - busy:.1f} s")


def start(folder: Path, args: argparse.Namespace, where: float | None) -> dict[str, float]:
    """What measure() finds in a process of its own, or measure_launch() if `where` is None."""
    command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--measure", json.dumps(where)]
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder.parent / "cache")}  # The index goes there.
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def compare(folder: Path, args: argparse.Namespace) -> int:
    """Measure all starts, print them, and return the exit status."""
    few, many = folder / "few", folder / "many"
    for part, rows in ((few, min(FEW, args.rows)), (many, args.rows)):
        if not part.exists():
            write_documents(part, rows, args)
    starts = {
        "few, first": start(few, args, 0),
        "few": start(few, args, 0),
        "many, first": start(many, args, 0),
        "many": start(many, args, 0),
        "many, middle": start(many, args, 1.5),
        "many, late": start(many, args, 99.99),
        "few, train.py": start(few, args, None),
        "many, train.py": start(many, args, None),
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
    parser.add_argument("--megatron", action="store_true", help="files as Megatron writes them")
    parser.add_argument("--longest", type=int, default=7, help="the most tokens of a document")
    parser.add_argument("--eval_fraction", type=float, default=0.0, help="data.eval_fraction")
    parser.add_argument("--folder", type=Path, help="kept afterwards; by default a temporary one")
    parser.add_argument("--shuffle", action="store_true", help="measure only the order of the rows")
    parser.add_argument("--hashes", action="store_true", help="measure only the comparison with what is held out")
    parser.add_argument("--measure", type=json.loads, default=False, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shuffle:
        measure_shuffle()
        return 0
    if args.hashes:
        measure_hashes()
        return 0
    if args.measure is not False:
        if args.measure is None:
            found = measure_launch(args.folder, args)
        else:
            found = measure(args.folder, args)
        print(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        return compare((args.folder or Path(temporary)).resolve(), args)


if __name__ == "__main__":
    sys.exit(main())
