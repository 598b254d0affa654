"""Does the index of 1e8 rows start quickly, stay small, and find the last step as fast as the first?

    python tests/benchmarks/big_data.py [--rows 100000000] [--packing none|concat] [--folder FOLDER]
    python tests/benchmarks/big_data.py --shuffle

Writes that many documents of 1 to 7 tokens as memory-mapped Arrow in the small record batches that `datasets` writes,
and lets train.py's own functions load them in a process of its own for each of three starts: at step 1, in the middle
of the second epoch, and at the end of the 100th. Prints a table, and ends with exit status 1 if the start-up time or
memory of a late start is more than 1.1 times that at step 1. For steady times, let the machine do nothing else.

What it printed for 1e8 rows on 2 cores with other work on them, so that only the processor's seconds tell something:

| start at step | 1 | 292,968 | 19,529,296 |
| --- | --- | --- | --- |
| start, processor, s | 53.18 | 47.25 | 44.22 |
| memory, peak, GiB | 8.82 | 8.82 | 8.81 |
| bytes per row, peak | 95 | 95 | 95 |
| memory, held, GiB | 3.94 | 3.93 | 3.94 |
| bytes per row, held | 42 | 42 | 42 |

late / first: start, processor 0.888, peak 1.000, held 1.001 (bound 1.1)

With --shuffle it measures only how long it takes to find out which rows come next, for data of several sizes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LENGTH, LONGEST, SEED = 7, 7, 0
GLOBAL_BATCH = 512
MANY = 20  # Steps read one after another, for a rate.
GIB = 2**30


def write_documents(folder: Path, rows: int) -> None:
    """A save_to_disk folder, written in pieces: no Python object per row, and never all of it in memory."""
    datasets.Dataset.from_dict({"input_ids": [np.arange(3, dtype=np.uint16)]}).save_to_disk(folder)
    schema = pa.schema([("input_ids", pa.list_(pa.uint16()))])
    (file,) = folder.glob("*.arrow")
    rng, piece = np.random.default_rng(SEED), 1_000_000
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for start in range(0, rows, piece):
            offsets = np.cumsum(np.append(0, rng.integers(1, LONGEST + 1, min(piece, rows - start))), dtype=np.int32)
            values = pa.array(rng.integers(0, 2**16, offsets[-1], dtype=np.uint16))
            column = pa.ListArray.from_arrays(pa.array(offsets), values)
            writer.write_table(pa.table([column], schema=schema), max_chunksize=1000)


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
    """Start as train.py does, at a step `where` epochs into the stream, then read some more steps."""
    import torch  # Not by the parent: what the libraries hold is to be in `before`.

    import train

    config = train.Data(path=str(folder), format="tokens", packing=packing, sequence_length=LENGTH)
    seconds, clock, busy = {}, time.perf_counter, time.process_time()
    with PeakMemory() as memory:
        before, begin = memory.now(), clock()
        data, _ = train.load_data(config, None, SEED)
        seconds["load_data"] = clock() - begin
        at = clock()
        data.fingerprint()
        seconds["fingerprint"] = clock() - at
        plan = train.plan_batch(GLOBAL_BATCH, GLOBAL_BATCH, 1, LENGTH)
        step = max(1, int(where * len(data)) // GLOBAL_BATCH)
        load = dict(data=data, plan=plan, rank=0, vocab_size=2**16, device=torch.device("cpu"))
        at = clock()
        train.load_step(step, **load)
        seconds["first step"] = clock() - at
        seconds["start"] = clock() - begin
        seconds["start, processor"] = time.process_time() - busy  # Other work on the machine shows less in it.
        held = memory.now() - before
        at = clock()
        for number in range(step, step + MANY):
            train.load_step(number, **load)
        rate = MANY * GLOBAL_BATCH / (clock() - at)
        some = np.random.default_rng(SEED).integers(0, len(data), 2000)
        at = clock()
        for row in some:
            data.read(row)
        read = 2000 / (clock() - at)
    return {
        "rows": len(data),
        "step": step,
        "rows per second": rate,
        "reads per second": read,
        "held": held,
        "peak": memory.peak - before,
    } | seconds


def measure_shuffle() -> None:
    """The median time of train.py's shuffle() for the rows of a step, and for a million positions."""
    import train

    print("rows             1,024 positions, ms    1,000,000 positions, s")
    for count in 10_000, 100_000_000, 1_000_000_000:
        seconds = []
        for size, times in (1024, 200), (1_000_000, 5):
            took = []
            for number in range(times):
                begin = time.perf_counter()
                train.shuffle(np.arange(number * size, (number + 1) * size), count, SEED)
                took.append(time.perf_counter() - begin)
            seconds.append(np.median(took))
        print(f"{count:<13,} {seconds[0] * 1000:22.2f} {seconds[1]:25.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000_000, help="documents")
    parser.add_argument("--packing", choices=("none", "concat"), default="none")
    parser.add_argument("--folder", type=Path, help="kept afterwards; by default a temporary one")
    parser.add_argument("--shuffle", action="store_true", help="measure only the order of the rows")
    parser.add_argument("--measure", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shuffle:
        measure_shuffle()
        return 0
    if args.measure is not None:
        print(json.dumps(measure(args.folder, args.packing, args.measure)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "documents"
        if not folder.exists():
            write_documents(folder, args.rows)
        seen = []
        for where in (0, 0, 1.5, 99.99):  # The first of them only brings the file into the system's cache.
            command = [sys.executable, __file__, "--folder", folder, "--packing", args.packing, "--measure", str(where)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            seen.append(json.loads(done.stdout.splitlines()[-1]))
    _, first, *late = seen
    print(f"{first['rows']:,} rows, packing {args.packing}, {GLOBAL_BATCH} rows per step\n")
    starts = [first, *late]
    table = [("start at step", [f"{one['step']:,}" for one in starts]), ("---", ["---"] * len(starts))]
    for name in ("load_data", "fingerprint", "first step", "start", "start, processor"):
        table.append((f"{name}, s", [f"{one[name]:.2f}" for one in starts]))
    for name in ("peak", "held"):
        table.append((f"memory, {name}, GiB", [f"{one[name] / GIB:.2f}" for one in starts]))
        table.append((f"bytes per row, {name}", [f"{one[name] / one['rows']:.0f}" for one in starts]))
    for name in ("rows per second", "reads per second"):
        table.append((name, [f"{one[name]:,.0f}" for one in starts]))
    print("\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in table))
    ratios = {name: max(one[name] / first[name] for one in late) for name in ("start, processor", "peak", "held")}
    print("\nlate / first: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()) + " (bound 1.1)")
    return int(max(ratios.values()) > 1.1)


if __name__ == "__main__":
    sys.exit(main())
