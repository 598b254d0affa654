"""data.sources: exact shares in each block of the stream, each source as if alone, and the run that of a plain loop."""

import json
import math
import re
import shutil
from itertools import accumulate

import numpy as np
import pytest
import torch
import transformers
from helpers import (
    ROOT,
    Done,
    difference,
    launch,
    loss_of_run,
    make_rows,
    resume_from,
    run,
    tiny_config,
    training_rows,
    write_rows,
)
from reference import shuffled, summed_loss, train_reference
from test_models import HostReads

import train
from samerun.cli import help_text, load_config
from samerun.config import Data, rows_per_block
from samerun.data.load import load_data
from samerun.data.rows import Dataset, check_token_ids
from samerun.errors import UserError
from samerun.run.checkpoint import Progress
from samerun.run.logs import SourceMetrics

SIZES = {"web": 9, "code": 23, "math": 4}
WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}
COUNTS = {"web": 5, "code": 3, "math": 2}


def mixed(seed: int, count: int, counts: dict[str, int], sizes: dict[str, int], later=()) -> list[tuple[str, int]]:
    """The first rows of the stream as (source, row of the source), in plain integers, from the documentation.

    `later` has (position, counts) of each stage of data.stages.
    """
    sources = []
    for number, (begin, times) in enumerate([(0, counts), *later]):
        slots = [name for name in times for _ in range(times[name])]
        order = shuffled((seed + 1 + number) % 2**32, len(slots), count)
        sources = sources[:begin] + [slots[slot] for slot in order]
    own = {name: iter(shuffled(seed, size, count)) for name, size in sizes.items()}
    return [(source, next(own[source])) for source in sources[:count]]


@pytest.fixture
def folder(tmp_path):
    """Rows of each source; the first token tells the source, the second the row."""
    for number, (name, size) in enumerate(SIZES.items()):
        rows = [{"input_ids": [number, row, *range(row % 5)]} for row in range(size)]
        write_rows(tmp_path / name, rows)
    return tmp_path


def config_of(folder, names=tuple(SIZES), **settings) -> Data:
    sources = {name: {"path": str(folder / name), "weight": WEIGHTS[name]} for name in names}
    return Data(sources=sources, format="tokens", packing="none", sequence_length=8, **settings)


def rows_read(data, start: int, count: int) -> list[tuple[str, int]]:
    rows = [data.read(row)[0, :2].tolist() for row in data.rows_at(start, count)]
    return [(list(SIZES)[source], row) for source, row in rows]


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_the_stream(folder, seed):
    """From any position on; in each block the exact shares; and each source goes on as if it were alone."""
    data = training_rows(config_of(folder), seed=seed)
    stream = rows_read(data, 0, 400)
    assert stream == mixed(seed, 400, COUNTS, SIZES)
    for start, count in (0, 1), (9, 1), (9, 2), (10, 10), (13, 57), (395, 5):
        assert rows_read(data, start, count) == stream[start : start + count]
    for begin in range(0, 400, 10):
        block = [source for source, _ in stream[begin : begin + 10]]
        assert {name: block.count(name) for name in SIZES} == COUNTS
    orders = {tuple(source for source, _ in stream[begin : begin + 10]) for begin in range(0, 400, 10)}
    assert len(orders) > 30
    for name, size in SIZES.items():
        assert [row for source, row in stream if source == name][:100] == shuffled(seed, size, 400)[
            : 40 * COUNTS[name]
        ][:100]
    read = [row[0, :2].tolist() for row in data.read_rows(data.rows_at(0, 400))]  # One source after the other.
    assert read == sorted(([list(SIZES).index(source), row] for source, row in stream), key=lambda it: it[0])
    lengths, targets = data.sizes(data.rows_at(0, 400))
    assert lengths.tolist() == [2 + row % 5 for _, row in stream] and (targets == lengths - 1).all()
    far = 10**9 + 3
    assert rows_read(data, far, 5) == rows_read(data, far - 3, 8)[3:]


@pytest.mark.parametrize("seed", [0, 2**32 - 2])
def test_the_stream_of_stages(folder, seed):
    """From any position on, also across the places where the weights change, in the middle of a block or not."""
    data = training_rows(config_of(folder), seed=seed)
    later = (37, {"web": 1, "code": 0, "math": 3}), (40, {"web": 0, "code": 1, "math": 0}), (60, COUNTS)
    for position, counts in later:
        data.begin_stage(position, list(counts.values()))
    expected = mixed(seed, 400, COUNTS, SIZES, later)
    assert rows_read(data, 0, 400) == expected
    for start, count in (0, 37), (36, 1), (36, 2), (37, 1), (39, 1), (39, 2), (30, 40), (38, 3), (61, 7), (395, 5):
        assert rows_read(data, start, count) == expected[start : start + count]
    for position in 0, 5, 37, 39, 40, 41, 60, 73, 399:
        of_sources = [source for source, _ in expected[:position]]
        assert data.count_before(position) == {name: of_sources.count(name) for name in SIZES}
    assert data.rows_at(50, 0).tolist() == []


def test_what_the_sources_count_together(tmp_path):
    """The tokens of data.sources are those of as many rows in the ratio of their weights, not of the rows there are: 1
    row of 2 tokens, which see 4, for each row of 6, which see 36. An idle rank has no rows of any source."""
    for name, rows, length in ("web", 3, 2), ("math", 9, 6):
        write_rows(tmp_path / name, [{"input_ids": [*range(length)]}] * rows)
    sources = {name: {"path": str(tmp_path / name), "weight": 0.5} for name in ("web", "math")}
    data = training_rows(Data(sources=sources, format="tokens", packing="none", sequence_length=8))
    assert len(data) == 12 and data.tokens == pytest.approx(12 * (2 + 6) / 2)
    assert data.attention_length() == pytest.approx((4 + 36) / (2 + 6))
    assert data.source_ends(np.empty(0, np.int64), joined=False) == {"web": 0, "math": 0}


def test_what_is_noted_of_a_source_has_its_name(tmp_path):
    """In data.sources may be many."""
    for name, first in ("web", [5, 6]), ("math", [-100, -100]):
        write_rows(tmp_path / name, [{"input_ids": [5, 6], "labels": labels} for labels in (first, [5, 6])])
    data = training_rows(config_of(tmp_path, ("web", "math")))
    assert data.index["notes"] == ["math: rows without a target token, from which nothing is learned: 1 of 2."]


def test_a_source_does_not_notice_the_others(folder):
    some = training_rows(config_of(folder, ["web", "math"]), seed=3)
    all = training_rows(config_of(folder), seed=3)
    for name in "web", "math":
        one, other = ([row for source, row in rows_read(data, 0, 70) if source == name] for data in (some, all))
        shared = min(len(one), len(other))
        assert shared >= 14 and one[:shared] == other[:shared]


def test_a_single_source_is_the_short_form(folder):
    mixture = training_rows(config_of(folder, ["code"]), seed=5)
    alone = Data(path=str(folder / "code"), format="tokens", packing="none", sequence_length=8)
    alone = training_rows(alone, seed=5)
    assert isinstance(alone, Dataset)
    assert mixture.rows_at(17, 300).tolist() == alone.rows_at(17, 300).tolist()
    assert all((mixture.read(row) == alone.read(row)).all() for row in range(23))


@pytest.mark.parametrize(
    "weights, counts",
    [
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([3, 1], [3, 1]),
        ([30, 10], [3, 1]),
        ([0.5, 0.5], [1, 1]),
        ([1e-3, 0.999], [1, 999]),
        ([2.5], [1]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([0.0, 0.5, 1.5], [0, 1, 3]),
        ([0.33333, 0.66666, 0.00001], None),
        ([1e-5, 1], None),
    ],
)
def test_rows_per_block(weights, counts):
    weights = {f"s{at}": weight for at, weight in enumerate(weights)}
    if counts:
        assert rows_per_block("data.sources", weights) == counts
    else:
        with pytest.raises(UserError, match="data.sources: the weights .* 10,000 are the most; round them"):
            rows_per_block("data.sources", weights)


def test_a_share_of_each_source_is_held_out(folder):
    kept, evaluations = load_data(config_of(folder, eval_fraction=0.25), None, 0)
    held_out = evaluations[""]
    assert {name: len(data) for name, data in held_out.sources.items()} == {"web": 3, "code": 6, "math": 1}
    parts = [{tuple(data.read(row)[0, :2]) for row in range(len(data))} for data in (kept, held_out)]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == {(source, row) for source, size in enumerate(SIZES.values()) for row in range(size)}


def test_formats_and_columns_of_their_own(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 4)
    (tmp_path / "b.jsonl").write_text('{"prompt": "p", "body": "xy"}\n' * 4)
    sources = {
        "a": {"files": str(tmp_path / "a.jsonl"), "weight": 1},
        "b": {"files": str(tmp_path / "b.jsonl"), "weight": 1, "column": "body"},
    }
    data = Data(sources=sources, packing="none", sequence_length=8)
    data = training_rows(data, transformers.ByT5Tokenizer())
    texts = [bytes(token - 3 for token in data.read(row)[0, :-1].tolist()).decode() for row in data.rows_at(0, 8)]
    assert sorted(texts) == ["abc"] * 4 + ["xy"] * 4


def mixed_config(folder) -> tuple[dict, dict[str, list]]:
    config = tiny_config(folder)
    rows = {}
    for number, (name, size) in enumerate(SIZES.items()):
        lengths = np.random.default_rng(number).integers(2, 25, size).tolist()
        rows[name] = make_rows(lengths, seed=number, masked=0.3 if name == "code" else 0.0)
        write_rows(folder / name, rows[name])
    sources = {name: {"path": str(folder / name), "weight": WEIGHTS[name]} for name in SIZES}
    config["data"] |= {"path": None, "sources": sources, "eval_source": None}
    config["run"] |= {"max_steps": 12, "save_every": 5, "keep_checkpoints": 9}
    return config, rows


LOG_EVERY = 4  # So that the checkpoint of step 5 is between two log lines.


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """A config; the plain loop's run; and the expected metrics of each source at each log line."""
    folder = tmp_path_factory.mktemp("truth")
    config, rows = mixed_config(folder)
    config["run"]["log_every"] = LOG_EVERY
    stream = mixed(config["run"]["seed"], 120, COUNTS, SIZES)
    sums = []  # Of each step and source, the summed loss and the number of targets.

    def summed(model, _):
        step = stream[10 * len(sums) : 10 * len(sums) + 10]
        with torch.no_grad():
            parts = [summed_loss(model, [rows[name][row] for name, row in step if name == one]) for one in SIZES]
        sums.append([(loss.item(), targets) for loss, targets in parts])
        return summed_loss(model, [rows[name][row] for name, row in step])

    did = train_reference(config, lambda step: [], summed_loss=summed)
    windows = np.array(sums).reshape(-1, LOG_EVERY, len(SIZES), 2).sum(1)
    expected = {}
    for number, name in enumerate(SIZES):
        expected[f"train/loss/{name}"] = windows[:, number, 0] / windows[:, number, 1]
        expected[f"train/token_share/{name}"] = windows[:, number, 1] / windows[:, :, 1].sum(1)
    return config, did, expected


def check_sources(done: Done, expected: dict[str, np.ndarray]) -> None:
    for key, values in expected.items():
        assert done.logged(key) == pytest.approx(values[-len(done.logged(key)) :], rel=1e-6), key
        assert done.logged(key)


def test_the_run_is_that_of_a_plain_loop(truth, tmp_path):
    """On one process, and on three; then from step 5 of these on one. So are the losses and shares of the sources."""
    config, did, expected = truth
    done = run(tmp_path, config, "--batch.max_micro_batch_size", 3, "--run.log_every", 1)
    did.check(done)
    assert done.logged("train/target_tokens") == list(accumulate(did.targets))
    assert done.logged("train/epoch")[-1] == pytest.approx(120 / 36)  # Rows, of all that there are.
    # 120 rows: 60 of the 9, 36 of the 23, 24 of the 4.
    for line in ("web: 9 rows, seen 6.67 times", "code: 23 rows, seen 1.57 times", "math: 4 rows, seen 6.00 times"):
        assert f"Source {line} in the run" in done.output
    split = launch(tmp_path, config, "--run.output_dir", tmp_path / "split", processes=3, warm=True)
    chosen = "--run.resume", split.folder / "checkpoints" / "step-00000005"
    resumed = run(tmp_path, config, *chosen, "--run.output_dir", tmp_path / "resumed")
    assert (split.launches, resumed.launches) == ([0], [5])
    for other in split, resumed:
        assert difference(other.weights, done.weights) < 1e-5
        assert other.losses == pytest.approx(done.losses[LOG_EVERY - 1 :: LOG_EVERY][-len(other.losses) :], rel=1e-6)
        check_sources(other, expected)


STAGES = [
    {"from_step": 4, "weights": {"web": 0, "code": 0.5, "math": 0.5}},
    {"from_step": 9, "weights": {"math": 3, "web": 2, "code": 1}},
]


def test_weights_that_change_with_the_step(truth, tmp_path):
    """A plain loop over the rows of the stages, of growing batches: 2 x 5 rows, then 10. So is the run of two
    processes, that of one, and that of one which goes on after step 5 with stages that were unknown until then."""
    config, _, _ = truth
    _, rows = mixed_config(tmp_path / "rows")
    order = {name: COUNTS[name] for name in sorted(COUNTS)}  # write_config() sorts the sources.
    later = (20, {"code": 1, "math": 1, "web": 0}), (70, {"code": 1, "math": 3, "web": 2})
    stream = mixed(config["run"]["seed"], 110, order, SIZES, later)
    begins = [0, 5, *range(10, 120, 10)]

    def rows_of(step: int) -> list[dict]:
        return [rows[name][row] for name, row in stream[begins[step - 1] : begins[step]]]

    did = train_reference(config, rows_of)
    warmup = "--batch.warmup", json.dumps([{"steps": 2, "rows": 5}])
    stages = "--data.stages", json.dumps(STAGES)
    done = launch(tmp_path, config, *warmup, *stages, "--run.log_every", 1, processes=2, warm=True)
    did.check(done)
    seen = {name: sum(name == source for source, _ in stream) for name in SIZES}
    for name, size in SIZES.items():
        assert f"Source {name}: {size} rows, seen {seen[name] / size:.2f} times in the run" in done.output
    assert [line["train/token_share/web"] for line in done.metrics if "train/token_share/web" in line][3:8] == [0] * 5

    known = "--data.stages", json.dumps(STAGES[:1])
    half = "--run.output_dir", tmp_path / "half"
    run(tmp_path, config, *half, *warmup, *known, "--run.max_steps", 5)
    changed = run(tmp_path, config, *half, *warmup, *stages, expect=2)
    assert "data.stages: " in changed.output and "--run.allow_changes '[data.stages]'" in changed.output
    resumed = run(tmp_path, config, *half, *warmup, *stages, "--run.allow_changes", "[data.stages]")
    assert difference(resumed.weights, done.weights) < 1e-5
    assert "repeats rows" not in resumed.output


AS_GPU = ROOT / "tests" / "wrapper_cpu_as_gpu.py", ROOT / "train.py"
FSDP2 = {"launcher": "fsdp2", "options": ("--mixed_precision", "no"), "script": AS_GPU}
CHUNKED = "--model.chunked_loss", "true"
WAYS = {  # Settings, processes, and how they are launched.
    "padded": (("--model.attention", "eager"), 1, {}),
    "padded, more ranks than rows": (("--model.attention", "eager", "--batch.max_micro_batch_size", 1), 3, {}),
    "FSDP2": ((), 2, FSDP2),
    "2 share": (CHUNKED, 2, {"env": {"PARALLELISM_CONFIG_SP_SIZE": "2"}}),
    "pipeline": (("--model.pipeline_ranks", 2, *CHUNKED), 2, {}),
    "2 share matrices": ((), 2, {"env": {"PARALLELISM_CONFIG_TP_SIZE": "2"}}),
    "2 x 2 share": ((), 4, {"env": {"PARALLELISM_CONFIG_SP_SIZE": "2"}}),
    "2 share keys": (CHUNKED, 2, {"env": {"PARALLELISM_CONFIG_CP_SIZE": "2"}}),
    "2 x 2 share keys": ((), 4, {"env": {"PARALLELISM_CONFIG_CP_SIZE": "2"}}),
}
FAST = ("padded",)


@pytest.mark.parametrize("way", [way if way in FAST else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_losses_and_shares_of_the_sources(truth, tmp_path, way):
    """However the tokens of a step are divided."""
    config, did, expected = truth
    settings, processes, how = WAYS[way]
    settings = "--batch.max_micro_batch_size", 4, *settings
    if processes == 1:
        done = run(tmp_path, config, *settings)
    else:
        done = launch(tmp_path, config, *settings, processes=processes, warm=True, **how)
    assert difference(done.weights, did.weights) < 1e-5
    check_sources(done, expected)


@pytest.mark.parametrize("chunk", [7, 64])
def test_losses_of_the_sources_in_chunks(truth, tmp_path, monkeypatch, chunk):
    """Chunks end inside of sources, and sources inside of chunks."""
    config, _, expected = truth
    monkeypatch.setattr("samerun.model.loss.chunk_size", lambda *_: chunk)
    check_sources(run(tmp_path, config, *CHUNKED, "--batch.max_micro_batch_size", 4), expected)


def test_the_losses_of_the_sources_are_those_of_the_run(truth, tmp_path):
    """Weighted by the shares they are the loss. A source that a step does not have has none there, and no share."""
    config, *_ = truth
    done = run(tmp_path, config, "--batch.global_batch_size", 2, "--run.log_every", 1)
    as_written = {name: COUNTS[name] for name in sorted(COUNTS)}  # write_config() sorts the sources.
    stream, empty = mixed(config["run"]["seed"], 24, as_written, SIZES), 0
    for line, step in zip((line for line in done.metrics if "train/loss" in line), range(12)):
        names = {name for name, _ in stream[2 * step : 2 * step + 2]}
        losses = {name: line[f"train/loss/{name}"] for name in SIZES}
        shares = {name: line[f"train/token_share/{name}"] for name in SIZES}
        known = {name for name, share in shares.items() if share}
        assert known <= names and {name for name, loss in losses.items() if loss is not None} == known
        assert sum(shares.values()) == pytest.approx(1)
        assert sum(losses[name] * shares[name] for name in known) == pytest.approx(line["train/loss"], rel=1e-6)
        empty += len(SIZES) - len(known)
    assert empty >= 12


@pytest.mark.parametrize("chunked", [False, True])
def test_no_host_reads_between_log_lines(truth, tmp_path, monkeypatch, chunked):
    """Ten more steps read no more. A log line reads a value for each source, besides those of any run."""
    config, *_ = truth
    counts, loop = [], train.training_loop

    def counted(*args):
        with monkeypatch.context() as patch, HostReads(patch) as reads:
            loop(*args)
        counts.append(reads.count)

    monkeypatch.setattr(train, "training_loop", counted)
    more = "--run.log_every", 100, "--run.save_every", 0, "--model.chunked_loss", str(chunked).lower()
    for steps in (5, 15):
        run(tmp_path, config, *more, "--run.max_steps", steps, "--run.output_dir", tmp_path / f"{steps}")
    _, logged = loss_of_run().keywords["token_loss"](torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))
    of_sources = sum(value.ndim for value in logged.values())  # Terms, one for each token.
    assert counts[0] == counts[1] >= len(logged) + 3 + of_sources * len(SIZES)


def test_packed_sources(tmp_path):
    """Each source fills rows of its own. A token that is repeated has the same loss wherever it is."""
    config = tiny_config(tmp_path)
    for name, token in ("some", 5), ("other", 9):
        write_rows(tmp_path / name, [{"input_ids": [token] * length} for length in (30, 7, 11, 40, 8)])
    sources = {name: {"path": str(tmp_path / name), "weight": 1} for name in ("some", "other")}
    config["data"] |= {"path": None, "sources": sources, "eval_source": None, "packing": "concat", "sequence_length": 8}
    config["batch"] = {"global_batch_size": 4, "max_micro_batch_size": 2}
    config["optim"]["warmup_steps"] = 1
    done = run(tmp_path, config, "--run.max_steps", 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    with torch.no_grad():
        for name, token in ("some", 5), ("other", 9):
            loss, _ = summed_loss(model, [{"input_ids": [token, token]}])
            assert done.logged(f"train/loss/{name}") == pytest.approx([loss.item()], rel=1e-6)


FORKED_LOSS = """
def token_loss(logits, targets, **settings):
    loss, _ = whole_loss(logits, targets, **settings)
    return loss, {"loss": loss, "accuracy": logits.argmax(-1) == targets, "tokens_in_loss": (targets != -100).sum()}
"""


def test_sums_of_a_fork_have_no_sources_and_terms_have(truth, tmp_path, monkeypatch):
    config, did, expected = truth
    names = {"whole_loss": train.token_loss}
    exec(FORKED_LOSS, names)
    monkeypatch.setattr(train, "token_loss", names["token_loss"])
    done = run(tmp_path, config)
    assert difference(done.weights, did.weights) < 1e-5
    check_sources(done, {key: values for key, values in expected.items() if "token_share" in key})
    assert not [
        key for line in done.metrics for key in line if key.startswith(("train/loss/", "train/tokens_in_loss/"))
    ]
    assert done.logged("train/tokens_in_loss") == [1.0] * 3
    assert all(0 <= hits <= 1 for name in SIZES for hits in done.logged(f"train/accuracy/{name}"))


def test_terms_of_some_tokens_only_are_refused(truth, tmp_path, monkeypatch):
    """They would count for other sources than those of their tokens."""
    config, *_ = truth
    loss_of = train.token_loss

    def token_loss(logits, targets, **settings):
        loss, metrics = loss_of(logits, targets, **settings)
        return loss, {**metrics, "hits": (logits.argmax(-1) == targets)[targets != -100]}

    monkeypatch.setattr(train, "token_loss", token_loss)
    done = run(tmp_path, config, expect=2)
    assert re.search(r"error: token_loss: the metric hits has \d+ values for \d+ tokens; return one per", done.output)


def test_other_weights_are_another_run(tmp_path):
    config, _ = mixed_config(tmp_path)
    run(tmp_path, config, "--run.max_steps", 5)
    done = run(tmp_path, config, "--data.sources.web.weight", 0.6, "--run.max_steps", 6, expect=2)
    assert "data.sources.web.weight: 0.5 in the checkpoint, 0.6 now" in done.output


def test_a_run_with_other_weights_says_where_its_sources_go_on(tmp_path):
    """Of 60 rows, 18 are of code, 12 of math and 30 of web. By the new weights 30, 10 and 20 would be."""
    config, _ = mixed_config(tmp_path)
    run(tmp_path, config, "--run.max_steps", 6)
    weights = "--data.sources.web.weight", 0.2, "--data.sources.math.weight", 0.1
    allowed = *weights, "--run.allow_changes", "[data.sources]"
    done = run(tmp_path, config, *allowed, "--run.max_steps", 8)
    moves = "code after about 30 rows, not 18; math after about 10 rows, not 12; web after about 20 rows, not 30."
    assert f"leaves out or repeats rows: {moves}" in done.output
    assert "add the new ones to data.stages, from_step 7 or later." in done.output
    assert "repeats rows" not in run(tmp_path, config, *allowed, "--run.max_steps", 9).output


def test_a_source_that_comes_later_is_allowed_by_its_name(tmp_path):
    """One word for all of its settings, beside those that are allowed already. Then it begins with its first row."""
    config, _ = mixed_config(tmp_path)
    config["run"]["max_steps"] = 8
    whole = {name: config["data"]["sources"][name] for name in sorted(SIZES)}  # As write_config() sorts them.
    stages = "--data.stages", json.dumps([{"from_step": 6, "weights": dict.fromkeys(whole, 1)}])
    later = "--data.sources", json.dumps(whole | {"math": whole["math"] | {"weight": 0}}), *stages
    planned = run(tmp_path, config, *later, "--run.output_dir", tmp_path / "planned")
    config["data"]["sources"] = {name: whole[name] for name in ("code", "web")}
    before = run(tmp_path, config)
    allowed = *resume_from(before, 5), "--run.output_dir", tmp_path / "later", "--run.allow_changes"
    refused = run(tmp_path, config, *later, *allowed, "[data.stages]", expect=2)
    words = "[data.stages, data.sources.math, data fingerprint]"
    advice = "Begin a new run, perhaps with its weights by run.init_from, or continue with these changes: "
    assert f"{advice}--run.allow_changes '{words}'" in refused.output
    assert "Sources with other rows" not in refused.output
    done = run(tmp_path, config, *later, *allowed, words)
    assert difference(done.weights, planned.weights) == 0
    assert "Earlier steps had" not in done.output  # No source that was there has other rows.


def test_a_source_that_is_gone_leaves_the_others_their_rows(tmp_path):
    config, _ = mixed_config(tmp_path)
    run(tmp_path, config, "--run.max_steps", 5)
    del config["data"]["sources"]["math"]
    done = run(tmp_path, config, "--run.max_steps", 6, "--run.allow_changes", "[data.sources.math, data fingerprint]")
    assert "Earlier steps had other weights" in done.output and "Earlier steps had other rows" not in done.output


def test_the_source_with_other_rows_is_named(tmp_path):
    config, _ = mixed_config(tmp_path)
    run(tmp_path, config, "--run.max_steps", 5)
    shutil.rmtree(tmp_path / "math")
    write_rows(tmp_path / "math", make_rows([9] * SIZES["math"], seed=7))
    refused = run(tmp_path, config, "--run.max_steps", 6, "--optim.adam_eps", 0.1, expect=2)
    assert re.search(
        r"data fingerprint: \d+ in the checkpoint, \d+ now\. Sources with other rows: math\n", refused.output
    )
    assert refused.output.count("Sources with other rows") == 1
    done = run(tmp_path, config, "--run.max_steps", 6, "--run.allow_changes", "[data fingerprint]")
    assert "The run goes on 50 rows after the beginning of the new ones" in done.output


def test_sources_in_another_order_are_another_order_of_rows(tmp_path):
    config, _ = mixed_config(tmp_path)
    sources = config["data"]["sources"]
    forwards, backwards = (json.dumps({name: sources[name] for name in names}) for names in (SIZES, [*SIZES][::-1]))
    run(tmp_path, config, "--data.sources", forwards, "--run.max_steps", 5)
    more = "--data.sources", backwards, "--run.max_steps", 6
    assert "--run.allow_changes '[data fingerprint]'" in run(tmp_path, config, *more, expect=2).output
    done = run(tmp_path, config, *more, "--run.allow_changes", "[data fingerprint]")
    assert "Earlier steps had other rows, or another order. The run goes on 50 rows" in done.output


def test_a_run_with_a_stage_that_has_begun_says_where_its_sources_go_on(tmp_path):
    """Of 50 rows, 15 are of code, 10 of math and 25 of web. With a stage from row 20 on, which has 30 of them in the
    ratio 1 : 1 : 0, they would be 6 + 15, 4 + 15 and 10."""
    config, _ = mixed_config(tmp_path)
    run(tmp_path, config, "--run.max_steps", 5)
    stages = "--data.stages", json.dumps([{"from_step": 3, "weights": {"web": 0, "code": 1, "math": 1}}])
    done = run(tmp_path, config, *stages, "--run.allow_changes", "[data.stages]", "--run.max_steps", 8)
    moves = "code after about 21 rows, not 15; math after about 19 rows, not 10; web after about 10 rows, not 25."
    assert f"leaves out or repeats rows: {moves}" in done.output


def test_a_run_that_becomes_a_mixture_says_that_rows_may_come_again(tmp_path):
    """Its 30 rows were all of web. The mixture of data.sources goes on as if 15 of them had been."""
    config, _ = mixed_config(tmp_path)
    mixture = "--data.path", "null", "--data.sources", json.dumps(config["data"]["sources"])
    config["data"] |= {"path": str(tmp_path / "web"), "sources": None}
    batch = "--batch.global_batch_size", 5  # web has 9 rows.
    run(tmp_path, config, "--run.max_steps", 6, *batch)
    allowed = *mixture, "--run.allow_changes", "[data.path, data.sources, data fingerprint]"
    done = run(tmp_path, config, *batch, *allowed, "--run.max_steps", 8)
    assert "The run goes on 30 rows after the beginning of the new ones" in done.output
    assert "rows may be" not in run(tmp_path, config, *batch, *allowed, "--run.max_steps", 9).output
    seed = "--run.seed", 9, "--run.allow_changes", "[run.seed]"
    assert "The run goes on 45 rows" in run(tmp_path, config, *batch, *mixture, *seed, "--run.max_steps", 10).output
    back = "--run.seed", 9, "--run.max_steps", 11, "--run.allow_changes", "[data.path, data.sources, data fingerprint]"
    assert "The run goes on 50 rows" in run(tmp_path, config, *batch, *back).output


A = {"path": "x", "weight": 1}


@pytest.mark.parametrize(
    "data, words",
    [
        ({"sources": {"a": A}, "path": "x"}, "data: give exactly one of path, files, sources"),
        ({"sources": {}}, "data: give exactly one of path, files, sources"),
        ({"sources": {"a": A | {"weight": 0}}}, "data.sources: all weights are 0"),
        ({"sources": {"a": A | {"weight": -0.5}}}, "data.sources.a.weight: Input should be greater than or equal to 0"),
        ({"path": "x", "stages": [{"from_step": 9, "weights": {"a": 1}}]}, "data.stages: are of data.sources"),
        (
            {"sources": {"a": A, "b": A}, "stages": [{"from_step": 9, "weights": {"a": 1}}]},
            "data.stages.0.weights: are of a; give one for each of a, b; 0 is for no rows",
        ),
        ({"sources": {"a": A}, "stages": [{"from_step": 9, "weights": {}}]}, "data.stages.0.weights: are of no source"),
        ({"sources": {"a": A}, "stages": [{"from_step": 1, "weights": {"a": 1}}]}, "data.stages.0.from_step: Input"),
        (
            {"sources": {"a": A}, "stages": [{"from_step": step, "weights": {"a": 1}} for step in (7, 7)]},
            "data.stages.1.from_step: must be later than 7, where others begin",
        ),
        (
            {"sources": {"a": A}, "stages": [{"from_step": 21, "weights": {"a": 1}}]},
            "data.stages: the last one begins with step 21, and the run has 20",
        ),
        ({"sources": {"a": A}, "stages": [{"from_step": 9, "weights": {"a": 0}}]}, "data.stages.0.weights: all weig"),
        (
            {"sources": {"a": A, "b": A}, "stages": [{"from_step": 9, "weights": {"a": 1e-6, "b": 1}}]},
            "data.stages.0.weights: the weights 1e-06 and 1.0 are whole numbers only in blocks of 1,000,001 rows",
        ),
        ({"sources": {"a": A}, "stages": [{"step": 9}]}, "data.stages.0.step: unknown key; a stage has from_step, wei"),
        ({"sources": {"a": {"path": "x"}}}, "data.sources.a.weight: Field required"),
        ({"sources": {"a": {"weight": 1}}}, "data.sources.a: give exactly one of path, files"),
        ({"sources": {"a": A | {"files": "y"}}}, "data.sources.a: give exactly one of path, files"),
        (
            {"sources": {"a": {"files": "y", "split": "test", "weight": 1}}},
            "data.sources.a.split go with data.sources.a.path",
        ),
        (
            {"sources": {"a": A | {"wieght": 1}}},
            "data.sources.a.wieght: unknown key; did you mean data.sources.a.weight?",
        ),
        ({"sources": {"a": A | {"fils": "y"}}}, "data.sources.a.fils: unknown key; did you mean data.sources.a.files?"),
        ({"sources": {"a": A | {"format": "tokens"}}}, "data.sources.a.format: tokens do not mix with texts"),
        ({"sources": {"a": A}, "split": "test"}, "data.name and data.split go with data.path"),
        ({"sources": {"function-calling": A | {"path": 3}}}, "data.sources.function-calling.path: Input should be"),
        ({"sources": {"int": A | {"path": 3}}}, "data.sources.int.path: Input should be"),
        ({"sources": {"a b": A}}, "data.sources.a b: a name has only letters"),
        ({"source": {"a": A}}, "data.source: unknown key; did you mean data.sources?"),
        ({"sources": {"a": A, "b": A | {"weight": 1e-6}}}, "data.sources: the weights 1.0 and 1e-06"),
        ({"sources": {"a": A}, "eval_fraction": 0.1}, "eval.max_rows: would take held-out rows of the first"),
    ],
)
def test_bad_sources(tmp_path, data, words):
    config = {"run": {"max_steps": 20}, "batch": {"global_batch_size": 1}, "model": {"pretrained": "x"}, "data": data}
    config["eval"] = {"max_rows": 3}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        load_config(["--config", str(tmp_path / "c.yaml")])
    assert words in str(error.value)


@pytest.mark.parametrize("bad", ["web", "math"])
@pytest.mark.parametrize("column", ["input_ids", "labels"])
@pytest.mark.parametrize("token, told", [(-3, "the data has -3 among its {}"), (400, "the data has the token id 400")])
def test_a_token_of_one_source_that_no_vocabulary_has(tmp_path, bad, column, token, told):
    for name in "web", "math":
        rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]} for _ in range(3)]
        if name == bad:
            rows[1][column][1] = token
        write_rows(tmp_path / name, rows)
    data = training_rows(config_of(tmp_path, ("web", "math")))
    with pytest.raises(UserError, match=told.format(column)):
        check_token_ids(data, 384, "the data")


def test_epochs_and_an_empty_source(tmp_path):
    config, _ = mixed_config(tmp_path)
    done = run(tmp_path, config, "--run.max_steps", "null", "--run.max_epochs", 2, expect=2)
    assert "data.sources: each has epochs of its own" in done.output
    stages = "--data.stages", json.dumps(STAGES)
    done = run(tmp_path, config, *stages, "--run.max_steps", "null", "--run.max_tokens", 9000, expect=2)
    assert "data.stages: begin at steps, so give run.max_steps as the length of the run" in done.output
    write_rows(tmp_path / "empty", [{"input_ids": [1]}])
    done = run(tmp_path, config, "--data.sources.web.path", tmp_path / "empty", expect=2)
    assert "error: data.sources.web: data or data.eval_source: there is no target token" in done.output


def test_help_names_the_mapping():
    assert "--data.sources  dict[str, WeightedSource] | None, default null" in help_text(train.__doc__, train.Settings)


def test_metrics_of_many_sources():
    targets = {f"source{number}": number for number in range(2000)}
    metrics = SourceMetrics(Progress())
    for _ in range(5):
        summed = {f"{name}/{source}": torch.tensor(3.0 * count) for name in "ab" for source, count in targets.items()}
        summed["a"] = summed["source1"] = torch.tensor(1.0)
        metrics.take(summed, targets)
        assert list(summed) == ["a", "source1"]
    found = metrics.read()
    assert found["a/source7"] == found["b/source999"] == 3 and math.isnan(found["a/source0"])
    assert found["token_share/source10"] == pytest.approx(10 / 1_999_000) and len(found) == 6000
    assert metrics.read() == {}


def test_sources_without_targets_have_no_share():
    """As in a step whose rows have none."""
    metrics = SourceMetrics(Progress())
    metrics.take({"loss/a": torch.tensor(0.0)}, {"a": 0})
    found = metrics.read()
    assert found["token_share/a"] == 0 and math.isnan(found["loss/a"])
