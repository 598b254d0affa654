"""Pipeline parallelism is the run of a plain loop, too: ranks that have some of the layers each."""

import functools
import gzip
import json
import re
from collections import Counter
from functools import cache
from itertools import accumulate

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
    loss_of_run,
    packed_config,
    resume_from,
    run,
    tiny_config,
)
from reference import shuffled, train_reference

from samerun.config import Batch, Config, Eval, Model, Optim
from samerun.data.batches import collate
from samerun.errors import UserError
from samerun.model.attention import DOCUMENTS
from samerun.model.build import make_model
from samerun.parallel.layout import check_combination, layout_of
from samerun.parallel.pipeline import check_layers, divide_layers, keep_only

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """The config of all cases, with a tied model of 4 layers, and the plain loop's result for it."""
    folder = tmp_path_factory.mktemp("pipeline")
    config = tiny_config(folder)
    torch.manual_seed(1)
    found = transformers.Qwen3Config(**SHAPE, **TOKENS, num_hidden_layers=4, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(found).save_pretrained(folder / "start")
    config["run"] |= {"max_steps": 12, "eval_every": 6, "save_every": 4, "keep_checkpoints": 3}
    config["optim"]["max_grad_norm"] = 1.1
    rows, held_out = (list(datasets.load_from_disk(folder / name)) for name in ("rows", "held-out"))
    order = shuffled(config["run"]["seed"], len(rows), 120)
    rows_of = lambda step: [rows[i] for i in order[step * 10 - 10 : step * 10]]  # noqa: E731
    did = train_reference(config, rows_of, held_out, eval_every=6)
    assert 2 < sum(norm > config["optim"]["max_grad_norm"] for norm in did.grad_norms) < 12
    tokens = [sum(len(rows[i]["input_ids"]) for i in order[: 10 * step]) for step in range(1, 13)]
    return config, did, tokens


def pipeline(ranks: int, *more) -> tuple:
    return "--model.pipeline_ranks", ranks, "--batch.max_micro_batch_size", 3, *more


INTERLEAVED = "--model.pipeline_schedule", "Interleaved1F1B"
# Processes and settings; then how many pipelines share the 10 rows of a step, in how many passes, and the share of the
# time in which a rank waits: (ranks - 1) / (stages per rank x passes + ranks - 1).
CASES = {
    # 11 passes evaluate, of which 8 go through the pipeline behind each other.
    "2 ranks": (
        2,
        pipeline(2, "--batch.max_micro_batch_size", 1),
        {"data_parallel_size": 1, "grad_accum_steps": 10, "bubble": 1 / 11},
    ),
    "4 ranks, chunked loss": (
        4,
        pipeline(4, "--model.chunked_loss", "true"),
        {"data_parallel_size": 1, "grad_accum_steps": 4, "bubble": 3 / 7},
    ),
    "interleaved": (2, pipeline(2, *INTERLEAVED), {"grad_accum_steps": 4, "bubble": 1 / 9}),
    "DDP": (4, pipeline(2), {"data_parallel_size": 2, "grad_accum_steps": 2, "bubble": 1 / 3}),
    "DDP, interleaved, checkpointing": (
        4,
        pipeline(2, *INTERLEAVED, "--model.gradient_checkpointing", "selective"),
        {"data_parallel_size": 2, "grad_accum_steps": 2, "bubble": 1 / 5},
    ),
}
CASES |= {
    "FSDP2": (4, pipeline(2), CASES["DDP"][2]),
    "FSDP2, interleaved, chunked loss": (
        4,
        pipeline(2, *INTERLEAVED, "--model.chunked_loss", "true"),
        CASES["DDP, interleaved, checkpointing"][2],
    ),
}
AS_GPU = {
    "launcher": "fsdp2",
    "options": ("--mixed_precision", "no"),
    "script": (ROOT / "tests" / "wrapper_cpu_as_gpu.py", ROOT / "train.py"),
}


@pytest.fixture(scope="module")
def runs(truth, tmp_path_factory):
    """runs(case, *settings): the finished run of a case. Each is made once."""

    @cache
    def result(case: str, *more) -> Done:
        processes, settings, plan = CASES[case]
        how = AS_GPU if case.startswith("FSDP2") else {}
        folder = tmp_path_factory.mktemp("run")
        done = launch(folder, truth[0], *settings, *more, processes=processes, warm=True, **how)
        assert {name: done.metrics[0][f"plan/{name}"] for name in plan} == pytest.approx(plan)
        return done

    return result


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_loop(truth, runs, case):
    """With clipping, uneven batches, tied embeddings and evaluation. Every token is counted once."""
    _, did, tokens = truth
    done, processes = runs(case), CASES[case][0]
    did.check(done)
    assert done.logged("train/target_tokens") == list(accumulate(did.targets))
    assert done.tokens == tokens
    evaluated = {line["step"]: line["eval/loss"] for line in done.metrics if "eval/loss" in line}
    assert evaluated == pytest.approx(did.eval_losses, rel=5e-7)
    rates = zip(done.logged("perf/tokens_per_second"), done.logged("perf/tokens_per_second_per_device"))
    assert [rate and rate / of_one for rate, of_one in rates][1:] == pytest.approx([processes] * 11)
    [shown] = done.logged("summary/bubble")
    assert shown == pytest.approx(CASES[case][2]["bubble"])
    assert "bubble" in done.output and "Warning" not in done.output
    loaded = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model")
    assert loaded.num_parameters() == did.model.num_parameters()


WARMUP = "--run.max_steps", 5, "--data.eval_source", "null"  # The learning rate of these steps is that of a longer run.


def test_begins_as_the_plain_loop(truth, runs):
    """A few steps."""
    did, done = truth[1], runs("interleaved", *WARMUP)
    np.testing.assert_allclose(done.losses, did.losses[:5], rtol=1e-6)
    np.testing.assert_allclose(done.logged("train/grad_norm"), did.grad_norms[:5], rtol=1e-5)


@pytest.mark.slow
def test_checkpoint_moves(truth, runs, tmp_path):
    """From DDP to another pipeline at step 4, to FSDP2 at step 8 and to one process, and from one process back."""
    config, did, *_ = truth

    moved = runs("4 ranks, chunked loss", *resume_from(runs("DDP"), 4))
    check_continued(moved, did, 4)
    check_continued(runs("FSDP2", *resume_from(moved, 8)), did, 8)
    alone = run(tmp_path, config, *resume_from(runs("FSDP2"), 8), "--run.output_dir", tmp_path / "one")
    check_continued(alone, did, 8)
    one = run(tmp_path, config, "--run.output_dir", tmp_path / "whole")
    check_continued(runs("interleaved", *resume_from(one, 8)), did, 8)


@pytest.mark.slow
@pytest.mark.parametrize("processes, rows", [(2, ()), (4, ()), (2, WHOLE_ROWS)])
def test_packed_documents_are_as_if_alone(tmp_path, processes, rows):
    config, pieces = packed_config(tmp_path, *rows)
    done = launch(tmp_path, config, *pipeline(2), processes=processes, warm=True)
    train_reference(config, lambda step: pieces).check(done)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, each, times",
    [("FSDP2", "deferred", 3), ("FSDP2", "immediate", 6), ("FSDP2, interleaved, chunked loss", "deferred", 3)],
)
def test_how_often_fsdp2_averages(truth, runs, case, each, times):
    """The two layers of a rank, and what is in none of them: once per step, or in each of its 2 micro-steps."""
    done = runs(case, "--batch.accumulation", each, "--perf.profile_steps", "[2, 2]")
    truth[1].check(done)
    with gzip.open(done.folder / "profile.json.gz") as file:
        names = Counter(event.get("name") for event in json.load(file)["traceEvents"])
    assert names["c10d::_reduce_scatter_base_"] == times


@pytest.mark.slow
def test_compiled(truth, tmp_path):
    config, did, *_ = truth
    steps = "--run.max_steps", 5, "--data.eval_source", "null", "--model.compile", "regional"
    done = launch(tmp_path, config, *pipeline(2), *steps, processes=2, timeout=600)
    np.testing.assert_allclose(done.losses, did.losses[:5], rtol=1e-6)
    assert "recompile_limit" not in done.output


def small_model(kind: str, **more):
    torch.manual_seed(1)
    common = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    found = transformers.AutoConfig.for_model(
        kind, **SHAPE | common | {"num_hidden_layers": 4, "use_cache": False} | more
    )
    return make_model(Model(), found, 0, seed=3)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "mistral", "gemma3_text", "mixtral", "olmo2", "phi3", "smollm3", "cohere"]
)
def test_chunks_make_the_whole_model(kind, chunked):
    """The loss and all gradients, of models whose layers differ, and of those that scale or bound their logits."""
    model = small_model(kind).eval()
    rng = np.random.default_rng(0)
    rows = [np.stack([ids, np.append(ids[1:], -100), np.arange(len(ids))]) for ids in rng.integers(3, 97, (3, 9))]
    batch = collate(rows, model.device, joined=True)
    loss_of_run()(model, batch)[0].backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    states = None
    for chunk in divide_layers(model, 3, functools.partial(loss_of_run(), chunked=chunked), "model.pipeline_ranks 3"):
        chunk.micro_batches, chunk.scale = [batch], 1.0
        states = chunk(states, torch.tensor([0]))
    states.sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("layers, most", [(9, 3), (7, 3), (10, 4)])
def test_ranks_have_as_many_layers(layers, most):
    """Three ranks, of two chunks each, as --plan counts their memory."""
    model = small_model("llama", num_hidden_layers=layers)
    sizes = [len(chunk.numbers) for chunk in divide_layers(model, 6, loss_of_run(), "model.pipeline_ranks 3")]
    of_ranks = [sizes[rank] + sizes[rank + 3] for rank in range(3)]
    assert sum(of_ranks) == layers and max(of_ranks) == most and min(of_ranks) >= most - 1


@pytest.mark.slow
def test_lengths_that_change(tmp_path):
    """10 rows are 128 tokens or 256, and what is passed on is as long. Each length comes back after the other."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 10
    config["batch"] = {"global_batch_size": 20, "max_micro_batch_size": 10}
    one = run(tmp_path, config, "--run.output_dir", tmp_path / "one")
    done = launch(tmp_path, config, *pipeline(2, "--batch.max_micro_batch_size", 10), processes=2, warm=True)
    np.testing.assert_allclose(done.losses, one.losses, rtol=1e-6)
    passed = np.diff(done.tokens, prepend=0) / 2
    assert passed.min() < 128 < passed.max()


@pytest.mark.parametrize(
    "kind, more, message",
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "transformers has no plan how a gpt2 is divided"),
        ("hunyuan_v1_dense", {"head_dim": 8}, "transformers has no plan how a hunyuan_v1_dense is divided"),
        ("granite", {"embedding_multiplier": 12.0}, "a granite computes another loss when its layers are divided"),
        ("starcoder2", {"embedding_dropout": 0.5}, "a starcoder2 has dropout outside of its layers"),
    ],
)
def test_refused_models(kind, more, message):
    with pytest.raises(UserError, match=message):
        check_layers(small_model(kind, **more), 3, loss_of_run(), "model.pipeline_ranks 3")


def config_of(**sections) -> Config:
    """That of 2 ranks."""
    return Config.model_construct(
        model=Model(pretrained="any", pipeline_ranks=2, **sections.get("model", {})),
        batch=Batch(global_batch_size=8, **{"max_micro_batch_size": 1} | sections.get("batch", {})),
        eval=Eval(**sections.get("eval", {})),
        optim=Optim(),
    )


def test_who_is_in_which_pipeline():
    """Ranks with the same layers are neighbours, which are on one machine."""
    ranks = [layout_of(config_of(), 6, is_sharded=False, rank=rank) for rank in range(6)]
    places = [(one.place("pp"), one.data_parallel_rank) for one in ranks]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert {one.data_parallel_size for one in ranks} == {3}
    check_combination(ranks[0], config_of(), "no", None)


@pytest.mark.parametrize(
    "launched, message",
    [
        ({"model": {"compile": "full"}}, "cannot be combined with model.compile full: .* use regional"),
        ({"model": {"lora": {"r": 4}}}, "cannot be combined with model.lora"),
        (
            {"batch": {"max_micro_batch_size": "auto"}},
            "cannot be combined with batch.max_micro_batch_size auto: .*give a number",
        ),
        ({"precision": "fp8"}, "cannot be combined with mixed_precision fp8"),
        ({"eval": {"prompts": ["some"]}}, "cannot be combined with eval.prompts"),
    ],
)
def test_refused_settings(launched, message):
    config = config_of(**launched)
    with pytest.raises(UserError, match=f"model.pipeline_ranks 2: .*{message}"):
        check_combination(layout_of(config, 2, is_sharded=False), config, launched.get("precision", "no"), None)


def test_refused_with_one_message(tmp_path):
    output = launch(tmp_path, tiny_config(tmp_path), *pipeline(2), processes=3, expect=None, warm=True).output
    [message] = re.findall("^error: .*", output, re.M)
    assert message == "error: model.pipeline_ranks 2: does not divide the 3 processes"


def test_the_bias_of_a_tied_output_layer_is_the_last_ranks():
    """Only the last rank has its gradient. The first one would keep an old copy, and export it."""
    shape = {name: size for name, size in SHAPE.items() if name != "head_dim"}
    config = transformers.PhiConfig(**shape, **TOKENS, num_hidden_layers=2, tie_word_embeddings=True)
    model = transformers.PhiForCausalLM(config)
    model.config._attn_implementation = DOCUMENTS
    first, _ = divide_layers(model, 2, loss_of_run(), "")
    keep_only(model, [first])
    assert model.lm_head.bias.is_meta and model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.is_meta
