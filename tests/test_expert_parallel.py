"""Expert parallelism is the run of a plain loop, too: ranks that have some experts each, and send each other tokens."""

import re
from functools import cache
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
    Done,
    check_continued,
    difference,
    launch,
    packed_config,
    resume_from,
    run,
    tiny_config,
)
from reference import shuffled, train_reference
from safetensors.torch import load_file

from samerun.config import Batch, Config, Eval, Model, Optim
from samerun.errors import UserError
from samerun.parallel.experts import check_experts
from samerun.parallel.layout import Layout, check_combination, layout_of

SCRIPT = ROOT / "tests" / "wrapper_cpu_as_gpu.py", ROOT / "train.py"
FSDP2 = {"launcher": "fsdp2", "options": ("--mixed_precision", "no"), "script": SCRIPT, "warm": True}
# 4 experts, of which each token has 2. Qwen3-MoE divides by the sum of their weights only if asked, and is tied here.
MODELS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "tie_word_embeddings": True},
}


def mixture(folder: Path, name: str, **change) -> Path:
    """A tiny model of this family, whose norms are not all the same numbers."""
    torch.manual_seed(1)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"use_cache": False, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    found = transformers.AutoConfig.for_model(name, **shape | heads | tokens | MODELS.get(name, {}) | change)
    model = transformers.AutoModelForCausalLM.from_config(found)
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """truth(model): the config of all cases with this model, and the plain loop's result for it."""

    @cache
    def result(name: str):
        folder = tmp_path_factory.mktemp("experts")
        config = tiny_config(folder)
        config["run"] |= {"max_steps": 12, "eval_every": 6, "save_every": 4, "keep_checkpoints": 3}
        config["model"]["pretrained"] = str(mixture(folder / "model", name))
        rows, held_out = (list(datasets.load_from_disk(folder / part)) for part in ("rows", "held-out"))
        order = shuffled(config["run"]["seed"], len(rows), 120)
        rows_of = lambda step: [rows[i] for i in order[step * 10 - 10 : step * 10]]  # noqa: E731
        did = train_reference(config, rows_of, held_out, eval_every=6)
        assert 2 < sum(norm > config["optim"]["max_grad_norm"] for norm in did.grad_norms)
        did.model.save_pretrained(folder / "end")  # In the files of a Mixtral, each expert has matrices of its own.
        did.weights = load_file(folder / "end" / "model.safetensors")
        return config, did

    return result


# Model, processes, how many of them divide the experts, rows of a pass, and settings. 10 rows on 4 ranks are 3 for
# some and 2 for others: one row at a time, the others have a pass without a row.
DEFERRED = "--batch.accumulation", "deferred"
IMMEDIATE = "--batch.accumulation", "immediate"
CHUNKED = "--model.chunked_loss", "true"
CHECKPOINTING = "--model.gradient_checkpointing", "true"
SELECTIVE = "--model.gradient_checkpointing", "selective"
CASES = {
    "2": ("mixtral", 2, 2, 3, DEFERRED),
    "2, Qwen3": ("qwen3_moe", 2, 2, 2, (*IMMEDIATE, *CHUNKED)),
    "4": ("qwen3_moe", 4, 4, 1, (*DEFERRED, *CHECKPOINTING)),
    "2 x 2": ("mixtral", 4, 2, 1, (*DEFERRED, *CHUNKED)),
    "2 x 2, Qwen3": ("qwen3_moe", 4, 2, 2, (*IMMEDIATE, *SELECTIVE)),
}


@pytest.fixture(scope="module")
def runs(truth, tmp_path_factory):
    """runs(case, *settings): the finished run of a case. Each is made once."""

    @cache
    def result(case: str, *more, warm: bool = True) -> Done:
        name, processes, ranks, limit, settings = CASES[case]
        sizes = "--model.expert_ranks", ranks, "--batch.max_micro_batch_size", limit
        folder = tmp_path_factory.mktemp("run")
        done = launch(folder, truth(name)[0], *sizes, *settings, *more, **FSDP2 | {"warm": warm}, processes=processes)
        assert done.metrics[0]["plan/data_parallel_size"] == processes
        return done

    return result


def check(truth, done: Done, case: str) -> None:
    """With clipping, uneven batches and evaluation. Every token is counted once, and the export loads as ever."""
    _, did = truth(CASES[case][0])
    did.check(done)
    assert done.logged("train/target_tokens") == list(accumulate(did.targets))
    evaluated = {line["step"]: line["eval/loss"] for line in done.metrics if "eval/loss" in line}
    assert evaluated == pytest.approx(did.eval_losses, rel=5e-7)
    assert "Warning" not in done.output and "W1" not in done.output
    model = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model")
    ids = torch.arange(24)[None]
    torch.testing.assert_close(model(ids).logits, did.model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_loop(truth, runs, case):
    check(truth, runs(case), case)


def test_begins_as_the_plain_loop(truth, runs):
    """A few steps, in which the learning rate is that of the longer run."""
    did, done = truth("mixtral")[1], runs("2", "--run.max_steps", 5, "--data.eval_source", "null")
    np.testing.assert_allclose(done.losses, did.losses[:5], rtol=1e-6)
    np.testing.assert_allclose(done.logged("train/grad_norm"), did.grad_norms[:5], rtol=1e-5)


@pytest.mark.slow
def test_by_the_real_command(truth, runs):
    check(truth, runs("2 x 2", warm=False), "2 x 2")


@pytest.mark.slow
def test_checkpoint_moves(truth, runs, tmp_path):
    """From DDP to two ranks that divide the experts, to 2 x 2, to FSDP2, to one process, and from there to 2 x 2."""
    config, did = truth("mixtral")

    def go_on(done: Done, step: int, *settings, **how) -> Done:
        folder = tmp_path / f"{done.folder.parent.name}-{step}-{len(how)}"
        settings = *resume_from(done, step), "--run.output_dir", folder, *settings
        moved = launch(tmp_path, config, *settings, "--run.save_every", 2, "--run.keep_checkpoints", 9, **how)
        check_continued(moved, did, step)
        return moved

    divided = "--model.expert_ranks", 2
    first = launch(tmp_path, config, processes=2, warm=True)
    check_continued(first, did, 0)
    shared = go_on(first, 4, *divided, processes=2, **FSDP2)
    both = go_on(shared, 6, *divided, processes=4, **FSDP2)
    sharded = go_on(both, 8, processes=2, **FSDP2)
    go_on(sharded, 10, processes=None, warm=True)
    go_on(first, 8, *divided, processes=4, **FSDP2)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_packed_documents_are_as_if_alone(tmp_path, processes):
    config, pieces = packed_config(tmp_path)
    config["model"] = {"pretrained": str(mixture(tmp_path / "model", "mixtral")), "expert_ranks": 2}
    done = launch(tmp_path, config, processes=processes, **FSDP2)
    did = train_reference(config, lambda step: pieces)
    did.model.save_pretrained(tmp_path / "end")
    did.weights = load_file(tmp_path / "end" / "model.safetensors")
    did.check(done)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0, "eos_token_id": 1}
OLMOE = SMALL | {"model_type": "olmoe", "intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 1}
# Its experts have biases, and its attention is that of eager.
GPT_OSS = SMALL | {"model_type": "gpt_oss", "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS |= {"head_dim": 8, "num_key_value_heads": 2}
# The first layer has no experts, and in the other one all tokens also have one in common.
DENSE_FIRST = SMALL | {
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
DENSE_FIRST |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
GLM4 = DENSE_FIRST | {"model_type": "glm4_moe", "num_key_value_heads": 2}
DEEPSEEK = DENSE_FIRST | {"model_type": "deepseek_v3", "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 8}
DEEPSEEK |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "num_key_value_heads": 4}
PROMPTS = "--eval.prompts", "some", "--eval.max_new_tokens", 4
GATHERED = {"options": (*FSDP2["options"], "--fsdp_reshard_after_forward", "false")}
EAGER = "--model.attention", "eager"


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, processes, ranks, settings, how",
    [
        (OLMOE, 3, 3, (), {}),
        (OLMOE, 4, 2, PROMPTS, GATHERED),
        (OLMOE, 2, 2, EAGER, {}),
        (GPT_OSS, 4, 2, EAGER, {}),
        (GLM4, 4, 4, SELECTIVE, {}),  # Its layers go on after the experts.
        (DEEPSEEK, 4, 2, (), {}),
    ],
    ids=["OLMoE by 3", "OLMoE, prompts", "OLMoE, eager", "gpt-oss", "GLM-4", "DeepSeek-V3"],
)
def test_is_the_run_of_one_process(tmp_path, architecture, processes, ranks, settings, how):
    """From scratch."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 10
    config["model"] = {"architecture": architecture}
    config["batch"]["max_micro_batch_size"] = 3
    one = run(tmp_path, config, *settings, "--run.output_dir", tmp_path / "one")
    done = launch(tmp_path, config, *settings, "--model.expert_ranks", ranks, **FSDP2 | how, processes=processes)
    np.testing.assert_allclose(done.losses, one.losses, rtol=1e-6)
    np.testing.assert_allclose(done.logged("train/grad_norm"), one.logged("train/grad_norm"), rtol=1e-5)
    assert difference(done.weights, one.weights) < 1e-5


@pytest.mark.slow
def test_bf16_is_that_of_fsdp2(truth, tmp_path):
    """In bf16 the first loss is that of FSDP2 alone, where float32 says how much an expert counts for a token, and the
    others are as near to float32. Weights and moments stay float32."""
    config, did = truth("mixtral")
    off, first = {}, {}
    for ranks in 1, 2:
        how = FSDP2 | {"options": (), "processes": 2}
        folder = "--run.output_dir", tmp_path / f"{ranks}"
        done = launch(tmp_path, config, "--run.max_steps", 10, "--model.expert_ranks", ranks, *folder, **how)
        for path in done.folder.glob("checkpoints/*/*.safetensors"):
            assert {value.dtype for value in load_file(path).values()} == {torch.float32}
        off[ranks] = np.abs(np.subtract(done.losses[:5], did.losses[:5])).max()
        first[ranks] = done.losses[0]
    assert 1e-6 < off[2] < 2 * off[1] + 1e-4
    assert first[2] == pytest.approx(first[1], rel=1e-6)


def checked(processes: int, precision: str = "no", plugin: dict | None = None, **sections) -> Layout:
    """What a launch of FSDP2 with 2 ranks for the experts checks before it has a model."""
    asked = {"cpu_ram_efficient_loading": False, "cpu_offload": None}
    asked |= plugin or {}
    config = Config.model_construct(
        model=Model(pretrained="any", **{"expert_ranks": 2} | sections.get("model", {})),
        batch=Batch(global_batch_size=8, **sections.get("batch", {})),
        optim=Optim(**sections.get("optim", {})),
        eval=Eval(),
    )
    layout = layout_of(config, processes, is_sharded=True)
    check_combination(layout, config, precision, SimpleNamespace(**asked))
    return layout


@pytest.mark.parametrize(
    "launched, message",
    [
        ({"processes": 3}, "model.expert_ranks 2: does not divide the 3 processes"),
        ({"model": {"pipeline_ranks": 4}}, "model.expert_ranks 2: does not divide the 1 processes that have the same"),
        ({"model": {"lora": {"r": 4}}}, "combined with model.lora"),
        ({"model": {"compile": "regional"}}, "combined with model.compile"),
        ({"precision": "fp8"}, "combined with mixed_precision fp8"),
        ({"batch": {"max_micro_batch_size": "auto"}}, "combined with batch.max_micro_batch_size auto"),
        ({"optim": {"name": "muon"}}, "optim.name muon: it needs whole matrices"),
        ({"plugin": {"cpu_ram_efficient_loading": True}}, "fsdp_cpu_ram_efficient_loading"),
    ],
)
def test_refused_settings(launched, message):
    with pytest.raises(UserError, match=message):
        checked(**{"processes": 4} | launched)


def test_among_whom(monkeypatch):
    """Experts may be divided among all ranks that have the same layers, as long as those of tp stay together."""
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    layout = checked(processes=4, model={"expert_ranks": 4})
    assert layout.shards == 4 and layout.is_divided
    with monkeypatch.context() as patch, pytest.raises(UserError, match="does not divide the 4 processes that"):
        patch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
        checked(processes=8, model={"expert_ranks": 8})
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    with pytest.raises(UserError, match="model.expert_ranks 2: must be a multiple of parallelism_config_tp_size 4"):
        checked(processes=8)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("llama", {}, "transformers has no plan how ranks divide experts of a llama; use 1"),
        ("mixtral", {"num_local_experts": 6}, "does not divide the 6 experts of this mixtral"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "transformers has no plan how ranks divide experts of a qwen3_moe"),
    ],
    ids=["dense", "six experts", "no layer with experts"],
)
def test_refused_models(tmp_path, name, change, message):
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture(tmp_path, name, **change))
    with pytest.raises(UserError, match=f"model.expert_ranks 4: {message}"):
        check_experts(model, 4, "model.expert_ranks 4")


def test_refused_if_a_weight_would_stay_whole(tmp_path):
    """The ranks would train it on different tokens, and nobody would average its gradients."""
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture(tmp_path, "mixtral"))
    model.model.layers[1].mlp.experts.scale = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(UserError, match="the plan of a mixtral leaves model.layers.1.mlp.experts.scale whole"):
        check_experts(model, 2, "model.expert_ranks 2")


def test_refused_without_fsdp2(tmp_path):
    done = run(tmp_path, tiny_config(tmp_path), "--model.expert_ranks", 2, expect=2)
    [message] = re.findall("^error: .*", done.output, re.M)
    assert message == "error: model.expert_ranks: needs FSDP2; take accelerate_configs/fsdp2.yaml, or use 1"


def test_plan(tmp_path, monkeypatch):
    """Each process has rows of its own. A model whose experts cannot be divided is told so, or that it has none."""
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items():
        monkeypatch.setenv(name, value)
    settings = "--plan", 4, 3, "--perf.device_memory_gib", 1, "--model.expert_ranks"
    planned = run(tmp_path, tiny_config(tmp_path), *settings, 1).output
    assert re.search(r"^ *4 +4 +10 ", planned, re.M) and "GiB per device, FSDP2" in planned
    output = run(tmp_path, tiny_config(tmp_path / "other"), *settings[:2], *settings[3:], 2).output
    assert re.search(r"^ *4 +4 +10 ", output, re.M)
    assert "the config of a llama names no number of experts that ranks could divide" in output
    uneven = tiny_config(tmp_path / "uneven")
    uneven["model"]["pretrained"] = str(mixture(tmp_path / "mixtral", "mixtral", num_local_experts=6))
    output = run(tmp_path, uneven, *settings[:2], *settings[3:], 4).output
    assert "4 ranks cannot evenly divide 6 experts of a mixtral" in output and "GiB" not in output
    refused = run(tmp_path, tiny_config(tmp_path / "refused"), *settings, 2, expect=2).output
    assert "model.expert_ranks 2: does not divide the 3 processes" in refused


# As if an expert's weights counted twice on the rank that has them.
DOUBLED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import train
from samerun.parallel import experts
divide = experts.apply_expert_parallelism
def doubled(model, *meshes, **more):
    divide(model, *meshes, **more)
    for name, parameter in model.named_parameters():
        if name.endswith("down_proj"):
            parameter.data *= 2
experts.apply_expert_parallelism = doubled
sys.exit(train.main())
"""


@pytest.mark.slow
def test_refused_if_groups_cannot_share(tmp_path):
    """3 groups, and matrices of 32 rows."""
    config = tiny_config(tmp_path)
    config["model"] = {"pretrained": str(mixture(tmp_path / "model", "mixtral")), "expert_ranks": 2}
    output = launch(tmp_path, config, processes=6, expect=None, **FSDP2).output
    [found] = re.findall("^error: .*", output, re.M)
    assert found.startswith("error: model.expert_ranks: 3 groups of ranks cannot share the experts: ")


@pytest.mark.slow
def test_refused_by_its_behaviour(tmp_path):
    config = tiny_config(tmp_path)
    config["model"] = {"pretrained": str(mixture(tmp_path / "model", "mixtral")), "expert_ranks": 2}
    script = tmp_path / "fork.py"
    script.write_text(DOUBLED)
    how = FSDP2 | {"script": (SCRIPT[0], script)}
    output = launch(tmp_path, config, processes=2, expect=None, **how).output
    [found] = re.findall("^error: .*", output, re.M)
    assert re.fullmatch("error: launch: divided as dp_shard 2 x ep 2, a mixtral computes another .*; take FSDP2", found)
