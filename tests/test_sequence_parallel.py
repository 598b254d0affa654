"""Sequence and context parallelism are the run of a plain loop, too: ranks that share rows, under DDP and FSDP2."""

import math
import re
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from helpers import (
    ROOT,
    VOCABULARY,
    WHOLE_ROWS,
    Done,
    check_continued,
    launch,
    packed_config,
    resume_from,
    run,
    tiny_config,
    tiny_model,
)
from reference import shuffled, train_reference

from samerun.config import Batch, Config, Data, Eval, Model, Optim
from samerun.data.batches import MicroBatch, collate, lengthen
from samerun.errors import UserError
from samerun.model.attention import DOCUMENTS, document_attention
from samerun.parallel.layout import Layout, check_combination, layout_of
from samerun.parallel.rows import check_shared_rows, part_of_row
from samerun.run.launch import groups_for_accelerate

AS_GPU = ROOT / "tests" / "wrapper_cpu_as_gpu.py", ROOT / "train.py"


FILES = {"sp": "sequence_parallel", "cp": "context_parallel"}  # The two ways to share a row.


def share(size: int, way: str = "sp") -> dict:
    """For a launcher file without a parallelism section: what Accelerate makes of one."""
    return {"env": {f"PARALLELISM_CONFIG_{way.upper()}_SIZE": str(size)}, "warm": True}


def by_file(size: int, way: str = "sp") -> dict:
    """The launcher file that ships, with its GPUs replaced by CPU processes."""
    options = "--mixed_precision", "no", f"--parallelism_config_{way}_size", size
    return {"launcher": FILES[way], "options": options, "script": AS_GPU, "warm": True}


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """The config of all cases, ragged rows of an odd number of tokens, and the plain loop's result for it."""
    folder = tmp_path_factory.mktemp("sequence-parallel")
    config = tiny_config(folder)
    config["run"] |= {"max_steps": 12, "eval_every": 6, "save_every": 4, "keep_checkpoints": 3}
    rows, held_out = (list(datasets.load_from_disk(folder / name)) for name in ("rows", "held-out"))
    order = shuffled(config["run"]["seed"], len(rows), 120)
    rows_of = lambda step: [rows[i] for i in order[step * 10 - 10 : step * 10]]  # noqa: E731
    did = train_reference(config, rows_of, held_out, eval_every=6)
    assert 2 < sum(norm > config["optim"]["max_grad_norm"] for norm in did.grad_norms) < 12
    tokens = [sum(len(rows[i]["input_ids"]) for i in order[: 10 * step]) for step in range(1, 13)]
    assert any(count % 4 for count in tokens)  # Not all micro-batches are divisible without more.
    learned = [label for row in held_out for label in row["labels"][1:] if label != -100]
    bytes_per_token = sum(3 <= label < 259 for label in learned) / len(learned)  # The ids of ByT5 that are bytes.
    return config, did, tokens, bytes_per_token


# Processes, how they are launched, settings; then how many groups share the 10 rows of a step, and in how many passes.
IMMEDIATE = "--batch.accumulation", "immediate"
CASES = {
    "2 share": (2, share(2), (), {"data_parallel_size": 1, "micro_batch_size": 3, "grad_accum_steps": 4}),
    "4 share 2 key heads": (4, share(4), (), {"data_parallel_size": 1, "micro_batch_size": 3, "grad_accum_steps": 4}),
    "DDP": (4, share(2), IMMEDIATE, {"data_parallel_size": 2, "micro_batch_size": 3, "grad_accum_steps": 2}),
    "FSDP2": (4, by_file(2), (), {"data_parallel_size": 2, "micro_batch_size": 3, "grad_accum_steps": 2}),
    "FSDP2, chunked loss": (
        2,
        by_file(2),
        (*IMMEDIATE, "--model.chunked_loss", "true"),
        {"data_parallel_size": 1, "grad_accum_steps": 4},
    ),
    "context, 2 share": (2, share(2, "cp"), (), {"data_parallel_size": 1, "micro_batch_size": 3}),
    "context, 3 share 4 heads": (3, share(3, "cp"), (), {"data_parallel_size": 1, "micro_batch_size": 3}),
    "context, 4 share": (4, share(4, "cp"), (), {"data_parallel_size": 1, "micro_batch_size": 3}),
    "context, DDP": (4, share(2, "cp"), IMMEDIATE, {"data_parallel_size": 2, "micro_batch_size": 3}),
    "context, FSDP2": (4, by_file(2, "cp"), (), {"data_parallel_size": 2, "micro_batch_size": 3}),
    "context, FSDP2, chunked loss, by the real command": (
        2,
        by_file(2, "cp") | {"warm": False},
        (*IMMEDIATE, "--model.chunked_loss", "true"),
        {"data_parallel_size": 1, "grad_accum_steps": 4},
    ),
}


@pytest.fixture(scope="module")
def runs(truth, tmp_path_factory):
    """runs(case, *settings): the finished run of a case. Each is made once."""

    @cache
    def result(case: str, *more) -> Done:
        processes, how, settings, plan = CASES[case]
        folder = tmp_path_factory.mktemp("run")
        limit = "--batch.max_micro_batch_size", 3
        done = launch(folder, truth[0], *limit, *settings, *more, processes=processes, **how)
        assert {name: done.metrics[0][f"plan/{name}"] for name in plan} == plan
        assert done.metrics[0]["plan/num_processes"] == processes
        return done

    return result


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_loop(truth, runs, case):
    """With clipping, uneven batches and evaluation. Every token is counted once."""
    _, did, tokens, bytes_per_token = truth
    done, processes = runs(case), CASES[case][0]
    did.check(done)
    assert done.logged("train/target_tokens") == list(accumulate(did.targets))
    assert done.tokens == tokens
    evaluated = {line["step"]: line["eval/loss"] for line in done.metrics if "eval/loss" in line}
    assert evaluated == pytest.approx(did.eval_losses, rel=5e-7)
    bits = [loss / math.log(2) / bytes_per_token for loss in did.eval_losses.values()]
    assert done.logged("eval/bits_per_byte") == pytest.approx(bits, rel=1e-6)
    rates = zip(done.logged("perf/tokens_per_second"), done.logged("perf/tokens_per_second_per_device"))
    assert [rate and rate / of_one for rate, of_one in rates][1:] == pytest.approx([processes] * 11)
    assert "UserWarning" not in done.output and "FutureWarning" not in done.output


WARMUP = "--run.max_steps", 5, "--data.eval_source", "null"  # The learning rate of these steps is that of a longer run.


@pytest.mark.parametrize("case", ["2 share", "context, 3 share 4 heads"])
def test_begins_as_the_plain_loop(truth, runs, case):
    """A few steps. Every token is counted once."""
    _, did, tokens, _ = truth
    done = runs(case, *WARMUP)
    assert done.tokens[:5] == tokens[:5]
    np.testing.assert_allclose(done.losses, did.losses[:5], rtol=1e-6)
    np.testing.assert_allclose(done.logged("train/grad_norm"), did.grad_norms[:5], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("to, back", [("FSDP2", "4 share 2 key heads"), ("context, FSDP2", "context, 4 share")])
def test_checkpoint_moves(truth, runs, tmp_path, to, back):
    """From sequence parallelism with DDP to FSDP2 at step 4, to one process at step 8, and from one process back."""
    config, did, *_ = truth

    moved = runs(to, *resume_from(runs("DDP"), 4))
    check_continued(moved, did, 4)
    check_continued(run(tmp_path, config, *resume_from(moved, 8), "--run.output_dir", tmp_path / "one"), did, 8)
    one = run(tmp_path, config, "--run.output_dir", tmp_path / "whole")
    check_continued(runs(back, *resume_from(one, 8)), did, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, settings",
    [
        ("sp", ("--model.gradient_checkpointing", "true", "--model.chunked_loss", "true")),
        ("cp", ("--model.gradient_checkpointing", "true", "--model.chunked_loss", "true")),
        ("cp", ("--model.gradient_checkpointing", "selective")),
        ("sp", ("--eval.prompts", "some", "--eval.max_new_tokens", "4")),
        ("cp", ("--eval.prompts", "some", "--eval.max_new_tokens", "4")),
        ("sp", ("--batch.max_micro_batch_size", "auto")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[::2]),
)
def test_with_other_settings(truth, tmp_path, settings, way):
    config, did, *_ = truth
    done = launch(tmp_path, config, *settings, processes=2, **share(2, way))
    assert done.metrics[0]["plan/micro_batch_size"] == 10  # With auto: as many as one group has, and not a half.
    did.check(done)


@pytest.mark.slow
@pytest.mark.parametrize("way", FILES)
def test_compiled(truth, tmp_path, monkeypatch, way):
    """The lengths, which are others in each step, are not compiled again and again."""
    config, did, *_ = truth
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    settings = "--model.compile", "regional", "--model.gradient_checkpointing", "true"
    done = launch(tmp_path, config, *WARMUP, *settings, processes=2, timeout=600, **share(2, way) | {"warm": False})
    np.testing.assert_allclose(done.losses, did.losses[:5], rtol=1e-6)
    assert "recompile_limit" not in done.output and len(done.recompiled) <= 2 * 2 * 2


def windowed_model(folder: Path) -> Path:
    """Layers that see a window of 4 tokens only, and fewer key heads than ranks."""
    torch.manual_seed(1)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    found = transformers.MistralConfig(**heads, **shape, use_cache=False)
    transformers.AutoModelForCausalLM.from_config(found).save_pretrained(folder)
    return folder


LEARNED_POSITIONS = partial(tiny_model, learned_positions=True), 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, model, processes, rows",
    [
        ("sp", windowed_model, 4, ()),
        ("sp", *LEARNED_POSITIONS, ()),
        ("sp", windowed_model, 2, WHOLE_ROWS),
        ("cp", windowed_model, 3, ()),
        ("cp", windowed_model, 4, ()),
        ("cp", *LEARNED_POSITIONS, ()),
        ("cp", windowed_model, 2, WHOLE_ROWS),
    ],
)
def test_packed_documents_are_as_if_alone(tmp_path, way, model, processes, rows):
    """A document may begin on one rank and end on another, and see a window or positions that are learned."""
    config, pieces = packed_config(tmp_path, *rows)
    config["model"] = {"pretrained": str(model(tmp_path / "start"))}
    done = launch(tmp_path, config, processes=processes, **share(processes, way))
    train_reference(config, lambda step: pieces).check(done)


def shards(way: str, size: int, batch: MicroBatch) -> list[MicroBatch]:
    """What each rank of a group has of a micro-batch."""
    return [part_of_row(batch, Layout(**{way: size}), number, None) for number in range(size)]


def test_parts_of_a_row():
    """Together the ranks have each token once, in order, and as many each."""
    row = np.array([np.arange(5, 12), np.arange(6, 13), [0, 1, 2, 0, 1, 2, 3]])
    batch = collate([row], torch.device("cpu"), joined=True)
    parts = shards("sp", 4, batch)
    for name, filler in ("input_ids", 5), ("targets", -100), ("position_ids", 0):
        assert [getattr(part, name).shape for part in parts] == [(1, 2)] * 4
        assert torch.cat([getattr(part, name) for part in parts], 1).tolist() == [
            [*getattr(batch, name)[0].tolist(), filler]
        ]
    assert [part.learned.tolist() for part in parts] == [[0, 1]] * 3 + [[0]]  # Where it has a target.
    for part in parts:
        assert part.documents.lengths == (3, 4, 1) and part.documents.longest == 4
        assert part.documents.ends.tolist() == [0, 3, 7, 8] and part.documents.ends.dtype == torch.int32


def test_pieces_of_a_row():
    """Of 8 pieces, each of 4 ranks has two that are as far from the begin and from the end."""
    row = np.array([np.arange(5, 19), np.arange(6, 20), [*range(5), *range(9)]])
    batch = replace(collate([row], torch.device("cpu"), joined=True), source_ends={"one": 5, "other": 14})
    parts = shards("cp", 4, batch)
    assert [part.input_ids[0].tolist() for part in parts] == [
        [5, 6, 5, 5], [7, 8, 17, 18], [9, 10, 15, 16], [11, 12, 13, 14],
    ]  # fmt: skip
    assert parts[0].targets.tolist() == [[6, 7, -100, -100]] and parts[1].position_ids.tolist() == [[2, 3, 7, 8]]
    assert [part.learned.tolist() for part in parts] == [[0, 1]] + [[0, 1, 2, 3]] * 3
    # Of tokens 4 and 5, one ends the first document, and one begins the second one. Tokens 10 and 11 are in the latter.
    early, late = parts[2].documents.row_pieces
    assert (early.own.lengths, early.own.ends.tolist(), early.begin) == ((1, 1), [0, 1, 2], 0)
    assert (early.seen.lengths, early.seen.ends.tolist(), early.seen.longest) == ((5, 1), [0, 5, 6], 5)
    assert (late.own.lengths, late.begin, late.seen.lengths, late.own.longest) == ((2,), 5, (7,), 2)
    assert {part.ends.dtype for piece in (early, late) for part in (piece.own, piece.seen)} == {torch.int32}
    # The tokens of a rank are those of the first source before those of the other one, as in the row.
    assert [list(part.source_ends.values()) for part in parts] == [[2, 2], [2, 4], [1, 4], [0, 4]]


def test_parts_of_documents_that_are_rows():
    """Documents of one length, a multiple of 64, each have a row of a micro-batch. Ranks share them as joined ones."""
    rows = [np.tile(np.arange(64), (3, 1)) + np.array([[first], [first], [0]]) for first in (5, 105)]
    batch = collate(rows, torch.device("cpu"), joined=True)
    assert batch.input_ids.shape == (2, 64)
    for way, begins in ("sp", [[5, 37], [105, 137]]), ("cp", [[5, 137], [37, 105]]):
        parts = shards(way, 2, batch)
        assert [part.input_ids[0, [0, 32]].tolist() for part in parts] == begins
        assert all(torch.equal(part.position_ids, (part.input_ids - 5) % 100) for part in parts)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_ranks_have_as_much_to_compute(size):
    """In a document that is the whole row: the pairs of a query and a key that it sees. Undivided halves would not."""
    row = np.tile(np.arange(48), (3, 1))
    parts = shards("cp", size, collate([row], torch.device("cpu"), joined=True))
    work = []
    for part in parts:
        positions = part.position_ids[0] + 1
        assert sum(piece.seen.lengths[0] for piece in part.documents.row_pieces) == 48 + 48 / (2 * size)
        work.append(int(positions.sum()))
    assert work == [48 * 49 / 2 / size] * size


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_attention_of_the_pieces(monkeypatch, size, window):
    """Together it is that of the row, and so are its gradients, with fewer key heads than query heads."""
    torch.manual_seed(0)
    row = np.stack([np.arange(3, 40)] * 2 + [np.concatenate([np.arange(length) for length in (1, 19, 3, 3, 11)])])
    batch = collate([row], torch.device("cpu"), joined=True)
    count = math.ceil(37 / 2 / size) * 2 * size
    batch = lengthen(batch, count)
    query = torch.randn(1, 6, count, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, count, 8, requires_grad=True) for _ in range(2))
    module, options = SimpleNamespace(num_key_value_groups=3, is_causal=True), {"sliding_window": window}
    expected, _ = document_attention(module, query, key, value, None, batch.documents, **options)
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * direction).sum(), (query, key, value))

    monkeypatch.setattr(
        "samerun.model.attention.gather_row", lambda states, ranks: states
    )  # There are no other processes here.
    pieces, found = query.chunk(2 * size, dim=2), [None] * 2 * size
    for rank, part in enumerate(shards("cp", size, batch)):
        own = rank, 2 * size - 1 - rank
        queries = torch.cat([pieces[number] for number in own], dim=2)
        output, _ = document_attention(module, queries, key, value, None, part.documents, **options)
        for number, states in zip(own, output.chunk(2, dim=1)):
            found[number] = states
    found = torch.cat(found, dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    again = torch.autograd.grad((found * direction).sum(), (query, key, value))
    torch.testing.assert_close(again, gradients, rtol=0, atol=1e-5)


def config_of(length: int = 24, limit: int | str = 2) -> Config:
    return Config.model_construct(
        data=Data.model_construct(sequence_length=length),
        model=Model(pretrained="any"),
        optim=Optim(),
        eval=Eval(),
        batch=Batch(global_batch_size=8, max_micro_batch_size=limit),
    )


@pytest.mark.parametrize("way", FILES)
def test_who_shares_with_whom(monkeypatch, way):
    """Neighbours, which are on one machine. Each copy of the model under HSDP has groups of its own."""
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{way.upper()}_SIZE", "2")
    ranks = [layout_of(config_of(), 6, is_sharded=False, rank=rank) for rank in range(6)]
    assert [(one.data_parallel_rank, one.place("cp", "sp")) for one in ranks] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert {one.data_parallel_size for one in ranks} == {3}
    check_combination(ranks[0], config_of(), "no", None)
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    ranks = [layout_of(config_of(), 8, is_sharded=True, rank=rank) for rank in range(8)]
    assert [one.place("dp_replicate") for one in ranks] == [0] * 4 + [1] * 4
    assert [one.place("cp", "sp") for one in ranks] == [0, 1] * 4 and {one.shards for one in ranks} == {4}


@pytest.mark.parametrize("way", FILES)
def test_refused_launches(monkeypatch, way):
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{way.upper()}_SIZE", "2")
    with pytest.raises(UserError) as refusal:
        layout_of(config_of(), 3, is_sharded=False)
    assert str(refusal.value) == f"launch: parallelism_config_{way}_size 2: does not divide the 3 processes"
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    assert layout_of(config_of(), 4, is_sharded=True).shards == 4
    with pytest.raises(UserError) as refusal:
        layout_of(config_of(), 8, is_sharded=True)
    expected = "launch: parallelism_config_dp_shard_size is 2, but of 8 processes, 4 are left for it; leave it out"
    assert str(refusal.value) == expected


def test_copies_without_shards_are_refused(monkeypatch):
    """As of hsdp.yaml on 2 processes. Accelerate would advise to lower the size of tensor parallelism."""
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    with pytest.raises(UserError, match="parallelism_config_dp_replicate_size 2: is the number of processes, and then"):
        layout_of(config_of(), 2, is_sharded=True)
    assert layout_of(config_of(), 2, is_sharded=False).dp_replicate == 2  # DDP does not read it.
    monkeypatch.delenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE")
    assert layout_of(config_of(), 1, is_sharded=True).shards == 1  # FSDP2 on one process, to try it.


def test_shards_without_fsdp2_are_refused(monkeypatch):
    """DDP would leave out parallelism_config_dp_shard_size without a word, and give each process a whole model."""
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    with pytest.raises(UserError, match="launch: parallelism_config_dp_shard_size 4: needs FSDP2; take .*fsdp2.yaml"):
        layout_of(config_of(), 4, is_sharded=False)
    assert layout_of(config_of(), 4, is_sharded=True).shards == 4


def test_context_parallelism_refuses_auto(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    config = config_of(limit="auto")
    with pytest.raises(UserError, match="parallelism_config_cp_size 2: cannot be combined with batch.max_micro"):
        check_combination(layout_of(config, 2, is_sharded=False), config, "no", None)


def test_refused_in_both_ways(monkeypatch):
    for way in FILES:
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{way.upper()}_SIZE", "2")
    with pytest.raises(UserError, match="give parallelism_config_sp_size or parallelism_config_cp_size, not both"):
        layout_of(config_of(), 4, is_sharded=False)


def test_accelerate_knows_of_copies_and_shards_only(monkeypatch):
    """It would change the attention, and the matrices, for the rest of a launcher file."""
    assert groups_for_accelerate(Layout(is_sharded=True, dp_shard=2)) is None
    sizes = {"CP_SIZE": "4", "DP_SHARD_SIZE": "2", "DP_REPLICATE_SIZE": "3", "TP_SIZE": "5"}
    for name, size in sizes.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}", size)
    layout = layout_of(config_of(), 120, is_sharded=True)
    for has_section in "true", "false":  # Copies count in any case.
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", has_section)
        groups = groups_for_accelerate(layout)
        assert (groups.cp_size, groups.sp_size, groups.tp_size) == (1, 1, 1)
        assert (groups.dp_shard_size, groups.dp_replicate_size) == (40, 3)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    groups = groups_for_accelerate(Layout(dp_replicate=2, tp=4))
    assert (groups.dp_shard_size, groups.dp_replicate_size, groups.tp_size) == (1, 1, 1)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
SHORT_LONGROPE = LONGROPE | {"original_max_position_embeddings": 16}


@pytest.mark.parametrize("way", FILES)
@pytest.mark.parametrize(
    "size, change, attention, message",
    [
        (2, {}, "eager", "{way}_size 2 needs model.attention sdpa, and a model that works without padding"),
        (2, {"rope_parameters": SHORT_LONGROPE}, DOCUMENTS, "<= 16"),
        (2, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, DOCUMENTS, "<= 20"),
        (2, {"rope_parameters": {"full_attention": SHORT_LONGROPE}}, DOCUMENTS, "<= 16"),
        (2, {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 24}}, DOCUMENTS, None),
        (4, {}, DOCUMENTS, None),
    ],
)
def test_refused_models(way, size, change, attention, message):
    found = transformers.LlamaConfig(num_attention_heads=4, hidden_size=32, max_position_embeddings=20, **change)
    found._attn_implementation = attention
    check = partial(check_shared_rows, SimpleNamespace(config=found), config_of(), Layout(**{way: size}))
    if message is None:
        check()
    else:
        with pytest.raises(UserError, match=message.format(way=way)):
            check()


def test_models_without_a_rope_and_with_one_of_their_text():
    gpt2 = transformers.GPT2Config(attn_implementation=DOCUMENTS)
    check_shared_rows(SimpleNamespace(config=gpt2), config_of(), Layout(sp=2))
    text = transformers.LlamaConfig(rope_parameters=SHORT_LONGROPE)
    both = transformers.LlavaConfig(text_config=text, attn_implementation=DOCUMENTS)
    with pytest.raises(UserError, match="the rope of this llama needs data.sequence_length <= 16"):
        check_shared_rows(SimpleNamespace(config=both), config_of(), Layout(sp=2))


@pytest.mark.parametrize("way", ["sp", pytest.param("cp", marks=pytest.mark.slow)])
def test_refused_with_one_message(tmp_path, way):
    config = tiny_config(tmp_path)
    output = launch(tmp_path, config, "--model.attention", "eager", processes=2, expect=None, **share(2, way)).output
    [message] = re.findall("^error: .*", output, re.M)
    assert message.startswith(f"error: launch: parallelism_config_{way}_size 2 needs model.attention sdpa")
