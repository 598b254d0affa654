"""The batch plan: exact for any global batch, number of processes and memory limit, and printable for any of them.

The expected numbers are arithmetic, done by hand beside each row of the table.
"""

import math
import re
from fractions import Fraction

import datasets
import numpy as np
import pytest
import torch
import transformers
import yaml
from helpers import launch, run
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from samerun.config import Config, Model, Optim, Perf
from samerun.data.batches import padded_tokens
from samerun.errors import UserError
from samerun.plan import Plan, pipeline_bubble
from samerun.preflight.host import memory_per_host
from samerun.preflight.memory import TRACED, memory_per_device
from samerun.preflight.planned_launch import PlannedLaunch
from samerun.preflight.planning import planned_model, say_host_memory, say_memory, what_fits

# rows, processes, limit, tokens per row, group -> data-parallel ranks, rows per micro-batch, micro-steps
TABLE = {
    "one row": ((1, 1, 1, 512, 1), (1, 1, 1)),
    "memory to spare is not filled": ((1, 1, 64, 512, 1), (1, 1, 1)),
    "all rows fit": ((16, 1, 16, 512, 1), (1, 16, 1)),
    "one row too many: two passes of 8, not 15 + 1": ((16, 1, 15, 512, 1), (1, 8, 2)),
    "room for one row": ((16, 1, 1, 512, 1), (1, 1, 16)),
    "odd: 9 + 8": ((17, 1, 16, 512, 1), (1, 9, 2)),
    "prime: 4 + 3 + 3 + 3": ((13, 1, 4, 512, 1), (1, 4, 4)),
    "two ranks": ((16, 2, 8, 512, 1), (2, 8, 1)),
    "a row per rank": ((8, 8, 8, 512, 1), (8, 1, 1)),
    "half a row per rank": ((4, 8, 8, 512, 1), (8, 1, 1)),
    "one row for eight ranks": ((1, 8, 2, 512, 1), (8, 1, 1)),
    "a row more than ranks": ((9, 8, 8, 512, 1), (8, 2, 1)),
    "a row more than ranks, room for one": ((9, 8, 1, 512, 1), (8, 1, 2)),
    "MuseV: 224 / 16 = 14 = 2 x 7": ((224, 16, 8, 512, 1), (16, 7, 2)),
    "MuseV with room for exactly 7": ((224, 16, 7, 512, 1), (16, 7, 2)),
    "MuseV with room for 6: 5 + 5 + 4": ((224, 16, 6, 512, 1), (16, 5, 3)),
    "MuseV on 8: 28 = 4 x 7": ((224, 8, 8, 512, 1), (8, 7, 4)),
    "MuseV on 2: 112 = 14 x 8": ((224, 2, 8, 512, 1), (2, 8, 14)),
    "TorchTitan: 2 rows x 2048 tokens x 4 devices": ((8, 4, 2, 2048, 1), (4, 2, 1)),
    "nanoGPT: 12 rows x 5 micro-steps x 8 devices": ((480, 8, 12, 1024, 1), (8, 12, 5)),
    "nanoGPT on one device: 40 micro-steps": ((480, 1, 12, 1024, 1), (1, 12, 40)),
    "build-nanogpt: 524,288 tokens, 64 rows per device": ((512, 8, 64, 1024, 1), (8, 64, 1)),
    "build-nanogpt on one device with 16 rows": ((512, 1, 16, 1024, 1), (1, 16, 32)),
    "100 on 8: ranks of 13 or 12": ((100, 8, 16, 512, 1), (8, 13, 1)),
    "100 on 8 in two passes of 7 or 6": ((100, 8, 8, 512, 1), (8, 7, 2)),
    "100 on 8 in four passes of 4 or 3": ((100, 8, 4, 512, 1), (8, 4, 4)),
    "100 on 7: ranks of 15 or 14": ((100, 7, 8, 512, 1), (7, 8, 2)),
    "16 on 7: ranks of 3 or 2": ((16, 7, 16, 512, 1), (7, 3, 1)),
    "10 on 3: ranks of 4 or 3": ((10, 3, 2, 512, 1), (3, 2, 2)),
    "12 on 5: ranks of 3 or 2": ((12, 5, 2, 512, 1), (5, 2, 2)),
    "a thousand devices": ((4096, 1024, 4, 8192, 1), (1024, 4, 1)),
    "groups of 2 of 8 processes": ((100, 8, 8, 512, 2), (4, 7, 4)),  # 25 rows per group: four passes of 7 or 6
    "all processes are one group": ((16, 8, 4, 512, 8), (1, 4, 4)),
}


@pytest.mark.parametrize("given, expected", TABLE.values(), ids=TABLE)
def test_known_plans(given, expected):
    rows, processes, limit, length, group = given
    plan = train.plan_batch(rows, limit, processes, length, group)
    assert plan == Plan(processes, expected[0], rows, *expected[1:], rows * length)
    assert plan.tokens_per_step == rows * length


@pytest.mark.parametrize(
    "rows, limit, processes, ranks, expected",
    [
        (64, 8, 8, 4, (2, 8, 4)),  # 32 rows for each of 2 pipelines: 4 passes, as many as a pipeline has ranks.
        (64, 32, 8, 4, (2, 8, 4)),  # Memory would do with one pass; the pipeline needs 4.
        (64, 2, 8, 4, (2, 2, 16)),
        (10, 10, 4, 4, (1, 3, 4)),
    ],
)
def test_a_pipeline_has_as_many_passes_as_ranks(rows, limit, processes, ranks, expected):
    plan = train.plan_batch(rows, limit, processes, 512, ranks_per_row=ranks, least_micro_steps=ranks)
    assert (plan.data_parallel_size, plan.micro_batch_size, plan.grad_accum_steps) == expected


@pytest.mark.parametrize(
    "schedule, passes, share",  # (ranks - 1) / (parts of a rank x passes + ranks - 1), of 4 ranks
    [("1F1B", 4, 3 / 7), ("1F1B", 12, 3 / 15), ("Interleaved1F1B", 4, 3 / 11), ("Interleaved1F1B", 12, 3 / 27)],
)
def test_bubble_of_a_pipeline(schedule, passes, share):
    model = Model(pretrained="any", pipeline_ranks=4, pipeline_schedule=schedule)
    plan = train.plan_batch(passes, 1, 4, 512, ranks_per_row=4, least_micro_steps=4)
    assert pipeline_bubble(model, plan) == pytest.approx(share)


@pytest.mark.parametrize(
    "rows, message",
    [
        (9, "9 passes cannot be interleaved among 4 ranks; choose 1F1B"),
        (3, "model.pipeline_ranks 4: needs at least 4 rows in a step of 4 processes, and has 3"),
    ],
)
def test_plans_that_do_not_suit_a_pipeline(rows, message):
    model = Model(pretrained="any", pipeline_ranks=4, pipeline_schedule="Interleaved1F1B")
    with pytest.raises(UserError, match=message):
        pipeline_bubble(model, train.plan_batch(rows, 1, 4, 512, ranks_per_row=4, least_micro_steps=4))


@pytest.mark.parametrize("name, tokens", [("TorchTitan", 16_384), ("nanoGPT", 491_520), ("build-nanogpt", 524_288)])
def test_tokens_per_step_of_well_known_scripts(name, tokens):
    """Each states its tokens per step; ours has them however many devices share the work."""
    plans = [train.plan_batch(*given) for label, (given, _) in TABLE.items() if label.startswith(name)]
    assert {plan.tokens_per_step for plan in plans} == {tokens}


@pytest.mark.parametrize("sp", [1, 2, 4, 8])
def test_sequence_parallel_trades_ranks_for_accumulation(sp):
    """XTuner: tokens = batch_size x n_gpus x (max_length / sp_size) x accumulative_counts, so doubling sp_size doubles
    accumulative_counts. Here 1 row x 8 devices x 32,768 tokens x 16 = 4,194,304."""
    plan = train.plan_batch(128, 1, 8, 32_768, ranks_per_row=sp)
    assert (plan.data_parallel_size, plan.grad_accum_steps) == (8 // sp, 16 * sp)
    assert 1 * 8 * (32_768 // sp) * plan.grad_accum_steps == plan.tokens_per_step == 4_194_304


@pytest.mark.parametrize("processes, group", [(1, 2), (3, 2), (6, 4), (8, 16)])
def test_processes_that_form_no_groups_are_refused(processes, group):
    with pytest.raises(UserError, match=rf"number of processes, {processes}, must be a multiple of {group}"):
        train.plan_batch(16, 4, processes, 512, group)


def test_ten_rows_on_three_ranks():
    """At most 4 rows per rank and 2 per pass: pieces of 2, 2, 2, 2, 1, 1 rows, the last three dealt in reverse."""
    plan = train.plan_batch(10, 2, 3, 512)
    lengths = np.array([5, 1, 2, 3, 4, 6, 7, 8, 9, 10])
    split = [[piece.tolist() for piece in pieces] for pieces in plan.split(lengths, joined=False)]
    assert split == [[[1, 2], [3, 4], [0, 5]], [[9], [8], [6, 7]]]  # [micro_step][rank]


def test_ten_joined_rows_on_three_ranks():
    """The longest row to the piece with the fewest tokens: 10, 9, 8, 7, 6 and 5 begin one each, 4 goes to 5, 3 to 6,
    2 to 7, and 1 to 8. So four pieces have 9 tokens, that of 9 alone as well, and that of 10 has 10."""
    plan = train.plan_batch(10, 2, 3, 512)
    lengths = np.array([5, 1, 2, 3, 4, 6, 7, 8, 9, 10])
    split = plan.split(lengths, joined=True)
    rows = sorted(sorted(lengths[piece].tolist()) for pieces in split for piece in pieces)
    assert rows == [[1, 8], [2, 7], [3, 6], [4, 5], [9], [10]]
    assert [[lengths[piece].sum() for piece in pieces] for pieces in split] == [[9, 9, 9], [10, 9, 9]]


@settings(max_examples=300, deadline=None, derandomize=True)  # The same examples on every machine.
@given(
    rows=st.integers(1, 2000),
    ranks=st.integers(1, 96),
    limit=st.integers(1, 70),
    group=st.integers(1, 3),
    joined=st.booleans(),
)
def test_micro_batches_partition_the_step(rows, ranks, limit, group, joined):
    """Of rows of one length. Padded rows of any lengths are split by their number alone."""
    plan = train.plan_batch(rows, limit, ranks * group, 512, group)
    lengths = np.full(rows, 512) if joined else np.arange(rows)
    dealt = list(zip(*plan.split(lengths, joined)))  # [rank][micro_step]
    assert plan.data_parallel_size == ranks
    assert sorted(row for pieces in dealt for piece in pieces for row in piece) == list(range(rows))
    assert {len(pieces) for pieces in dealt} == {plan.grad_accum_steps}
    sizes = [len(piece) for pieces in dealt for piece in pieces]
    assert max(sizes) == plan.micro_batch_size <= limit and max(sizes) - min(sizes) <= 1
    totals = [sum(map(len, pieces)) for pieces in dealt]
    assert max(totals) - min(totals) <= 1
    # Memory first: one pass less would not fit on the rank with the most rows.
    assert (plan.grad_accum_steps - 1) * limit < max(totals) <= plan.grad_accum_steps * limit
    # While the ranks with fewer rows wait, ranks * max(totals) rows could have been processed.
    assert plan.idle_share() == pytest.approx(float(1 - Fraction(rows, ranks * max(totals))))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 512), min_size=1, max_size=300), ranks=st.integers(1, 9), limit=st.integers(1, 9)
)
def test_joined_rows_of_any_lengths_partition_the_step(lengths, ranks, limit):
    plan = train.plan_batch(len(lengths), limit, ranks, 512)
    split = plan.split(np.array(lengths), joined=True)
    assert sorted(row for pieces in split for piece in pieces for row in piece) == list(range(len(lengths)))
    assert [len(pieces) for pieces in split] == [ranks] * plan.grad_accum_steps
    assert max(len(piece) for pieces in split for piece in pieces) <= plan.micro_batch_size


def test_ranks_have_the_same_number_of_tokens():
    """Log-normal lengths of sigma 0.8: padded, the ranks would wait a third of the time for the one with the longest
    row, because its micro-batch has that width. A micro-batch is the measure of the memory that is needed, too."""
    plan, rng = train.plan_batch(128, 8, 4, 1024), np.random.default_rng(0)
    waiting, largest = {True: [], False: []}, {True: [], False: []}
    for _ in range(100):
        lengths = np.clip(rng.lognormal(np.log(120), 0.8, 128), 2, 1024).astype(int)
        for joined in (True, False):
            split = plan.split(lengths, joined)
            tokens = np.array([[padded_tokens(lengths[piece], joined) for piece in pieces] for pieces in split])
            waiting[joined].append(1 - tokens.sum() / (4 * tokens.max(1).sum()))
            largest[joined].append(tokens.max() / (lengths.sum() / 16))
    assert np.mean(waiting[True]) < 0.01 and np.mean(waiting[False]) > 0.3
    assert np.mean(largest[True]) < 1.1 and np.mean(largest[False]) > 5  # Of an even share.


def test_sorted_rows_are_dealt_evenly():
    """Of rows as long as their index, every rank gets the same number of tokens: what the first rank has less in one
    micro-step it has more in the next. Dealt in one direction only, the last rank would have 8 x 3 x 16 more."""
    plan = train.plan_batch(256, 8, 4, 512)
    tokens = np.sum(
        [[piece.sum() for piece in pieces] for pieces in plan.split(np.arange(256), joined=False)], axis=0
    ).tolist()
    assert plan.grad_accum_steps == 8 and tokens == [255 * 256 / 2 / 4] * 4


def test_ranks_wait_little_and_pad_little():
    """The micro-batches of one micro-step are neighbours in the sorted order, so ranks that wait for each other have
    like work; and a micro-batch holds rows of like lengths, so it is mostly real tokens."""
    plan, rng = train.plan_batch(128, 8, 4, 4096), np.random.default_rng(0)
    split = plan.split(np.arange(128), joined=False)
    for step, pieces in enumerate(split):
        assert sorted(np.concatenate(pieces)) == list(range(step * 32, step * 32 + 32))
        assert all(np.ptp(piece) == len(piece) - 1 for piece in pieces)

    def real_share(lengths):
        pieces = [lengths[piece] for ranks in split for piece in ranks]
        return lengths.sum() / sum(len(piece) * piece.max() for piece in pieces)

    batches = rng.lognormal(sigma=0.8, size=(200, 128))
    assert np.mean([real_share(np.sort(lengths)) for lengths in batches]) > 0.8
    assert np.mean([real_share(lengths) for lengths in batches]) < 0.45  # What sorting is worth.


# --plan --------------------------------------------------------------------------------------------------------------

# Nothing that this names exists here: neither data, tokenizer, weights, attention kernel nor a device for bfloat16.
ABSENT = {
    "run": {"output_dir": "absent/run", "max_tokens": 10**12, "init_from": "absent/checkpoint"},
    "batch": {"global_batch_size": 16, "max_micro_batch_size": 4},
    "data": {"path": "nobody/no-data", "tokenizer": "nobody/no-tokenizer", "sequence_length": 4096},
    "model": {"pretrained": "nobody/no-model", "attention": "flash_attention_3"},
}


def set_fsdp2(monkeypatch):
    """What `accelerate launch --config_file accelerate_configs/fsdp2.yaml` puts into the environment."""
    values = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    for name, value in (values | {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def plans(tmp_path, capsys, monkeypatch):
    """Runs --plan where nothing can be loaded. Returns the table, a dict per line, and all that was printed."""

    def absent(*args, **kwargs):
        raise OSError("not in the cache")

    def refuse(*args, **kwargs):
        raise AssertionError("--plan must not touch data, weights or a device")

    for owner in transformers.AutoConfig, transformers.AutoTokenizer:
        monkeypatch.setattr(owner, "from_pretrained", absent)
    for owner, name in (datasets, "load_dataset"), (torch.nn.Module, "__init__"), (torch.cuda, "_lazy_init"):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr("samerun.run.launch.Accelerator", refuse)
    monkeypatch.chdir(tmp_path)

    def plans(*counts, status=0, **changes):
        config = {section: ABSENT.get(section, {}) | changes.get(section, {}) for section in ABSENT | changes}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        assert train.main(["--config", "config.yaml", "--plan", *map(str, counts)]) == status
        assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]  # Not even an empty run folder.
        printed = capsys.readouterr()
        head, *lines = [line.split() for line in printed.out.splitlines()] or [[]]
        lines = [line for line in lines if line[0][0].isdigit()]  # And not the warnings below the table.
        lines = [head, *([*line[: len(head) - 1], " ".join(line[len(head) - 1 :])] for line in lines)]
        table = [dict(zip(lines[0], line)) for line in lines[1:] if len(line) == len(lines[0])] if lines else []
        return table, printed.out + printed.err

    return plans


def test_a_wrong_section_of_fsdp(plans, monkeypatch):
    """As FSDP1 had it."""
    set_fsdp2(monkeypatch)
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "FULL_SHARD")
    _, printed = plans(4, status=2)
    assert "error: launch: the FSDP section of the launcher file cannot be used" in printed


LLAMA_ALONE = {"pretrained": None, "architecture": {"model_type": "llama", "vocab_size": 384}}
FIVE = {"max_tokens": None, "max_steps": 5}
REFUSED_BY_CONFIG = {
    "optim.warmup_steps exceeds the run's 5 steps": {"run": FIVE, "optim": {"warmup_steps": 6}},
    "optim.decay_fraction: optim.schedule constant never decays": {
        "run": FIVE,
        "optim": {"warmup_steps": 0, "schedule": "constant", "decay_fraction": 0.2},
    },
    "optim.min_learning_rate_ratio: the only step would have a learning rate of 0": {
        "run": {"max_tokens": None, "max_steps": 1},
        "optim": {"warmup_steps": 0, "min_learning_rate_ratio": 0},
    },
    "batch.warmup: the global batch begins with step 6, and the run has 5": {
        "run": FIVE,
        "batch": {"warmup": [{"steps": 5, "rows": 2}]},
    },
    "cannot configure {'model_type': 'lama'}": {"model": {"pretrained": None, "architecture": {"model_type": "lama"}}},
    "model.architecture: llama has no setting hiden_size; near are": {
        "model": {"pretrained": None, "architecture": LLAMA_ALONE["architecture"] | {"hiden_size": "64"}}
    },
    "data.sequence_length 4096 exceeds the model's 1024 positions": {
        "model": {"pretrained": None, "architecture": LLAMA_ALONE["architecture"] | {"max_position_embeddings": 1024}}
    },
}


@pytest.mark.parametrize("message", REFUSED_BY_CONFIG)
def test_what_a_launch_refuses_by_the_config_alone_the_plan_refuses(plans, message):
    _, printed = plans(2, status=2, **REFUSED_BY_CONFIG[message])
    assert message in printed


def numbers(line, *columns):
    return tuple(int(line[column].replace(",", "")) for column in columns)


def test_plan_table(plans):
    table, _ = plans(1, 2, 3, 8, 16, 64)
    columns = "processes", "data_parallel", "micro_batch", "grad_accum", "tokens_per_step"
    assert [numbers(line, *columns) for line in table] == [  # 16 rows x 4,096 tokens
        (1, 1, 4, 4, 65_536),
        (2, 2, 4, 2, 65_536),
        (3, 3, 3, 2, 65_536),
        (8, 8, 2, 1, 65_536),
        (16, 16, 1, 1, 65_536),
        (64, 64, 1, 1, 65_536),
    ]
    # On 3, the ranks of 5 rows wait for that of 6: 2 of 18. On 64, 48 of 64 have nothing to do.
    assert [float(line["idle"].rstrip("%")) for line in table] == [0, 0, 11.1, 0, 0, 75]


@pytest.mark.parametrize(
    "rows, processes, sizes, counts",
    [
        (100, 8, {96, 104}, {5, 10}),  # divisors of 100 around 8
        (16, 7, {14, 21}, {4, 8}),
        (3, 8, {8}, {3}),  # Nothing is below 8 rows on 8 ranks but 0, and no more processes than rows are even.
        (13, 4, {12, 16}, {1, 13}),
        (1000, 33, {990, 1023}, {25, 40}),
    ],
)
def test_plan_names_the_nearest_even_alternatives(plans, rows, processes, sizes, counts):
    (line,), _ = plans(processes, batch={"global_batch_size": rows})
    for noun, near in ("rows", sizes), ("processes", counts):
        named = re.search(rf"([\d, or]+) {noun}", line["nearest_even"]).group(1)
        assert {int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", named)} == near


def test_plan_names_no_even_alternative_that_a_pipeline_refuses(plans):
    """14 rows for pipelines of 4 ranks: 2 of them have 7 rows each, and 7 would have 2."""
    batch, model = {"global_batch_size": 14}, {"pipeline_ranks": 4, "attention": "sdpa"}
    (line,), _ = plans(12, batch=batch, model=model)
    assert line["nearest_even"] == "12 or 15 rows, 8 processes"
    assert "needs at least 28 rows" in plans(28, status=2, batch=batch, model=model)[1]


def test_plan_of_even_splits_names_no_alternative(plans):
    table, _ = plans(1, 2, 4, 8, 16)
    assert not any(re.search(r"\d", line["nearest_even"]) for line in table)


@pytest.mark.parametrize("setting", ["sp_size", "tp_size"])
def test_plan_knows_the_groups_of_the_launcher_file(plans, monkeypatch, setting):
    """accelerate passes parallelism on in the environment: 8 processes in groups of 2 are 4 ranks, 6 are 3."""
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{setting.upper()}", "2")
    set_fsdp2(monkeypatch)
    table, _ = plans(8, 6)
    columns = "processes", "data_parallel", "grad_accum"
    assert [numbers(line, *columns) for line in table] == [(8, 4, 1), (6, 3, 2)]
    assert "4 or 8 processes" in table[1]["nearest_even"]  # 2 or 4 groups share 16 rows evenly.
    _, printed = plans(8, 3, status=2)
    assert f"launch: parallelism_config_{setting} 2: does not divide the 3 processes" in printed


def test_plan_refuses_what_the_launch_would(plans, monkeypatch):
    """The strategies that the launch would choose check the settings."""
    pipeline = {"pipeline_ranks": 2, "attention": "sdpa"}
    table, printed = plans(4, status=2, model=pipeline, batch={"max_micro_batch_size": "auto"})
    assert not table and "model.pipeline_ranks 2: cannot be combined with batch.max_micro_batch_size auto" in printed
    assert plans(4, model=pipeline)[0]
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert plans(4)[0]
    _, printed = plans(4, status=2, optim={"name": "muon"})
    assert "parallelism_config_tp_size 2: cannot be combined with optim.name muon" in printed
    set_fsdp2(monkeypatch)
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert "launch: FSDP is not supported; take another file of accelerate_configs/" in plans(4, status=2)[1]


@pytest.mark.parametrize(
    "sizes, settings, message",
    [
        (
            {},
            {"pipeline_ranks": 4, "attention": "sdpa"},
            "model.pipeline_ranks 4: the 6 layers cannot be divided among 8",
        ),
        ({"SP_SIZE": "8"}, {}, "parallelism_config_sp_size 8: must divide the 12 attention heads"),
        ({"SP_SIZE": "4", "TP_SIZE": "2"}, {}, "sp_size 4 x tp 2: must divide the 12 attention heads"),
        ({"TP_SIZE": "8"}, {}, "parallelism_config_tp_size 8: must divide the 12 attention heads and the 6 key heads"),
        ({"TP_SIZE": "4"}, {}, "parallelism_config_tp_size 4: must divide the 12 attention heads and the 6 key heads"),
        # This one is refused later, for another reason.
        ({"SP_SIZE": "8"}, {"architecture": {"model_type": "mamba", "vocab_size": 384}}, None),
        ({"SP_SIZE": "4"}, {}, None),
        ({"TP_SIZE": "2"}, {}, None),
        ({"CP_SIZE": "8"}, {}, None),
        ({}, {"pipeline_ranks": 2, "attention": "sdpa"}, None),
    ],
)
def test_plan_refuses_too_few_layers_and_heads(plans, monkeypatch, sizes, settings, message):
    """So does the launch: see test_too_few_layers_and_heads in test_mesh.py."""
    shape = {"num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}
    model = LLAMA_ALONE | {"architecture": LLAMA_ALONE["architecture"] | shape | {"max_position_embeddings": 4096}}
    for name, size in sizes.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}", size)
    pipeline = {"pipeline_schedule": "Interleaved1F1B"} if "pipeline_ranks" in settings else {}
    _, printed = plans(8, status=2 if message else 0, model=model | settings | pipeline)
    assert (message or "grad_accum") in printed


@pytest.mark.parametrize("group, counts, idle", [(1, (16, 17, 64), {17: 1, 64: 48}), (2, (32, 40), {40: 8})])
def test_plan_counts_processes_without_a_row(plans, monkeypatch, group, counts, idle):
    """16 rows. In groups of 2 that share each row, 40 processes are 20 groups, 4 of which have none."""
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", str(group))
    _, printed = plans(*counts)
    found = re.findall(r"^Idle: ([\d,]+) of ([\d,]+) processes have no row .* at most (\d+) processes", printed, re.M)
    assert [tuple(map(int, line)) for line in found] == [(idle[count], count, 16 * group) for count in idle]


def test_plan_counts_processes_without_a_row_in_the_smallest_batch(plans):
    """The steps of batch.warmup have 6 rows for 16 processes, and the others 16."""
    _, printed = plans(16, batch={"warmup": [{"steps": 5, "rows": 6}]})
    assert re.search("^Idle: 10 of 16 processes have no row ", printed, re.M)


def test_plan_reads_the_layers_of_a_model_that_is_here(tmp_path, monkeypatch):
    """Of its config.json alone: there are no weights, and no data."""
    transformers.LlamaConfig(**LLAMA).save_pretrained(tmp_path / "model")
    config = {"run": {"max_steps": 1}, "batch": {"global_batch_size": 8}}
    config |= {"data": {"path": "absent", "format": "tokens"}, "model": {"pretrained": str(tmp_path / "model")}}
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "8")
    output = run(tmp_path, config, "--plan", 8, expect=2).output
    assert "parallelism_config_tp_size 8: must divide the 4 attention heads" in output


def test_plan_counts_tokens_where_the_config_does(plans):
    (line,), _ = plans(2, batch={"global_batch_size": None, "global_batch_tokens": 6 * 4096})
    assert numbers(line, "micro_batch", "grad_accum", "tokens_per_step") == (3, 1, 24_576)


def test_plan_is_printed_by_one_of_several_processes(tmp_path):
    output = launch(tmp_path, ABSENT, "--plan", 1, 2, processes=2, warm=True).output
    assert output.count("nearest_even") == 1


@pytest.mark.parametrize("counts", [(), (0,), (4, 0), ("1,2",), ("-1",), ("many",), ("1.5",), ("²",)])
def test_plan_takes_process_counts_only(plans, counts):
    table, printed = plans(*counts, status=2)
    assert not table and printed.startswith("error: ")


def test_huge_plans_are_instant():
    """Arithmetic, not a search: a step of a million rows on ten thousand ranks, and all its slices on one rank."""
    plan = train.plan_batch(1_000_000, 1, 9_999, 8192)
    assert len(plan.split(np.arange(1_000_000), joined=False)) == plan.grad_accum_steps == math.ceil(1_000_000 / 9_999)


# Memory ---------------------------------------------------------------------------------------------------------------

# Per layer: 4 heads of 16, 2 of them for keys, an MLP of 192, two norms. Outside: embedding, output layer and a norm.
WIDTH, LAYERS, TOKENS = 64, 6, 32
LAYER = WIDTH * (64 + 32 + 32 + 64) + 3 * WIDTH * 192 + 2 * WIDTH
PARAMETERS = 2 * 384 * WIDTH + LAYERS * LAYER + WIDTH
LLAMA = {"model_type": "llama", "vocab_size": 384, "hidden_size": WIDTH, "intermediate_size": 192}
LLAMA |= {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "vocab_size": 128_256}
SHAPE_405B |= {"num_attention_heads": 128, "num_key_value_heads": 8}


def memory_config(batch: dict | None = None, tokens: int = TOKENS, packing: str = "none", **model) -> Config:
    batch = {"global_batch_size": 16, "max_micro_batch_size": 2} | (batch or {})
    data = {"path": "absent", "format": "tokens", "packing": packing, "sequence_length": tokens}
    settings = {"run": {"max_steps": 1}, "batch": batch, "data": data, "model": {"architecture": LLAMA} | model}
    return train.Settings.model_validate(settings)  # That of a fork, whose loss may read settings of its own.


@pytest.fixture(autouse=True)
def nothing_traced():
    """What is remembered of passes is that of one launcher file."""
    TRACED.clear()


def planned(config: Config, processes: int) -> PlannedLaunch:
    return PlannedLaunch(config, processes, train.plan_stages, train.loss_function(config))


def memory_of(processes: int, batch: dict | None = None, tokens: int = TOKENS, **others) -> dict[str, float]:
    config = memory_config(batch, tokens, **others)
    return memory_per_device(planned(config, processes), planned_model(config))


def test_memory_of_weights_gradients_and_moments():
    """4 bytes each, and two moments."""
    for processes in 1, 2:
        memory = memory_of(processes)
        assert (memory["weights"], memory["gradients"], memory["optimizer"]) == (4 * PARAMETERS,) * 2 + (
            8 * PARAMETERS,
        )


@pytest.mark.parametrize("is_sharded", [False, True])
def test_memory_in_fp16_is_that_in_bf16(monkeypatch, is_sharded):
    if is_sharded:
        set_fsdp2(monkeypatch)
    found = []
    for precision in "bf16", "fp16", "no":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        TRACED.clear()
        found.append(memory_of(4))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_memory_of_a_teacher(monkeypatch, is_sharded):
    """The loss of a fork may ask one. Each rank has it whole, however the model is divided."""
    if is_sharded:
        set_fsdp2(monkeypatch)
    before, teacher = memory_of(4), torch.nn.Linear(WIDTH, 1_000 * WIDTH)  # Much more than activations.
    loss_function = train.loss_function

    def asking(config):
        def loss_of(wrapped, batch, chunked=False):
            with torch.no_grad():
                teacher(torch.zeros(1, WIDTH, device=batch.targets.device)).sum()
            return loss_function(config)(wrapped, batch, chunked=chunked)

        return loss_of

    monkeypatch.setattr(train, "loss_function", asking)
    TRACED.clear()
    after = memory_of(4)
    assert after["weights"] == before["weights"] + 4 * (WIDTH + 1) * 1_000 * WIDTH
    more = after["activations"] + after["logits"] - before["activations"] - before["logits"]
    assert more <= 4 * 1_000 * WIDTH  # What it computes.


def test_memory_of_fsdp2(monkeypatch):
    """A quarter each, and to compute: two layers and what is outside of the layers, and a layer's gradients twice."""
    set_fsdp2(monkeypatch)
    outside = PARAMETERS - LAYERS * LAYER
    memory = memory_of(4)  # 4 rows for each rank in 2 micro-steps, so gradients wait, and are whole.
    assert memory["weights"] == PARAMETERS + 4 * (outside + 2 * LAYER) + 8 * LAYER
    assert (memory["gradients"], memory["optimizer"]) == (4 * PARAMETERS, 2 * PARAMETERS)
    assert memory_of(4, {"accumulation": "immediate"})["gradients"] == PARAMETERS
    kept = memory_of(4, {"accumulation": "kept_weights"})  # All weights stay gathered from one micro-step to the next.
    assert (kept["weights"], kept["gradients"]) == (PARAMETERS + 4 * PARAMETERS + 8 * LAYER, PARAMETERS)
    of_eight = memory_of(8)
    assert of_eight["gradients"] == PARAMETERS / 2  # 2 rows for each rank: nothing waits.
    memory_of(12)  # Whose ranks also have 2 rows, and a smaller share of the gradients.
    remembered = memory_of(12)
    TRACED.clear()
    assert memory_of(12) == remembered != of_eight


def test_memory_of_fsdp2_with_frozen_weights(monkeypatch):
    """With model.lora, only adapters have gradients: here of rank 2, for a matrix of WIDTH x WIDTH in each layer."""
    set_fsdp2(monkeypatch)
    adapter = 2 * 2 * WIDTH
    weights, layer = PARAMETERS + LAYERS * adapter, LAYER + adapter
    gathered = 4 * (PARAMETERS - LAYERS * LAYER + 2 * layer)
    memory = memory_of(4, lora={"r": 2, "target_modules": ["q_proj"]})
    assert memory["weights"] == weights + gathered + 8 * adapter


@pytest.mark.slow
def test_memory_of_experts(monkeypatch):
    """All weights are sharded, and a rank computes with a quarter of the 8 experts. Two see each token."""
    experts, router = 3 * WIDTH * 192, 8 * WIDTH
    layer = LAYER + 7 * experts + router
    outside, whole = PARAMETERS - LAYERS * LAYER, PARAMETERS + LAYERS * (7 * experts + router)
    mixtral = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    assert memory_of(1, architecture=mixtral)["weights"] == 4 * whole
    set_fsdp2(monkeypatch)
    memory = memory_of(4, architecture=mixtral)
    assert memory["weights"] == whole + 4 * (outside + 2 * layer) + 8 * layer
    assert memory["gradients"] == 4 * whole
    divided = memory_of(4, architecture=mixtral, expert_ranks=4)
    own = LAYER + experts + 2 * WIDTH
    assert divided["weights"] == whole + 4 * (outside + 2 * own) + 8 * own
    assert divided["gradients"] == 4 * (outside + LAYERS * own)
    assert divided["optimizer"] == memory["optimizer"] == 2 * whole
    # A rank with a single expert, though two see each token. Of 16 rows, each of the 8 ranks has one in 2 micro-steps.
    single = memory_of(8, {"global_batch_size": 32}, architecture=mixtral, expert_ranks=8)
    assert single["gradients"] == 4 * (outside + LAYERS * (LAYER + WIDTH))


@pytest.mark.slow
def test_memory_of_groups_of_experts(monkeypatch):
    """As in DeepSeek-V3, whose values are of another size than its queries, so that flash attention does not take them.
    Of each layer, a rank has no gradients of 6 of the 8 experts, and the plan leaves out their rows of the router."""
    shape = {
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
    }
    shape |= {"num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4}
    heads = {"qk_nope_head_dim": 4, "v_head_dim": 16, "num_key_value_heads": 4}
    deepseek = LLAMA | {"model_type": "deepseek_v3"} | shape | heads
    set_fsdp2(monkeypatch)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    whole, divided = (memory_of(4, architecture=deepseek, expert_ranks=ranks) for ranks in (1, 4))
    assert whole["gradients"] - divided["gradients"] == 4 * LAYERS * 6 * (3 * WIDTH * 16 + WIDTH)


@pytest.mark.slow
def test_memory_of_layers_of_two_kinds(monkeypatch):
    """As in DeepSeek, the first layer has one MLP, not 8 experts. FSDP2 gathers two of the large layers at a time."""
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "shared_expert_intermediate_size": 8,
    }
    qwen = LLAMA | {"model_type": "qwen2_moe", "mlp_only_layers": [0]} | experts
    shared = 3 * WIDTH * 8 + WIDTH  # And what decides how much it counts.
    small = LAYER + 64 + 2 * 32  # Query, key and value have biases.
    large = small + 7 * 3 * WIDTH * 192 + 8 * WIDTH + shared
    outside = 2 * 384 * WIDTH + WIDTH
    whole = outside + small + (LAYERS - 1) * large
    assert memory_of(1, architecture=qwen)["weights"] == 4 * whole
    set_fsdp2(monkeypatch)
    assert memory_of(4, architecture=qwen)["weights"] == whole + 4 * (outside + 2 * large) + 8 * large
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    assert memory_of(4, architecture=qwen)["weights"] == whole + 4 * whole + 8 * large


@pytest.mark.slow
def test_layers_without_experts_are_not_taken_for_those_with_experts():
    """DeepSeek-V3's first three layers have none. Each further one takes what it takes where all have experts."""
    deepseek = {"model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16}
    deepseek |= {"q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    deepseek |= {"num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

    def of_two_layers(dense: int) -> float:
        shape = LLAMA | deepseek | {"first_k_dense_replace": dense}
        more, less = (memory_of(1, architecture=shape | {"num_hidden_layers": layers}) for layers in (9, 7))
        return more["activations"] - less["activations"]

    assert of_two_layers(3) == pytest.approx(of_two_layers(0))


def test_memory_of_tensor_parallelism(monkeypatch):
    """Half of each matrix, and whole norms."""
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    norms = (2 * LAYERS + 1) * WIDTH
    assert memory_of(2)["weights"] == 4 * (norms + (PARAMETERS - norms) / 2)


def test_memory_of_tensor_parallelism_with_tied_embeddings(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    norms, tied = (2 * LAYERS + 1) * WIDTH, PARAMETERS - 384 * WIDTH
    memory = memory_of(2, architecture=LLAMA | {"tie_word_embeddings": True})
    assert memory["weights"] == 4 * (norms + (tied - norms) / 2)


def test_memory_of_tensor_parallelism_where_a_matrix_is_not_even(monkeypatch):
    """The launch divides it, see test_tensor_parallel.py. The first rank has one row more than the other."""
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    uneven = LLAMA | {"intermediate_size": LLAMA["intermediate_size"] - 1}
    assert memory_of(2, architecture=uneven)["weights"] == memory_of(2)["weights"]


def test_memory_of_experts_that_tensor_parallelism_would_divide(monkeypatch, capsys):
    """The launch refuses it, see test_tensor_parallel.py."""
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    config = memory_config(architecture=LLAMA | {"model_type": "mixtral", "num_local_experts": 8})
    say_memory(config, [planned(config, 2)])
    assert "that of a mixtral's experts under tensor parallelism is not calculated" in capsys.readouterr().out


def test_memory_of_a_pipeline():
    """Half of the layers, and the embedding or the output layer. The first rank holds the states of two micro-steps."""
    memory = memory_of(2, pipeline_ranks=2)
    assert memory["gradients"] == 4 * (LAYERS // 2 * LAYER + 384 * WIDTH + WIDTH)
    assert memory["activations"] > 0.9 * memory_of(1)["activations"]


def test_memory_of_a_pipeline_with_few_micro_steps():
    """No rank holds the states of more micro-steps than there are, here 2. With more, Interleaved1F1B holds 3."""
    for rows, is_same in (4, True), (8, False):
        held = []
        for schedule in "1F1B", "Interleaved1F1B":
            memory = memory_of(2, {"global_batch_size": rows}, pipeline_ranks=2, pipeline_schedule=schedule)
            held.append(memory["activations"])
        assert (held[0] == held[1]) == is_same


def test_memory_of_ddp():
    """There are gradients before the first micro-step, as before all others. One process alone has none then, so what
    it holds in the pass becomes less while they become more."""
    one, two = ({"global_batch_size": rows, "max_micro_batch_size": 2} for rows in (4, 8))
    assert memory_of(2, one) == memory_of(2, two)
    alone = memory_of(1, {"global_batch_size": 2, "max_micro_batch_size": 2})
    assert sum(alone.values()) < sum(memory_of(2, one).values())


def test_a_fork_without_the_search_is_told_to_give_a_number():
    with pytest.raises(UserError, match="auto is for rows of text only; give a number"):
        train.plan_batch(8, "auto", 1, 32)


def test_memory_of_the_largest_micro_batch():
    """It may be that of a stage of batch.warmup, here 5 rows before 4 times 4."""
    plan = planned(memory_config({"max_micro_batch_size": 5, "warmup": [{"steps": 1, "rows": 5}]}), 1).plan
    assert (plan.micro_batch_size, plan.grad_accum_steps) == (5, 1)


def test_memory_where_the_launch_finds_the_number_of_rows():
    """With batch.max_micro_batch_size auto, as if all rows fit at once."""
    plan = planned(memory_config({"max_micro_batch_size": "auto"}), 2).plan
    assert (plan.micro_batch_size, plan.grad_accum_steps) == (8, 1)


def test_memory_of_three_dimensions(monkeypatch):
    """Of half of the layers and of one end half of each matrix, and of that FSDP2 has a quarter, as of whole norms."""
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    set_fsdp2(monkeypatch)
    norms = 2 * WIDTH
    layer, outside = (LAYER - norms) / 2 + norms, 384 * WIDTH / 2 + WIDTH
    own = LAYERS // 2 * layer + outside
    memory = memory_of(16, pipeline_ranks=2)
    assert memory["weights"] == own + 4 * (outside + 2 * layer) + 8 * layer  # A quarter, and what it gathers.
    assert (memory["gradients"], memory["optimizer"]) == (4 * own, 8 * own / 4)  # There are 2 micro-steps.
    assert memory_of(16, {"accumulation": "immediate"}, pipeline_ranks=2)["gradients"] == own


def test_memory_of_activations():
    """With checkpointing, a layer keeps its input, and one layer at a time has all the rest. So two more layers of the
    same model keep two more inputs. The others keep 16 times a layer's own width at least: of the two norms, of
    attention, and three times that of the MLP."""
    states = 4 * 2 * TOKENS * WIDTH  # 2 rows in float32
    deeper = LLAMA | {"num_hidden_layers": LAYERS + 2}
    less, more = (memory_of(1, architecture=it, gradient_checkpointing=True)["activations"] for it in (LLAMA, deeper))
    assert more - less == 2 * states
    less, more = (memory_of(1, architecture=it)["activations"] for it in (LLAMA, deeper))
    assert more - less > 2 * 16 * states


def test_memory_of_selective_checkpointing():
    """A layer keeps its input, and what its products and its attention return: as wide as the layer are q, the
    attention, what goes into the residual twice; k and v are half as wide, and gate and up three times. The attention
    also has a number per head, a sixteenth of the width."""
    deeper = LLAMA | {"num_hidden_layers": LAYERS + 2}
    models = LLAMA, deeper
    less, more = (memory_of(1, architecture=it, gradient_checkpointing="selective")["activations"] for it in models)
    states = 4 * 2 * TOKENS * WIDTH  # 2 rows in float32
    assert more - less == 2 * (1 + 4 + 2 / 2 + 2 * 3 + 1 / 16) * states


def test_memory_of_sequence_parallelism(monkeypatch):
    """Half of the tokens are half of all that is as long as the tokens."""
    whole = memory_of(2)
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    TRACED.clear()
    part = memory_of(2)
    assert part["weights"] == whole["weights"]
    assert part["activations"] == pytest.approx(whole["activations"] / 2, rel=0.15)  # Not those of the weights.


def more_than_sequence_parallelism(monkeypatch, **settings) -> float:
    """The bytes that context parallelism of 2 takes beyond sequence parallelism of 2. They are activations."""
    found = {}
    for way in "SP_SIZE", "CP_SIZE":
        with monkeypatch.context() as patch:
            patch.setenv(f"PARALLELISM_CONFIG_{way}", "2")
            TRACED.clear()
            found[way] = memory_of(2, **settings)
    more = found["CP_SIZE"].pop("activations") - found["SP_SIZE"].pop("activations")
    assert found["CP_SIZE"] == found["SP_SIZE"]
    return more


BOTH = 4 * 2 * 16  # A head's key and value of a token, in bytes.


@pytest.mark.parametrize(
    "recomputes, packing",
    [
        pytest.param(True, "concat", marks=pytest.mark.slow),
        pytest.param(False, "concat", marks=pytest.mark.slow),
        pytest.param(True, "none", marks=pytest.mark.slow),
        pytest.param(False, "none", marks=pytest.mark.slow),
    ],
)
def test_memory_of_context_parallelism(monkeypatch, recomputes, packing):
    """As sequence parallelism, and in each layer or, with checkpointing, in the one that is computed again: keys and
    values of the other half of the tokens, 2 heads of 16 each; and where there is a mask, copies for 4 heads.

    Of two rows, the last rank has the second half of the first one, which sees all of it, and the first half of the
    other one, which sees itself and needs no mask. The layers share the mask. That a document can fill its row is so
    with packing, too."""
    others, copies, mask = 2 * TOKENS / 2 * 2 * BOTH, TOKENS * 4 * BOTH, 4 * TOKENS / 2 * TOKENS
    found = more_than_sequence_parallelism(monkeypatch, gradient_checkpointing=recomputes, packing=packing)
    assert found == (1 if recomputes else LAYERS) * (others + copies) + mask


@pytest.mark.parametrize("tokens", [pytest.param(TOKENS, marks=pytest.mark.slow), 4096])
def test_memory_of_the_rank_that_takes_most(monkeypatch, tokens):
    """Of a single row in 4 pieces, the first rank has the first and the last one. The first one needs no mask, and so
    the keys and values that all have sent stay. The last one sees all tokens. Rank 1 has the pieces between, which
    need masks: it keeps copies instead of what was sent. There are more of them, and its masks are larger."""
    first = LAYERS * (tokens / 2 * 2 * BOTH + tokens * 4 * BOTH) + 4 * tokens / 4 * tokens
    last = LAYERS * (-tokens / 2 * 2 * BOTH + (2 + 3) * tokens / 4 * 4 * BOTH) + 4 * tokens / 4 * (2 + 3) * tokens / 4
    assert (first > last) == (tokens == TOKENS)
    found = more_than_sequence_parallelism(monkeypatch, batch={"global_batch_size": 1}, tokens=tokens)
    assert found == max(first, last)


def test_flash_attention_needs_no_mask_for_context_parallelism(monkeypatch):
    """Nor copies: there are keys and values of the other half of the tokens, in bf16."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    others = LAYERS * 2 * TOKENS / 2 * 2 * (2 * 2 * 16)
    assert more_than_sequence_parallelism(monkeypatch) == pytest.approx(others, rel=0.01)  # And where documents end.


@pytest.mark.parametrize("setting", ["sp_size", "cp_size"])
def test_memory_of_a_row_that_cannot_be_shared(monkeypatch, capsys, setting):
    """The plan says what the launch would say."""
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{setting.upper()}", "2")
    config = memory_config(attention="eager")
    say_memory(config, [planned(config, 2)])
    message = f"Memory: it is not known for this model: launch: parallelism_config_{setting} 2 needs model.att"
    assert capsys.readouterr().out.startswith(message)


def test_memory_of_a_model_without_a_plan_for_tensor_parallelism(monkeypatch, capsys):
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    config = memory_config(architecture={"model_type": "gpt2", "vocab_size": 384, "n_embd": 24, "n_layer": 2})
    say_memory(config, [planned(config, 2)])
    message = "Memory: it is not known for this model: launch: parallelism_config_tp_size 2: transformers has no plan"
    assert capsys.readouterr().out.startswith(message)


@pytest.mark.slow
def test_memory_of_8_billion_parameters(tmp_path, monkeypatch, capsys):
    """Each takes 16 bytes with DDP, 4 of them for its weight. On 64 devices of 80 GiB, FSDP2 and more make it fit."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128_256}
    sizes |= {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8}
    config = ABSENT | {"model": {"architecture": sizes}, "perf": {"device_memory_gib": 80}}
    config |= {"batch": {"global_batch_size": 512, "max_micro_batch_size": 2}}
    config["data"] = ABSENT["data"] | {"tokenizer": "bytes"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert train.main(["--config", str(tmp_path / "config.yaml"), "--plan", "64"]) == 0
    printed = capsys.readouterr().out
    heads, line = (re.search(start, printed, re.M).group().split() for start in (r"^processes w.*", r"^ +64 .*\.\d+$"))
    gib = 4 * 8.03e9 / 2**30
    found = [float(line[heads.index(name)]) for name in ("weights", "gradients", "optimizer")]
    assert found == pytest.approx([gib, gib, 2 * gib], rel=0.01)
    assert re.search(r"do not fit into 80\. With accelerate_configs/fsdp2\.yaml: .* That fits\.", printed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, stages, rows, gib",
    [
        ({}, 1, 1024, 94),
        ({"SP_SIZE": "8"}, 1, 1024, 65),
        ({"TP_SIZE": "8"}, 1, 1024, 61),
        ({"CP_SIZE": "8", "TP_SIZE": "8"}, 1, 1024, 32),
        ({"TP_SIZE": "8"}, 8, 1024, 124),
        ({"TP_SIZE": "8"}, 8, 256, 76),
    ],
)
def test_memory_of_405_billion_parameters(monkeypatch, size, stages, rows, gib):
    """The two moments are 8 bytes for each parameter, on 512 devices. The sums are still what README says."""
    set_fsdp2(monkeypatch)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    for name, ranks in size.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}", ranks)
    batch = {"global_batch_size": rows, "max_micro_batch_size": 1, "accumulation": "immediate"}
    savings = {"gradient_checkpointing": True, "chunked_loss": True, "pipeline_ranks": stages}
    memory = memory_of(512, batch, 8192, architecture=LLAMA | SHAPE_405B, **savings)
    # A rank of a pipeline has 16 of the 126 layers at most, and one of the embedding and the output layer.
    own = 405.9e9 if stages == 1 else 8 * (16 * (405.9e9 - 2 * 128_256 * 16384) / 126 + 128_256 * 16384)
    assert memory["optimizer"] == pytest.approx(8 * own / 512, rel=0.01)
    assert sum(memory.values()) / 2**30 == pytest.approx(gib, abs=0.5)


def memory_of_host(processes: int, ranks_per_host: int = 8, **model) -> dict[str, float]:
    config = memory_config(**model).model_copy(update={"perf": Perf(ranks_per_host=ranks_per_host)})
    return memory_per_host(planned(config, processes), planned_model(config))


@pytest.mark.parametrize("processes, ranks", [(1, 1), (2, 2), (16, 8)])
def test_memory_of_a_host(monkeypatch, processes, ranks):
    """Two layers or embeddings for each rank. For a checkpoint, weights and moments: a copy on each rank, which stays,
    and twice what it writes, which ranks with the same weights share."""
    largest = max(LAYER, 384 * WIDTH)
    memory = memory_of_host(processes)
    assert memory["start"] == ranks * 2 * 4 * largest
    assert memory["export"] == ranks * (12 * PARAMETERS + 2 * 4 * largest)
    assert memory["save"] == ranks * 12 * PARAMETERS * (1 + 2 / processes)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert memory_of_host(processes)["export"] == ranks * (12 * PARAMETERS + 2 * 2 * largest)
    set_fsdp2(monkeypatch)
    if processes > 1:
        assert memory_of_host(processes)["save"] == ranks * 3 * 12 * PARAMETERS / processes


MANY_TOKENS = 1920  # A vocabulary whose embeddings are larger than a layer. Small models to try have 960 of it.


def test_memory_of_a_host_for_large_embeddings():
    memory = memory_of_host(1, architecture=LLAMA | {"vocab_size": MANY_TOKENS})
    assert memory["start"] == 2 * 4 * MANY_TOKENS * WIDTH and memory["export"] > memory["start"] > 2 * 4 * LAYER


def test_memory_of_a_host_with_tensor_parallelism(monkeypatch):
    """Two copies of the model, each in two parts. Each rank also tries a small model, of two layers and whole. In the
    export, two ranks at most have a layer."""
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    memory = memory_of_host(4, architecture=LLAMA | {"vocab_size": MANY_TOKENS})
    norms = (2 * LAYERS + 1) * WIDTH  # Each rank has all of them.
    own = (2 * MANY_TOKENS * WIDTH + LAYERS * LAYER + WIDTH - norms) / 2 + norms
    assert memory["start"] == 4 * 2 * 4 * (2 * 960 * WIDTH + 2 * LAYER + WIDTH)
    assert memory["save"] == 4 * 12 * own * (1 + 2 / 2)
    assert memory["export"] == 4 * 12 * own + 2 * 2 * 4 * MANY_TOKENS * WIDTH


def test_memory_of_a_host_whose_ranks_share_rows(monkeypatch):
    """Each tries a small model before it has its own."""
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    assert memory_of_host(4)["start"] == 4 * 2 * 4 * (2 * 384 * WIDTH + 2 * LAYER + WIDTH)


@pytest.mark.parametrize("schedule, tried", [("1F1B", 2), ("Interleaved1F1B", 4)])
def test_memory_of_a_host_with_a_pipeline(schedule, tried):
    """Two copies of the model, each with half of the layers on a rank, and one of its ends. The small model has a layer
    for each chunk."""
    memory = memory_of_host(4, pipeline_ranks=2, pipeline_schedule=schedule)
    own = LAYERS / 2 * LAYER + 384 * WIDTH + WIDTH
    assert memory["start"] == 4 * 2 * 4 * (2 * 384 * WIDTH + tried * LAYER + WIDTH)
    assert memory["save"] == 4 * 12 * own * (1 + 2 / 2)


class OwnConfig(transformers.LlamaConfig):
    model_type = "llama_of_a_plan"


class OwnLlama(transformers.LlamaForCausalLM):
    config_class = OwnConfig


def test_memory_of_a_host_for_a_class_of_ones_own():
    """Its ranks build the whole model, unless they read it from files."""
    transformers.AutoConfig.register(OwnConfig.model_type, OwnConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(OwnConfig, OwnLlama, exist_ok=True)
    with pytest.raises(UserError, match="each rank builds the whole model of .* new weights of a class of one's own"):
        memory_of_host(2, architecture=LLAMA | {"model_type": OwnConfig.model_type})


def test_memory_of_a_host_for_adapters_of_a_new_model():
    """With model.lora, its class is one of peft. A rank still draws a layer at a time."""
    memory = memory_of_host(2, lora={"r": 2, "target_modules": ["q_proj"]})
    assert memory["start"] == pytest.approx(memory_of_host(2)["start"], rel=0.05)


@pytest.mark.slow
def test_memory_of_a_host_for_405_billion_parameters(monkeypatch):
    """As README says. A layer has 2 whole matrices and 2 of a 16th in its attention, 3 in its MLP, and 2 norms."""
    set_fsdp2(monkeypatch)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    memory = memory_of_host(512, architecture=LLAMA | SHAPE_405B)
    layer = (2 + 2 / 16) * 16384**2 + 3 * 16384 * 53248 + 2 * 16384
    assert memory["start"] == pytest.approx(8 * 2 * 4 * layer) == pytest.approx(190 * 2**30, rel=0.005)
    assert memory["save"] == pytest.approx(8 * 3 * 12 * 405.9e9 / 512, rel=0.001)
    assert memory["save"] == pytest.approx(213 * 2**30, rel=0.005)
    exported = 8 * 12 * 405.9e9 / 512 + 2 * 2 * 2 * layer
    assert memory["export"] == pytest.approx(exported, rel=0.001) == pytest.approx(95 * 2**30, rel=0.005)


def test_what_a_host_lacks_is_said(tmp_path):
    config = {"run": {"max_steps": 1}, "batch": {"global_batch_size": 8}, "perf": {"host_memory_gib": 1e-6}}
    config |= {"data": {"path": "absent", "format": "tokens"}, "model": {"architecture": LLAMA}}
    output = run(tmp_path, config, "--plan", 2, 16).output
    assert re.search(
        r"GiB per host of up to 8 ranks.*:\n *processes +start +save +export\n +2( +[\d.]+){3}\n +16 ", output
    )
    assert re.search(r"^16 processes: save takes [\d.]+ GiB, beyond 1e-06\. Let fewer", output, re.M)


def test_memory_takes_the_launcher_file_into_account(tmp_path):
    """The strategy and the precision of the shipped file."""
    config = {"run": {"max_steps": 1}, "batch": {"global_batch_size": 8}, "perf": {"device_memory_gib": 80}}
    config |= {"data": {"path": "absent", "format": "tokens"}, "model": {"architecture": LLAMA}}
    output = launch(tmp_path, config, "--plan", 4, 8, launcher="fsdp2", warm=True).output
    assert "GiB per device, FSDP2, mixed precision bf16" in output


@pytest.mark.parametrize(
    "what, variables",
    [
        ("float8", {"ACCELERATE_MIXED_PRECISION": "fp8"}),
        ("DeepSpeed", {"ACCELERATE_USE_DEEPSPEED": "true"}),
        ("fsdp_offload_params", {"FSDP_OFFLOAD_PARAMS": "true"}),
    ],
)
def test_memory_by_a_launcher_file_for_which_it_is_not_known(monkeypatch, capsys, what, variables):
    if what == "fsdp_offload_params":
        set_fsdp2(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = memory_config()
    for say in say_memory, say_host_memory:
        say(config, [planned(config, 2)])
        assert re.fullmatch(f"Memory( of a host)?: it is not known for {what}\n", capsys.readouterr().out)


def test_memory_that_cannot_be_known(plans):
    """Neither is there a network to ask, nor a config in a cache."""
    _, printed = plans(1, perf={"device_memory_gib": 80.0})
    assert "Memory: model.pretrained or model.architecture: cannot configure nobody/no-model" in printed


# Large enough for GiB with a digit behind the point. Nothing is computed, so it takes no longer.
LARGE = LLAMA | {"vocab_size": 100_000, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}


def advice(monkeypatch, limit: float, processes: int = 2, **batch) -> str:
    """What a launch in bf16 is told to change so that it fits into so many GiB."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    config = memory_config(batch, 2048, architecture=LARGE, chunked_loss=False)
    config = config.model_copy(update={"perf": Perf(device_memory_gib=limit)})
    return what_fits(planned(config, processes), planned_model(config))


@pytest.mark.slow
def test_advice_names_all_that_its_sums_count(monkeypatch):
    """What it says of FSDP2 and chunked loss is what a launch with them is said to need."""
    said = re.findall(r"With (.*?): ([\d.]+) GiB", advice(monkeypatch, 1e-6))
    names = [name for name, _ in said]
    assert names[:2] == ["accelerate_configs/fsdp2.yaml", "--model.chunked_loss true"]
    set_fsdp2(monkeypatch)
    changes = {"model": {"chunked_loss": False}, "batch": {}}
    for name, gib in said:
        for setting, value in re.findall(r"--(\S+) (\S+)", name):
            section, field = setting.split(".")
            changes[section][field] = yaml.safe_load(value)
        total = sum(memory_of(2, changes["batch"], 2048, **changes["model"], architecture=LARGE).values())
        assert f"{total / 2**30:.1f}" == gib


@pytest.mark.parametrize(
    "given, of_file, note",
    [
        (None, "bf16", " (bf16)"),
        ("no", "no", " --mixed_precision no"),
        ("bf16", "bf16", ""),
        ("fp16", "fp16", " --mixed_precision fp16"),
    ],
)
def test_advice_has_the_precision_of_the_file_that_it_names(monkeypatch, given, of_file, note):
    """Unless the launch was given another one: what it says is what a launch by that file is said to need."""
    if given:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", given)
    config = memory_config(architecture=LARGE | {"num_hidden_layers": 2})
    config = config.model_copy(update={"perf": Perf(device_memory_gib=8.5)})
    said = what_fits(planned(config, 2), planned_model(config))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", of_file)
    set_fsdp2(monkeypatch)
    TRACED.clear()  # What was remembered of a launch that shards nothing, or shards, is not taken for the other.
    total = sum(memory_per_device(planned(config, 2), planned_model(config)).values())
    assert f"With accelerate_configs/fsdp2.yaml{note}: {total / 2**30:.1f} GiB." in said
    assert said.endswith(" That fits.") and " Then " not in said


def test_advice_leaves_out_what_the_launch_would_refuse(monkeypatch):
    config = memory_config(tokens=1024, architecture=LARGE | {"num_hidden_layers": 1}, chunked_loss=False)
    changes = {"perf": Perf(device_memory_gib=1e-6), "optim": Optim(name="muon")}
    said = what_fits(planned(config.model_copy(update=changes), 2), planned_model(config))
    assert "fsdp2" not in said and "--model.chunked_loss true" in said
    assert "the launch finds out how many fit" in advice(monkeypatch, 1e-6, max_micro_batch_size="auto")


def test_advice_leaves_out_what_a_model_cannot():
    """The layers of GPT-OSS write into what `model.gradient_checkpointing: selective` would keep."""
    model = LLAMA | {"model_type": "gpt_oss", "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = memory_config(architecture=model, attention="eager")
    config = config.model_copy(update={"perf": Perf(device_memory_gib=1e-6)})
    said = what_fits(planned(config, 1), planned_model(config))
    assert "selective" not in said and "--model.gradient_checkpointing true" in said


def test_advice_has_the_launcher_file_of_the_same_ranks(monkeypatch, capsys):
    """Those that share rows go on to do so. A single process has nothing to shard, and ranks that divide the model keep
    their file, though bf16, which the other ones have, would make less of what is mostly activations."""
    config = memory_config(tokens=1024, architecture=LLAMA | {"num_hidden_layers": 1})
    config = config.model_copy(update={"perf": Perf(device_memory_gib=1e-6)})
    for processes, way, named in (1, "SP", "DDP"), (2, "SP", "DDP, sp 2"), (2, "TP", "DDP, tp 2"):
        with monkeypatch.context() as patch:
            patch.setenv(f"PARALLELISM_CONFIG_{way}_SIZE", str(processes))
            say_memory(config, [planned(config, processes)])
        printed = capsys.readouterr().out
        assert f"GiB per device, {named}, mixed precision no:" in printed
        files = re.findall(r"accelerate_configs/(\w+)\.yaml", printed)
        assert files == (["sequence_parallel"] if named == "DDP, sp 2" else [])


def test_memory_of_gradients_with_a_growing_batch(monkeypatch):
    """Gradients wait in the second stage, though not in the first one, which has the same micro-batch."""
    set_fsdp2(monkeypatch)
    growing = {"warmup": [{"steps": 3, "rows": 8}]}
    assert memory_of(4, growing)["gradients"] == memory_of(4)["gradients"] == 4 * PARAMETERS


def test_plan_refuses_sizes_and_precisions_of_no_launch(monkeypatch, plans):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp32")
    assert "mixed_precision fp32 is not supported; use bf16, fp16, or no" in plans(8, status=2)[1]
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    set_fsdp2(monkeypatch)
    sizes = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}
    for name, value in (sizes | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "8"}).items():
        monkeypatch.setenv(name, value)
    plans(16)
    assert (
        "launch: parallelism_config_dp_shard_size is 8, but of 64 processes, 32 are left for it"
        in plans(64, status=2)[1]
    )
