"""Model families: documents that share a row are as if alone, and a step reads nothing on the host."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from helpers import (
    VOCABULARY,
    loss_of_run,
    make_rows,
    resume_from,
    rows_by_use,
    run,
    tiny_config,
    tiny_model,
    write_rows,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

import train
from samerun.config import Config, Data, Model
from samerun.data.batches import collate
from samerun.data.rows import Dataset, longest_row
from samerun.errors import UserError
from samerun.model.architecture import check_architecture, model_config, shapes_weights
from samerun.model.attention import DOCUMENTS, attention, document_attention
from samerun.model.build import (
    compile_model,
    flops_per_token,
    has_known_layers,
    make_model,
    outlined_model,
)
from samerun.model.checks import (
    allows_chunks,
    check_loss,
    check_rope,
    check_selective,
    draws_random_numbers,
    is_same_loss,
    probe_batch,
    settle_attention,
    settle_model,
    what_leaks,
)
from samerun.model.lora import add_lora
from samerun.model.loss import chunk_size, joins_documents, model_inputs, wants_chunks
from samerun.model.recompute import KEPT, keeps, recompute_layers
from samerun.model.small import model_to_try
from samerun.model.tokenizer import use_special_tokens
from samerun.plan import Stage
from samerun.run.launch import silence_libraries

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OLD_SHAPE = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
FULL = {  # Attention that is causal and nothing else.
    "llama": SHAPE,
    "qwen2": SHAPE,
    "qwen3": SHAPE | {"head_dim": 8},
    "phi3": SHAPE,
    "phi": SHAPE,
    "olmo2": SHAPE,
    "granite": SHAPE,
    "gemma": SHAPE | {"head_dim": 8},
    "glm": SHAPE | {"head_dim": 8},
    "gpt_neox": SHAPE,
    "cohere": SHAPE,
    "mixtral": SHAPE | {"num_local_experts": 2},
    "mistral": SHAPE | {"sliding_window": None},
    "opt": SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": OLD_SHAPE,
}
PARTLY = {  # Layers that see a window only.
    "mistral with a window": ("mistral", SHAPE | {"sliding_window": 4}),
    "qwen2 with a window": ("qwen2", SHAPE | {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}),
    "gemma3": ("gemma3_text", SHAPE | {"head_dim": 8, "sliding_window": 4}),
    "cohere2": ("cohere2", SHAPE | {"sliding_window": 4}),
    "olmo3": ("olmo3", SHAPE | {"sliding_window": 4}),
    "starcoder2": ("starcoder2", SHAPE | {"sliding_window": 4}),
}
CASES = (
    {name: (name, shape, "sdpa") for name, shape in FULL.items()}
    | {name: (family, shape, "sdpa") for name, (family, shape) in PARTLY.items()}
    | {
        "llama, eager": ("llama", SHAPE, "eager"),
        "llama, flex": ("llama", SHAPE, "flex_attention"),
        "gemma2, eager": ("gemma2", SHAPE | {"head_dim": 8, "sliding_window": 4}, "eager"),
        "mistral with a window, eager": (*PARTLY["mistral with a window"], "eager"),
        "nemotron, which does not tell its attention the documents": ("nemotron", SHAPE, "sdpa"),
    }
)
PADDED = "nemotron, which does not tell its attention the documents"


def test_flash_attention_of_transformers_is_told_the_documents():
    """In its own words. That it then keeps them apart, only a GPU can show."""
    batch = collate([as_row(np.arange(3), np.arange(2)), as_row(np.arange(4))], torch.device("cpu"), joined=True)
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="flash_attention_2"))
    assert joins_documents(model)
    inputs = model_inputs(model, batch)
    ends = inputs["cu_seq_lens_q"]
    assert ends.tolist() == [0, 3, 5, 9] and ends.dtype == torch.int32 and inputs["cu_seq_lens_k"] is ends
    assert inputs["max_length_q"] == inputs["max_length_k"] == 4 and "documents" not in inputs
    whole = collate([as_row(np.arange(64)), as_row(np.arange(64))], torch.device("cpu"), joined=True)
    inputs = model_inputs(model, whole)  # Kernels of linear attention take only a single row with its ends.
    assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, 128)
    assert inputs["cu_seq_lens_q"].tolist() == [0, 64, 128]


def build(name: str, shape: dict, attention: str) -> torch.nn.Module:
    found = transformers.AutoConfig.for_model(name, use_cache=False, **shape)
    model = make_model(Model(attention=attention), found, 0, seed=3).eval()
    with torch.no_grad():  # At their first values some families hardly look at other tokens.
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name, more", [("llama", {}), ("mistral", {"sliding_window": 4})])
def test_a_pass_without_documents_is_refused(name, more):
    """As the own loss of a fork may make it: transformers leaves out all masks, those of padding and windows, too."""
    model = build(name, SHAPE | more, "sdpa")
    ids, mask = torch.arange(24).view(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0  # Padded on the left.
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with pytest.raises(UserError, match="called without documents.*what model_inputs.. returns.*'sdpa'"):
        model(**inputs, use_cache=False)
    with attention(model, "sdpa"):
        found = model(**inputs, use_cache=False).logits
    with attention(model, "eager"):
        alone = model(input_ids=ids[:1, 5:], use_cache=False).logits
    assert torch.allclose(found[:1, 5:], alone, atol=1e-5)


FLEX = pytest.param("llama, flex", marks=pytest.mark.slow)  # It is compiled.


def as_row(*documents: np.ndarray) -> np.ndarray:
    """A row as of train.Dataset.read()."""
    ids = np.concatenate(documents)
    targets = np.concatenate([[*document[1:], -100] for document in documents])
    return np.stack([ids, targets, np.concatenate([np.arange(len(document)) for document in documents])])


def losses(model: torch.nn.Module, rows: list[np.ndarray]) -> torch.Tensor:
    batch = collate(rows, torch.device("cpu"), joins_documents(model))
    return loss_of_run()(model, batch)[0]


@pytest.mark.parametrize("rows", [((5, 1, 6, 6), (7,)), ((64,), (64,))])
@pytest.mark.parametrize("case", [FLEX if case == "llama, flex" else case for case in CASES])
def test_documents_of_a_micro_batch_are_as_if_alone(case, rows):
    """Rows of documents of these lengths, against each document in a batch of its own by the family's own eager
    attention. A model that lets them see each other would be off by 0.1 and more."""
    name, shape, attention = CASES[case]
    model, rng = build(name, shape, attention), np.random.default_rng(1)
    has_backward = attention != "flex_attention"  # Not on a CPU.
    if has_backward:
        settle_attention(model, "concat", loss_of_run())
    assert joins_documents(model) == (attention == "sdpa" and case != PADDED)
    rows = [[rng.integers(3, 97, length) for length in lengths] for lengths in rows]

    def gradients_of(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        loss.backward()
        found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        model.zero_grad()
        return found

    with torch.set_grad_enabled(has_backward):
        together = losses(model, [as_row(*documents) for documents in rows])
        of_all = gradients_of(together) if has_backward else {}
        model.set_attn_implementation("eager")
        alone = sum(losses(model, [as_row(document)]) for documents in rows for document in documents)
    assert together.item() == pytest.approx(alone.item(), rel=1e-5)
    if not has_backward:
        return
    for weight, gradient in gradients_of(alone).items():
        assert torch.allclose(of_all[weight], gradient, rtol=0, atol=1e-5 * max(1, gradient.abs().max()))


@pytest.mark.parametrize(
    "name, shape",
    [
        ("mpt", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
        ("gpt_oss", SHAPE | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_packing_is_refused_where_documents_would_see_each_other(tmp_path, name, shape):
    """transformers makes the masks of these families without looking at the positions."""
    config = tiny_config(tmp_path)
    config["model"] = {"architecture": {"model_type": name, **shape, "vocab_size": 384}, "attention": "eager"}
    config["run"]["max_steps"] = 5
    assert run(tmp_path, config).losses
    config["data"]["packing"] = "concat"
    done = run(tmp_path, config, "--run.output_dir", tmp_path / "packed", expect=2)
    assert "data.packing" in done.output and name in done.output and "use none" in done.output


@pytest.mark.parametrize("head", [8, 16])
def test_a_setting_that_only_the_model_knows(tmp_path, head):
    """Qwen3-MoE reads head_dim, and its config class does not declare it. Its 4 heads are of 32 / 4 without it."""
    config = tiny_config(tmp_path)
    shape = SHAPE | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "head_dim": head}
    config["model"] = {"architecture": {"model_type": "qwen3_moe", **shape, "vocab_size": 384}}
    config["run"] |= {"max_steps": 5, "eval_every": 0}
    assert run(tmp_path, config).weights["model.layers.0.self_attn.q_proj.weight"].shape == (4 * head, 32)


def test_a_switch_that_only_the_model_knows():
    """With router_bias, the router of a LongCat-Flash has a weight more. Its config class does not declare it."""
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 32, "moe_topk": 1}
    shape |= {"expert_ffn_hidden_size": 32, "n_routed_experts": 2, "zero_expert_num": 1, "kv_lora_rank": 8}
    shape |= {"q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    for switch in True, False:
        found = transformers.AutoConfig.for_model("longcat_flash", **shape, router_bias=switch)
        assert shapes_weights("router_bias", found)
    found = transformers.AutoConfig.for_model("longcat_flash", **shape, ruoter_bias=True)
    assert not shapes_weights("ruoter_bias", found)


DBRX = {"model_type": "dbrx", "d_model": 32, "n_heads": 2, "n_layers": 1, "ffn_config": {"ffn_hidden_size": 32}}
HUNYUAN = {"model_type": "hunyuan_v1_dense", **SHAPE, "head_dim": 8}


@pytest.mark.parametrize(
    "architecture, unknown",
    [
        (DBRX | {"attn_config": {"kv_n_heads": 1, "rope_theta": 1e4}}, None),  # Without it, there is no model.
        (DBRX | {"attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qvk": 8}}, "clip_qvk"),
        (HUNYUAN | {"rope_parameters": {"rope_type": "dynamic", "alpha": 8.0, "factor": 1.0, "rope_theta": 1e4}}, None),
        (HUNYUAN | {"rope_scaling": {"rope_type": "dynamic", "alfa": 8.0, "factor": 1.0}}, "alfa"),
    ],
)
def test_settings_that_have_no_effect(architecture, unknown):
    found = transformers.AutoConfig.for_model(**architecture)
    with pytest.raises(UserError, match=f"has no setting {unknown};") if unknown else contextlib.nullcontext():
        check_architecture(architecture, found)


def test_a_tower_for_images_is_no_layer_of_the_text():
    """It sees later parts of an image. Rows of text are joined all the same."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = sizes | {"num_key_value_heads": 1, "head_dim": 16}, sizes | {"image_size": 28, "patch_size": 14}
    found = transformers.AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    with torch.device("meta"):
        assert has_known_layers(transformers.AutoModelForCausalLM.from_config(found))


@pytest.mark.parametrize("size", [1, 4])
def test_vocabularies_smaller_than_the_row_that_tries_them_out(size):
    model = build("llama", SHAPE | {"vocab_size": size}, "sdpa")
    settle_attention(model, "concat", loss_of_run())
    check_loss(model, "concat", loss_of_run())
    assert allows_chunks(model, Model(chunked_loss=True), loss_of_run())


JAMBA = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
SHORT_CONVOLUTION = {"num_hidden_layers": 1, "layer_types": ["conv"], "conv_L_cache": 3}
LEAKS = {  # Family, shape, attention: what a token sees in a row of one document, and in one of two.
    "llama": ("llama", SHAPE, "sdpa", "", ""),
    "a mixture of experts": ("mixtral", FULL["mixtral"], "eager", "", ""),
    "a window": (*PARTLY["mistral with a window"], "sdpa", "", ""),
    "a bias that is added to the mask": ("doge", SHAPE, "sdpa", "", ""),
    "an encoder": ("bert", SHAPE, "eager", "later tokens", "later tokens"),
    "state-space layers": ("jamba", SHAPE | JAMBA | {"use_mamba_kernels": False}, "eager", "", "other documents"),
    "a short convolution": ("lfm2", SHAPE | SHORT_CONVOLUTION, "eager", "", "other documents"),
    "state-space layers alone": ("mamba", SHAPE, "eager", "", "other documents"),
}


@pytest.mark.parametrize("case", LEAKS)
def test_what_a_token_sees(case):
    """An untrained Jamba moves the logits of another document by less than 1e-5, and is found all the same."""
    name, shape, attention, alone, packed = LEAKS[case]
    torch.manual_seed(0)
    found = transformers.AutoConfig.for_model(name, use_cache=False, **shape)
    model = transformers.AutoModelForCausalLM.from_config(found, attn_implementation=attention)
    assert (what_leaks(model, packed=False), what_leaks(model, packed=True)) == (alone, packed)
    assert not any(module._forward_hooks for module in model.modules())


def test_what_a_token_sees_above_trained_embeddings():
    """Those that model.lora trains, peft computes without the module that it has wrapped."""
    found = transformers.AutoConfig.for_model("mamba", use_cache=False, **SHAPE)
    plain = transformers.AutoModelForCausalLM.from_config(found)
    assert what_leaks(add_lora(plain, {"r": 2, "target_modules": ["in_proj"]}, [5]), packed=True) == "other documents"


def mixed(attention: str, mix) -> torch.nn.Module:
    """A Llama whose first layer gets other states."""
    model = build("llama", SHAPE, attention)
    model.model.layers[0].register_forward_pre_hook(lambda layer, args: (mix(args[0]),))
    return model


def test_what_a_token_sees_where_embeddings_change_in_place():
    assert what_leaks(mixed("eager", lambda states: states.mul_(2)), packed=False) == ""


def test_a_prefix_whose_tokens_all_see_each_other_is_found():
    prefix = mixed("eager", lambda states: torch.cat((states[:, :4] + states[:, :4].flip(1), states[:, 4:]), dim=1))
    assert what_leaks(prefix, packed=False) == "later tokens"


def before(states: torch.Tensor) -> torch.Tensor:
    """Of each token, the states of the one before it."""
    return torch.nn.functional.pad(states, (0, 0, 1, -1))


def test_what_documents_see_is_found_below_rounding():
    """Though the loss of a row does not tell."""
    settle_attention(mixed("sdpa", lambda states: states + 1e-9), "concat", loss_of_run())
    leaks = mixed("sdpa", lambda states: states + 1e-9 * before(states))
    with pytest.raises(UserError, match="data.packing: in a llama the documents of a row see each other"):
        settle_attention(leaks, "concat", loss_of_run())


def test_pairs_of_tokens_of_two_documents_are_found():
    """The documents of a short row end with a pair."""
    second = lambda states: (torch.arange(states.shape[1]) % 2)[:, None]  # noqa: E731
    model = mixed("eager", lambda states: states + second(states) * before(states))
    settle_attention(model, "concat", loss_of_run())
    model.config.index_topk = 1  # Of such models, a long row is tried, too.
    with pytest.raises(UserError, match="data.packing: in a llama the documents of a row see each other"):
        settle_attention(model, "concat", loss_of_run())


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2**-7 / 10)])
def test_which_losses_are_the_same(dtype, bound):
    """But for rounding in the type of the weights."""
    model = SimpleNamespace(dtype=dtype)
    for loss in 20.0, 0.02:
        for sign in -1, 1:
            assert is_same_loss(model, loss * (1 + sign * 0.99 * bound), loss)
            assert not is_same_loss(model, loss * (1 + sign * 1.01 * bound), loss)


def test_what_a_token_sees_if_its_logits_add_up_to_nothing():
    found = transformers.AutoConfig.for_model("mamba", tie_word_embeddings=False, **SHAPE | {"vocab_size": 2})
    model = transformers.AutoModelForCausalLM.from_config(found)
    with torch.no_grad():
        model.lm_head.weight[1] = -model.lm_head.weight[0]
    assert what_leaks(model, packed=True) == "other documents"


def config_to_settle(**model) -> Config:
    data = Data.model_construct(packing="concat", sequence_length=24)
    return Config.model_construct(model=Model(**model), data=data)


def test_documents_whose_positions_go_on_are_found():
    """The tokens of the second document see what they should, and have the positions of a longer one."""
    model = build("gpt2", OLD_SHAPE, "eager")
    settle_model(model, config_to_settle(), [], loss_of_run())
    table = model.transformer.wpe
    table.forward = lambda positions: table.weight[torch.arange(positions.shape[1])]
    with pytest.raises(UserError, match="data.packing: a gpt2 computes another loss where documents share a row"):
        settle_model(model, config_to_settle(), [], loss_of_run())


def test_an_attention_that_no_cpu_has_is_not_tried(monkeypatch):
    """What does not depend on it is tried with another one."""

    def on_a_gpu(*args, **more):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "of_a_gpu", on_a_gpu)
    model = build("llama", SHAPE, "sdpa")
    model.set_attn_implementation("of_a_gpu")
    name, is_random, *chunked = settle_model(model, config_to_settle(chunked_loss=True), [], loss_of_run())
    assert (name, is_random, chunked) == ("of_a_gpu", False, [True])
    assert model.config._attn_implementation == "of_a_gpu"


def test_a_model_that_needs_its_masks_gets_them(tmp_path):
    """Doge adds its own bias to the mask. On random tokens nothing can be learned, unless later ones are seen."""
    config = tiny_config(tmp_path)
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(3, 19, 24).tolist()} for _ in range(60)]
    config["data"] |= {"path": str(write_rows(tmp_path / "random", rows)), "eval_source": None}
    config["run"]["max_steps"] = 40
    config["optim"]["schedule"] = "constant"
    config["model"] = {"architecture": {"model_type": "doge", **SHAPE, "vocab_size": 384}}
    done = run(tmp_path, config)
    losses, told = done.losses, "Rows are padded, because a doge does not keep documents apart in a single row."
    assert told in done.output
    assert np.log(16) - 0.15 < np.mean(losses[-10:]) < np.log(16) + 0.5
    config["model"]["attention"] = "eager"  # With transformers' masks from the start.
    other = run(tmp_path, config, "--run.max_steps", 10, "--run.output_dir", tmp_path / "eager")
    np.testing.assert_allclose(losses[:10], other.losses, rtol=1e-4)
    assert told not in other.output


def test_a_model_of_another_task_is_refused_in_few_words(tmp_path):
    """transformers would name all classes of models that it could build."""
    config = tiny_config(tmp_path)
    config["model"] = {"architecture": {"model_type": "t5", "vocab_size": 384}}
    message = run(tmp_path, config, expect=2).output
    assert "cannot build t5" in message and "AutoModelForCausalLM" in message and "LlamaConfig" not in message


def test_an_encoder_is_refused(tmp_path):
    config = tiny_config(tmp_path)
    shape = {name: size for name, size in SHAPE.items() if name != "num_key_value_heads"}
    config["model"] = {"architecture": {"model_type": "bert", **shape, "vocab_size": 384}}
    message = run(tmp_path, config, expect=2).output
    assert message.count("error: ") == 1 and "bert sees later" in message and "is_decoder" in message
    assert not (tmp_path / "run").exists()
    config["model"]["architecture"]["is_decoder"] = True
    assert run(tmp_path, config, "--run.max_steps", 5).status["status"] == "finished"


DEEPSEEK_V4 = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
DEEPSEEK_V4 |= {"head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 16}
DEEPSEEK_V4 |= {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "vocab_size": 97}
DEEPSEEK_V4 |= {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 64}


@pytest.mark.parametrize("every", [4, 128])
def test_documents_that_see_each_other_only_in_long_rows_are_found(every):
    """A DeepSeek-V4 compresses tokens by 4 or by 128. Two documents of 4 tokens share none of what they see of that,
    and the second one of a long row begins in the middle of it, at token 205."""
    kind = "compressed_sparse_attention" if every == 4 else "heavily_compressed_attention"
    model = build("deepseek_v4", DEEPSEEK_V4 | {"layer_types": ["sliding_attention", kind]}, "eager")
    settle_attention(model, "none", loss_of_run())
    check_loss(model, "concat", loss_of_run())
    with pytest.raises(UserError, match="data.packing: in a deepseek_v4 .* use none"):
        settle_attention(model, "concat", loss_of_run())
    if every == 128:
        settle_attention(model, "concat", loss_of_run(), 100)


@pytest.mark.parametrize("name", ["mllama", "emu3"])
def test_a_text_model_that_cannot_be_loaded_again_is_refused(name):
    """AutoModelForCausalLM makes it from the config of the whole, and does not know the config that it then has."""
    config = Config(
        run={"max_steps": 1},
        batch={"global_batch_size": 1},
        data={"files": ["some.txt"]},
        model={"architecture": {"model_type": name}},
    )
    with pytest.raises(UserError, match=f"model: AutoModelForCausalLM could not load a trained {name}"):
        model_config(config, 384)


def test_a_family_whose_number_of_layers_cannot_be_changed():
    """A ProphetNet raises an error. It is tried as it is."""
    sizes = {"hidden_size": 32, "decoder_ffn_dim": 48, "num_decoder_layers": 3, "num_decoder_attention_heads": 4}
    found = transformers.AutoConfig.for_model("prophetnet", vocab_size=97, max_position_embeddings=64, **sizes)
    model = outlined_model(Model(attention="eager"), found, 0, seed=0)
    assert model_to_try(model, Model(attention="eager")).config.num_decoder_layers == 3


def test_checkpointing_that_a_family_lacks_is_refused():
    found = transformers.AutoConfig.for_model("jetmoe", **SHAPE)
    with pytest.raises(UserError, match="model.gradient_checkpointing: .* jetmoe; use false"):
        make_model(Model(gradient_checkpointing=True), found, 0, seed=0)


@pytest.mark.parametrize(
    "name, why",
    [("gpt_oss", "has been mutated"), ("hrm_text", "invocation index")],  # Adds a bias in place; has layers twice.
)
def test_selective_checkpointing_that_a_family_lacks_is_refused(name, why):
    found = transformers.AutoConfig.for_model(name, **SHAPE | {"num_local_experts": 4})
    model = make_model(Model(gradient_checkpointing="selective", attention="eager"), found, 0, seed=0)
    with pytest.raises(UserError, match=f"selective does not work for a {name}; take true: .*{why}"):
        check_selective(model, loss_of_run())


def test_selective_checkpointing_draws_the_same_numbers_again():
    """For the dropout of the attention, and for what follows it."""
    found = transformers.AutoConfig.for_model("phi", **SHAPE, attention_dropout=0.5, resid_pdrop=0.5)
    gradients = []
    for how in False, "selective":
        model = make_model(Model(gradient_checkpointing=how), found, 0, seed=0).train()
        torch.manual_seed(0)
        loss, _ = loss_of_run()(model, probe_batch(model, torch.device("cpu")))
        loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.slow
def test_what_compiled_selective_checkpointing_keeps(monkeypatch):
    """What it keeps without torch.compile, see test_memory_of_selective_checkpointing(), and torch warns of nothing."""
    silence_libraries()
    warned = []
    torch._logging.warning_once.cache_clear()
    monkeypatch.setattr(torch._higher_order_ops.wrap.log, "filters", [warned.append])
    shape = SHAPE | {"hidden_size": 256, "intermediate_size": 768}
    found = transformers.AutoConfig.for_model("llama", **shape, attn_implementation="sdpa")
    model = transformers.AutoModelForCausalLM.from_config(found).train()
    recompute_layers(model, "model.gradient_checkpointing", selective=True)
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    kept = {}

    def note(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.model(input_ids=torch.ones(4, 64, dtype=torch.long), use_cache=False)
    of_layers = 2 * (1 + 4 + 2 / 2 + 2 * 3 + 4 / 256)
    assert sum(kept.values()) / (4 * 64 * 256 * 4) == pytest.approx(of_layers, rel=0.02)  # And some of the last norm.
    assert not warned


def test_what_selective_checkpointing_keeps():
    """Of attention in one kernel, only one without dropout, which would draw other numbers for what follows it."""
    states = torch.ones(1, 1, 8, 8)
    matrix, aten = states[0, 0], torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention.default
    efficient = aten._scaled_dot_product_efficient_attention.default
    for function, args, is_kept in [
        (flash, (states, states, states), True),
        (flash, (states, states, states, 0.0, True), True),
        (flash, (states, states, states, 0.1), False),
        (efficient, (states, states, states, None, True, 0.1), False),
        (aten.mm.default, (matrix, matrix), True),
        (aten.bmm.default, (states[0], states[0]), False),
        (aten.silu.default, (states,), False),
    ]:
        assert (keeps(None, function, *args) == CheckpointPolicy.MUST_SAVE) == is_kept
    for name in KEPT:
        space, function = name.split("::")
        assert hasattr(getattr(torch.ops, space), function)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(3))
def test_documents_that_see_each_other_are_found_in_any_precision(dtype, seed):
    """MPT is refused, Mistral is not: rounding in bf16 is neither taken for a leak nor does it hide one."""
    shape = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000}
    for name, more in ("mpt", {}), ("mistral", {"num_key_value_heads": 4, "intermediate_size": 512}):
        found = transformers.AutoConfig.for_model(name, use_cache=False, **shape, **more)
        model = make_model(Model(attention="eager", dtype=dtype), found, 0, seed)
        with contextlib.nullcontext() if name == "mistral" else pytest.raises(UserError, match="use none"):
            check_loss(model, "concat", loss_of_run())


@pytest.mark.parametrize("length", [64, 512])
def test_flops_are_the_closed_form(length):
    """PaLM (arXiv:2204.02311), appendix B, as TorchTitan has it: 6 N + 12 L H Q T per token, N being the weights
    without the embedding, which multiplies nothing."""
    found = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    weights = 3 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512) + 256 * 1000
    assert flops_per_token(found, None, length) == pytest.approx(6 * weights + 12 * 3 * 256 * length, rel=0.02)


@pytest.mark.parametrize(
    "family, more, windowed",
    [
        ("mistral", {}, 2),
        ("gemma3_text", {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}, 1),
        pytest.param("mixtral", {}, 2, marks=pytest.mark.slow),
        pytest.param("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, 1, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"head_dim": 8}, 1, marks=pytest.mark.slow),
    ],
)
def test_flops_of_windows(family, more, windowed):
    """Of 48 tokens, a layer whose window has 16 counts 16, whether both layers have windows or one. Scores and values
    are a product of 4 heads x 8 for each token that is seen: two products forward and four backward."""
    flops = []
    for window in 100, 16:
        found = transformers.AutoConfig.for_model(family, use_cache=False, sliding_window=window, **SHAPE | more)
        flops.append(48 * flops_per_token(found, None, 48))
    assert flops[0] - flops[1] == windowed * 6 * 2 * (4 * 8) * 48 * (48 - 16)


@pytest.mark.slow
@pytest.mark.parametrize("family, more, windowed", [("mistral", {}, 2), ("gemma2", {"head_dim": 8}, 1)])
def test_lora_flops_of_windows(family, more, windowed):
    """As above: adapters in all layers change nothing of it."""
    flops, lora = [], {"r": 4, "target_modules": "all-linear"}
    for window in 100, 16:
        found = transformers.AutoConfig.for_model(family, use_cache=False, sliding_window=window, **SHAPE | more)
        flops.append(48 * flops_per_token(found, lora, 48))
    assert flops[0] - flops[1] == windowed * 6 * 2 * (4 * 8) * 48 * (48 - 16)


def test_flops_that_cannot_be_counted_end_no_run(tmp_path):
    """A dynamic rope asks how long the row is, which tensors without storage cannot tell. Only MFU is not known."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 2}
    config["optim"]["warmup_steps"] = 0
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config["model"] = {"architecture": {"model_type": "llama", **SHAPE, "vocab_size": 384, "rope_parameters": rope}}
    done = run(tmp_path, config, "--perf.peak_tflops", 1)
    assert "MFU is not known" in done.output and len(done.losses) == 2
    assert set(done.logged("perf/mfu")) == {None}


def test_flops_of_a_model_of_another_task(capsys):
    """Of a fork, which then need not count them. An encoder, in this case."""
    assert np.isnan(flops_per_token(transformers.AutoConfig.for_model("modernbert"), None, 8))
    assert "MFU is not known: FLOPs cannot be counted for this modernbert: Unrecog" in capsys.readouterr().out


def test_flops_of_a_mixture():
    """Each expert that a token takes is three matrices of 32 x 48 in both layers, forward and twice backward."""
    flops = []
    for experts in (1, 2):
        shape = SHAPE | {"num_local_experts": 4, "num_experts_per_tok": experts}
        found = transformers.AutoConfig.for_model("mixtral", use_cache=False, sliding_window=None, **shape)
        flops.append(flops_per_token(found, None, 16))
    assert flops[1] - flops[0] == 6 * 3 * 32 * 48 * 2


FALCON_H1 = SHAPE | {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8}
FALCON_H1 |= {"lm_head_multiplier": 0.3}
HEADS = {  # What is behind the layers: a bias; the embedding; that and a projection; what scales or bounds the logits.
    "llama": ("llama", FULL["llama"], None),
    "phi": ("phi", FULL["phi"], None),
    "gpt2": ("gpt2", FULL["gpt2"], None),
    "opt": ("opt", FULL["opt"] | {"word_embed_proj_dim": 16}, None),
    "mixtral": ("mixtral", FULL["mixtral"], None),
    "gemma3": ("gemma3_text", PARTLY["gemma3"][1] | {"final_logit_softcapping": 0.05}, None),
    "granite": ("granite", FULL["granite"] | {"logits_scaling": 7.0}, None),
    "cohere": ("cohere", FULL["cohere"] | {"logit_scale": 0.3}, None),
    "falcon_h1, which asks its layers for the scale": ("falcon_h1", FALCON_H1, None),
    "layers frozen": ("llama", FULL["llama"], {"r": 2, "target_modules": ["lm_head"]}),
    "output layer frozen": ("llama", FULL["llama"], {"r": 2, "target_modules": ["q_proj"]}),
}


def pass_of(
    model: torch.nn.Module, chunked: bool, bf16: bool = False, compiled: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss per target of 2 x 80 tokens, and its gradients."""
    rng = np.random.default_rng(2)
    rows = [np.stack([*rng.integers(3, 97, (2, 80)), np.arange(80)]) for _ in range(2)]
    rows[0][1, 10:30] = -100
    model.zero_grad()
    batch = collate(rows, torch.device("cpu"), joined=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss, sums = loss_of_run()(model, batch, chunked=chunked)
    rounding = 1e-6 if compiled else 0  # Compiled, the two are added up apart.
    assert sums["loss"].item() == pytest.approx(loss.item(), rel=rounding, abs=0)
    loss = loss / 140
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


def build_head(case: str) -> torch.nn.Module:
    name, shape, lora = HEADS[case]
    model = build(name, shape | {"max_position_embeddings": 80, "n_positions": 80}, "sdpa")
    return add_lora(model, lora) if lora else model


@pytest.mark.parametrize("case", HEADS)
def test_a_chunked_loss_has_the_same_gradients(monkeypatch, case):
    """In three chunks, the last a part of one, against all logits at once."""
    monkeypatch.setattr("samerun.model.loss.chunk_size", lambda *_: 64)
    model = build_head(case)
    (loss, gradients), (chunked_loss, others) = pass_of(model, False), pass_of(model, True)
    assert chunked_loss == pytest.approx(loss, rel=1e-6)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():  # Some are 0, but for rounding.
        bound = 1e-5 * gradient.abs().max() + 1e-7 * largest
        assert torch.allclose(gradient, others[name], rtol=0, atol=bound), name


def test_a_chunked_loss_without_a_target_has_gradients_of_0():
    """DDP and FSDP2 wait for the gradient of each weight, also on a rank without rows."""
    model = build_head("llama")
    batch = collate([np.array([[5, 6], [-100, -100], [0, 1]])], torch.device("cpu"), joined=True)
    loss, sums = loss_of_run()(model, batch, chunked=True)
    loss.backward()
    assert loss.item() == sums["loss"].item() == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


def test_a_chunked_loss_in_bf16_adds_up_gradients_in_float32(monkeypatch):
    """160 chunks are no worse than all logits at once. Added up in bf16, they would be four times as far off."""
    monkeypatch.setattr("samerun.model.loss.chunk_size", lambda *_: 1)
    model = build_head("llama")
    _, exact = pass_of(model, chunked=False)
    (loss, whole), (chunked_loss, chunked) = (pass_of(model, kind, bf16=True) for kind in (False, True))
    assert chunked_loss == pytest.approx(loss, rel=1e-3)
    for name, gradient in exact.items():
        assert (chunked[name] - gradient).norm() < 1.5 * (whole[name] - gradient).norm(), name


@pytest.mark.parametrize(
    "settings, vocabulary, chunked",
    [
        ({}, 4095, False),
        ({}, 4096, True),
        ({"chunked_loss": True}, 97, True),
        ({"chunked_loss": False}, 4096, False),
    ],
)
def test_when_the_loss_is_computed_in_chunks(settings, vocabulary, chunked):
    assert wants_chunks(Model(**settings), vocabulary) == chunked


def test_a_loss_that_is_compiled_with_the_model_has_no_chunks():
    assert not wants_chunks(Model(compile="full"), 4096)


@pytest.mark.parametrize("trained, compiled, size", [(True, False, 768), (True, True, 4096), (False, True, 768)])
def test_how_many_targets_a_chunk_has(trained, compiled, size):
    assert chunk_size(torch.nn.Linear(8, 97).requires_grad_(trained), compiled) == size


@pytest.mark.slow
@pytest.mark.parametrize("kind, with_loss", [("regional", True), ("regional", False), ("full", False)])
def test_a_chunked_loss_beside_compiled_layers(monkeypatch, kind, with_loss):
    """A second pass compiles nothing more, though forward() is another function in each.

    On a GPU, the loss is compiled, too.
    """
    monkeypatch.setattr("samerun.model.loss.chunk_size", lambda *_: 64)
    monkeypatch.setattr("samerun.model.loss.compiles_loss", lambda model, batch: with_loss and model.is_compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = transformers.AutoConfig.for_model("llama", use_cache=False, **SHAPE | {"max_position_embeddings": 80})
    losses = []
    for compiled in ("none", kind):
        settings = Model(compile=compiled, chunked_loss=True)
        model = make_model(settings, found, 0, seed=3)
        compile_model(model, settings, "none", chunked=True, tp=1)
        losses.append(pass_of(model, chunked=True, compiled=with_loss and compiled != "none")[0])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs and losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert pass_of(model, chunked=True, compiled=with_loss)[0] == losses[1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


class Logits(TorchDispatchMode):
    """Notes how many rows of logits there are in one tensor, at most."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (97,):
            self.rows = max(self.rows, result.numel() // 97)
        return result


def test_a_chunked_loss_holds_few_logits_and_computes_none_twice(monkeypatch):
    """Nor any of the 20 tokens without a target: three products of 2 x width x vocabulary FLOPs for each of them."""
    monkeypatch.setattr("samerun.model.loss.chunk_size", lambda *_: 64)
    model = build_head("llama")
    flops, rows = [], []
    for chunked in (False, True):
        with FlopCounterMode(display=False) as counter, Logits() as logits:
            pass_of(model, chunked)
        flops.append(counter.get_total_flops())
        rows.append(logits.rows)
    assert rows == [160, 64] and flops[0] - flops[1] == 20 * 3 * 2 * 32 * 97


def test_a_chunked_loss_is_refused_where_the_logits_need_more_than_states(tmp_path):
    """transformers says of this family that its layers are the whole model."""
    config = tiny_config(tmp_path)
    config["model"] = {"architecture": {"model_type": "llama4_text", **SHAPE, "vocab_size": 384}, "chunked_loss": True}
    config["model"]["architecture"] |= {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
    message = run(tmp_path, config, expect=2).output
    assert message.count("error: ") == 1
    assert "model.chunked_loss: a llama4_text" in message and "use false" in message
    config["model"]["chunked_loss"] = False
    assert run(tmp_path, config, "--run.max_steps", 5).losses


def test_a_chunked_loss_is_refused_where_it_is_another(monkeypatch):
    """Here the logits depend on the tokens themselves, of which the states do not know."""
    model = build("llama", SHAPE, "sdpa")
    forward = model.forward

    def with_more(input_ids=None, **inputs):
        outputs = forward(input_ids=input_ids, **inputs)
        if input_ids is not None:
            outputs.logits = outputs.logits * 2
        return outputs

    always, auto = Model(chunked_loss=True), Model()
    assert all(allows_chunks(model, config, loss_of_run()) for config in (always, auto))
    monkeypatch.setattr(model, "forward", with_more)
    with pytest.raises(UserError, match="model.chunked_loss: a llama .* use false"):
        allows_chunks(model, always, loss_of_run())
    assert not allows_chunks(model, auto, loss_of_run())
    assert model.forward is with_more and model.model is model.get_decoder()


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_new_model_ends_its_texts_as_its_tokenizer_does(tmp_path, family):
    """The usual end of a Llama is token 2, and a Phi-3 pads with a token that the vocabulary does not have. The bytes
    tokenizer ends texts with 1 and pads with 0."""
    config = tiny_config(tmp_path)
    text = write_rows(tmp_path / "texts", [{"text": "abc"}] * 20)
    config["data"] = {"path": str(text), "sequence_length": 24, "packing": "none", "eval_source": {"path": str(text)}}
    config["model"] = {"architecture": {"model_type": family, **SHAPE, "vocab_size": VOCABULARY, "bos_token_id": 9}}
    del config["model"]["architecture"]["pad_token_id"]
    config["eval"] = {"prompts": "a", "temperature": 0.0}
    done = run(tmp_path, config)
    assert done.logged("eval/sample_0") == ["abc"] and done.logged("summary/sampling_seconds")[0] > 0
    folder = done.folder / "model"
    for kind in transformers.AutoConfig, transformers.GenerationConfig:
        found = kind.from_pretrained(folder)
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (9, 1, 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.use_cache  # Otherwise it would read the whole text again for each token that it writes.
    assert model.generate(torch.tensor([[100]]), do_sample=False, max_new_tokens=20).tolist() == [[100, 101, 102, 1]]


@pytest.mark.parametrize("ends", [[9], [9, 259]])
def test_a_pretrained_model_ends_its_texts_as_another_tokenizer_does(tmp_path, ends):
    """By the end that the texts had in this run, unless the model knew it already, perhaps among others."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "start"))
    model.generation_config.eos_token_id = ends
    tokenizer = transformers.ByT5Tokenizer()
    tokenizer.add_tokens(["<end>"], special_tokens=True)
    tokenizer.eos_token = "<extra_id_0>"
    assert tokenizer.eos_token_id == 259
    config = Config.model_validate(tiny_config(tmp_path))
    use_special_tokens(model, tokenizer, config)
    if 259 in ends:
        assert model.generation_config.eos_token_id == ends
    else:
        assert model.generation_config.eos_token_id == model.config.eos_token_id == 259
        assert model.generation_config.pad_token_id == 0


def test_tokens_without_a_tokenizer_say_no_end(tmp_path):
    """A new model would have the usual end of its family, 2 for a Llama, which may be any token."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 2}
    config["optim"]["warmup_steps"] = 0
    config["data"]["tokenizer"] = None
    config["model"] = {"architecture": {"model_type": "llama", **SHAPE, "vocab_size": VOCABULARY}}
    done = run(tmp_path, config)
    for kind in transformers.AutoConfig, transformers.GenerationConfig:
        found = kind.from_pretrained(done.folder / "model")
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (None, None, 0)  # 0 is in the config.


ROBERTA = {"model_type": "roberta", "is_decoder": True, "vocab_size": VOCABULARY, "hidden_size": 32}
ROBERTA |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
ROBERTA |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize("tokenizer, pretrained", [("bytes", False), (None, False), ("bytes", True)])
def test_a_model_whose_positions_depend_on_its_padding_is_exported_as_it_was_trained(tmp_path, tokenizer, pretrained):
    """A RoBERTa counts from there on. Its family pads with token 1, the bytes tokenizer with 0."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 1
    config["optim"]["warmup_steps"] = 0
    config["data"]["tokenizer"] = tokenizer
    config["model"] = {"architecture": ROBERTA}
    if pretrained:
        found = transformers.AutoConfig.for_model(**ROBERTA)
        transformers.AutoModelForCausalLM.from_config(found).save_pretrained(tmp_path / "roberta")
        config["model"] = {"pretrained": str(tmp_path / "roberta")}
    done = run(tmp_path, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model").eval()
    _, data = rows_by_use(Config.model_validate(config).data).values()
    rows = [data.read(row) for row in range(len(data))]
    with torch.no_grad():
        loss = sum(losses(model, [row]).item() for row in rows) / sum((row[1] != -100).sum() for row in rows)
    assert done.logged("eval/loss") == pytest.approx([loss], rel=1e-5)


@pytest.mark.parametrize("family", ["cwm", "modernbert-decoder"])
@pytest.mark.parametrize("tokenizer", ["bytes", None])
def test_a_family_whose_config_wants_numbers_for_special_tokens(tmp_path, family, tokenizer):
    """The bytes tokenizer begins texts with no token. The family's own are beyond this vocabulary."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 5
    config["data"]["tokenizer"] = tokenizer
    shape = {key: value for key, value in SHAPE.items() if key not in ("num_key_value_heads", "pad_token_id")}
    config["model"] = {"architecture": {"model_type": family, **shape, "vocab_size": 384}}
    if family == "cwm":
        config["model"]["architecture"] |= {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
    done = run(tmp_path, config)
    assert transformers.GenerationConfig.from_pretrained(done.folder / "model").bos_token_id is None
    assert transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model")


def test_modules_that_peft_could_not_load_are_refused(tmp_path):
    """Of a module whose layers have adapters, too, it saves copies that it does not find again."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 5
    shape = SHAPE | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 8,
        "vocab_size": 384,
    }
    found = transformers.AutoConfig.for_model("qwen3_moe", **shape)
    transformers.AutoModelForCausalLM.from_config(found).save_pretrained(tmp_path / "mixture")
    lora = {"r": 2, "target_modules": "all-linear", "modules_to_save": ["mlp"]}
    config["model"] = {"pretrained": str(tmp_path / "mixture"), "lora": lora}
    message = run(tmp_path, config, expect=2).output
    assert message.count("error: ") == 1 and "error: model.lora: peft could not load what it saves" in message


@pytest.mark.parametrize("excluded", [None, ".*shared_experts.*"])
def test_adapters_that_peft_would_not_load_are_refused(tmp_path, excluded):
    """Of a Laguna, it takes `shared_experts` for `shared_expert.`, in which a dot is any letter."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 5
    shape = SHAPE | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shape |= {"shared_expert_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse"], "vocab_size": 384}
    shape |= {"layer_types": ["full_attention"] * 2, "num_attention_heads_per_layer": [4, 4]}
    found = transformers.AutoConfig.for_model("laguna", **shape)
    transformers.AutoModelForCausalLM.from_config(found).save_pretrained(tmp_path / "laguna")
    lora = {"r": 2, "target_modules": "all-linear", "exclude_modules": excluded}
    config["model"] = {"pretrained": str(tmp_path / "laguna"), "lora": lora}
    done = run(tmp_path, config, expect=0 if excluded else 2)
    told = "model.lora: peft would not load these adapters of a saved laguna, because it renames them: model.layers.*."
    assert done.output.count("error: ") == (told in done.output) == (not excluded)


class HostReads(TorchDispatchMode):
    """Counts where Python asks for a tensor's value: on a GPU each would wait for all work queued so far."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        tolist = torch.Tensor.tolist  # The dispatcher does not see it on a CPU.
        monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: self.note() or tolist(tensor))

    def note(self) -> None:
        self.count += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
            torch.ops.aten.equal.default,
            torch.ops.aten.nonzero.default,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packing, chunked", [("none", False), ("concat", False), ("concat", True)])
def test_no_host_reads_between_log_lines(tmp_path, monkeypatch, packing, chunked):
    """Four more steps of two micro-steps, with clipping and guard, read as often as four fewer if they log as often."""
    config = tiny_config(tmp_path)
    config["run"] |= {"log_every": 100, "save_every": 0}
    config["batch"]["max_micro_batch_size"] = 5
    config["data"] |= {"packing": packing, "eval_source": None}
    config["model"]["chunked_loss"] = chunked
    counts, loop = [], train.training_loop

    def counted(*args):
        with monkeypatch.context() as patch, HostReads(patch) as reads:
            loop(*args)
        counts.append(reads.count)

    monkeypatch.setattr(train, "training_loop", counted)
    for steps in (5, 9):
        run(tmp_path, config, "--run.max_steps", steps, "--run.output_dir", tmp_path / f"{steps}")
    # At the one log line at least each metric of the loss, the norm and the guard's counters; before the save these.
    _, logged = loss_of_run().keywords["token_loss"](torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))
    assert counts[0] == counts[1] >= len(logged) + 3


def test_pretrained_models_drop_out_from_the_first_step(tmp_path):
    """from_pretrained() returns a model that evaluates: without train() nothing would be dropped, nor recomputed."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 1
    config["optim"]["warmup_steps"] = 0
    folder = tiny_model(tmp_path / "start", learned_positions=True)
    losses = []
    for share in (0.0, 0.5):
        found = transformers.AutoConfig.from_pretrained(folder)
        found.resid_pdrop = share
        found.save_pretrained(folder)
        done = run(tmp_path, config, "--run.output_dir", tmp_path / f"{share}")
        assert ("Dropout is on" in done.output) == bool(share)
        losses += done.losses
    assert abs(losses[1] - losses[0]) > 1e-3


def test_what_drops_out_depends_on_seed_and_step_alone(tmp_path):
    """Also in a run that is continued. An evaluation drops nothing out, nor does the check of data.packing before the
    first step. There is one row, and nothing is learned."""
    config = tiny_config(tmp_path)
    folder = tiny_model(tmp_path / "start", learned_positions=True)
    found = transformers.AutoConfig.from_pretrained(folder)
    found.resid_pdrop = 0.5
    found.save_pretrained(folder)
    config["data"] |= {"path": str(write_rows(tmp_path / "row", make_rows([24]))), "packing": "concat"}
    config["batch"] = {"global_batch_size": 1, "max_micro_batch_size": 1}
    config["run"] |= {"max_steps": 4, "eval_every": 1, "save_every": 2}
    config["optim"] |= {"learning_rate": 1e-12, "warmup_steps": 0}
    done = run(tmp_path, config)
    assert np.ptp(done.logged("eval/loss")) < 1e-6 and np.diff(sorted(done.losses)).min() > 1e-4
    continued = run(tmp_path, config, *resume_from(done, 2), "--run.output_dir", tmp_path / "continued")
    np.testing.assert_allclose(continued.losses, done.losses[2:], rtol=1e-6)
    other = run(tmp_path, config, "--run.seed", 8, "--run.output_dir", tmp_path / "other")
    assert abs(other.losses[0] - done.losses[0]) > 1e-4


RANDOM = {
    "llama": {"attention_dropout": 0.5},
    "falcon": {"hidden_dropout": 0.5},
    "biogpt": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "activation_dropout": 0.1},
    "phimoe": {"num_local_experts": 4},
}


@pytest.mark.parametrize("name", RANDOM)
def test_chance_in_a_model_is_seen_by_what_it_does(name):
    """Dropout that is a number which the attention uses, or the layer; and a router that samples experts."""
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 97}
    shape |= {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = build(name, shape | RANDOM[name], "eager")
    before = torch.get_rng_state()
    assert draws_random_numbers(model)
    assert torch.equal(torch.get_rng_state(), before)
    off = {setting: 0.0 for setting in RANDOM[name]}
    if name != "phimoe":  # It knows no other way to train.
        assert not draws_random_numbers(build(name, shape | RANDOM[name] | off, "eager"))


def test_chance_that_two_passes_may_not_show():
    """A layer that is left out every other time."""
    shape = SHAPE | {"num_hidden_layers": 1, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
    model = build("opt", shape | {"layerdrop": 0.5}, "eager")
    for seed in range(8):
        torch.manual_seed(seed)
        assert draws_random_numbers(model)


def test_chance_that_the_loss_does_not_show_yet():
    """At first a LoRA adapter adds 0, whatever it drops."""
    found = transformers.AutoConfig.for_model("llama", **SHAPE)
    for share in (0.0, 0.2):
        model = make_model(Model(lora={"r": 2, "lora_dropout": share}), found, 0, seed=3)
        assert draws_random_numbers(model) == bool(share)


@pytest.mark.parametrize("name", ["ernie4_5", "jamba", "olmo"])
def test_every_token_is_trained(name, tmp_path):
    """Families have a pad token by default, 0 or 1, which may be any token of the vocabulary."""
    shape = {key: value for key, value in SHAPE.items() if key != "pad_token_id"}
    if name == "jamba":
        shape |= {"use_mamba_kernels": False, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    found = transformers.AutoConfig.for_model(name, **shape)
    pad = found.pad_token_id
    model = make_model(Model(architecture={"model_type": name}), found, 0, seed=3)
    model.save_pretrained(tmp_path)
    loaded = make_model(Model(pretrained=str(tmp_path)), transformers.AutoConfig.from_pretrained(tmp_path), 0, seed=3)
    for one in model, loaded:
        rows = one.get_input_embeddings().weight
        assert 0.3 < rows[pad].std() / rows.std() < 3
        with attention(one, "eager"):
            one(input_ids=torch.tensor([[5, pad, 7, 8]])).logits.square().sum().backward()
        assert rows.grad[pad].abs().sum() > 0


@pytest.mark.parametrize("name, setting", [("llama", "attention_dropout"), ("falcon", "hidden_dropout")])
def test_dropout_that_is_no_module_is_told(tmp_path, name, setting):
    """It is a number that the attention uses, or the layer."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 1}
    config["optim"]["warmup_steps"] = 0
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config["model"] = {"architecture": {"model_type": name, **shape, setting: 0.5}}
    assert "Dropout is on" in run(tmp_path, config).output


@pytest.mark.slow
@pytest.mark.parametrize("packing, passes", [("none", 1), ("best_fit", 1), ("concat", 2)])
def test_new_lengths_are_not_compiled_again(monkeypatch, packing, passes):
    """The first pass makes code for any number of tokens and documents, and none is made later.

    Full rows have one length. If another one comes all the same, it makes code for all of them. Rows of one document
    each, which are not joined, have code of their own.
    """
    compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: compile(module, backend="eager", **how))
    torch._dynamo.reset()
    found = transformers.AutoConfig.for_model("llama", use_cache=False, **SHAPE)
    settings = Model(compile="regional")
    model = make_model(settings, found, 0, seed=3)
    compile_model(model, settings, packing, chunked=False, tp=1)
    rng = np.random.default_rng(0)

    def run_some(passes: int) -> None:
        for _ in range(passes):
            documents = [rng.integers(3, 97, length) for length in rng.integers(2, 30, rng.integers(2, 9))]
            losses(model, [as_row(document) for document in documents]).backward()
            whole = rng.integers(3, 97, (rng.integers(2, 9), 64 * rng.integers(1, 3)))
            losses(model, [as_row(document) for document in whole]).backward()

    run_some(passes)
    with torch.compiler.set_stance("fail_on_recompile"):
        run_some(6)


@pytest.mark.parametrize("packing, joined, pieces", [("none", False, 1), ("concat", True, 1), ("concat", False, 2)])
def test_the_row_that_takes_the_most_memory(packing, joined, pieces):
    """Documents that share a row need a mask as large as the square of it, unless they are kept apart without one."""
    row = longest_row(Data(path="any", packing=packing, sequence_length=24), joined)
    batch = collate([row, row], torch.device("cpu"), joined)
    assert row.shape == (3, 24) and (row[2] == 0).sum() == pieces
    assert joined or (batch.position_ids is not None) == (pieces > 1)


def test_a_rank_without_rows_spoils_nothing():
    """Its token must be a real one: the embedding of a padding token is 0, and this norm would divide by it."""
    rng = np.random.default_rng(0)
    data = object.__new__(Dataset)
    data.read = lambda row: as_row(rng.integers(3, 97, 5))
    [idle] = data.read_rows(np.array([], int))
    assert idle.shape == (3, 1) and idle[0, 0] >= 3 and idle[1:].tolist() == [[-100], [0]]
    assert [row.shape for row in data.read_rows(np.array([4, 2]))] == [(3, 5)] * 2


def test_models_with_code_of_their_own_keep_their_masks():
    """A limit of theirs may be larger than what a short try shows."""
    found = transformers.LlamaConfig(**SHAPE)
    model = transformers.LlamaForCausalLM(found)
    assert has_known_layers(model)
    other = type("Own", (transformers.LlamaForCausalLM,), {"__module__": "transformers_modules.own"})(found)
    assert not has_known_layers(other)


def test_models_that_see_later_tokens_keep_their_attention():
    """A fork may train one. On a GPU, kernels for joined documents are always causal."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    causal, both = (
        transformers.BertLMHeadModel(transformers.BertConfig(**shape, is_decoder=it)) for it in (True, False)
    )
    assert has_known_layers(causal) and not has_known_layers(both)


def test_models_that_choose_tokens_keep_their_attention():
    """As DeepSeek-V3.2 does: of rows shorter than index_topk, it chooses all."""
    model = build("llama", SHAPE, "sdpa")
    assert has_known_layers(model)
    model.config.index_topk = 64
    assert not has_known_layers(model)


@pytest.mark.parametrize(
    "cut", [lambda output: output.to_tuple(), lambda output: SimpleNamespace(logits=output.logits[:, :-1])]
)
def test_a_model_of_a_fork_that_lacks_logits(monkeypatch, cut):
    """As one that returns (logits, loss) does, or shifts them itself."""
    model = build("llama", SHAPE, "sdpa")
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **named: cut(forward(*args, **named)))
    with pytest.raises(UserError, match=r"model: forward\(\) of this llama lacks logits; return a CausalLMOutput with"):
        settle_attention(model, "none", loss_of_run())


def test_a_window_that_an_attention_forgets_is_found(monkeypatch):
    """Though it is longer than the row that tries it."""
    model = build("mistral", SHAPE | {"sliding_window": 32}, "sdpa")
    for forgets, name in (False, DOCUMENTS), (True, "sdpa"):
        if forgets:
            without = lambda *args, sliding_window=None, **more: document_attention(*args, **more)  # noqa: E731
            monkeypatch.setitem(transformers.AttentionInterface._global_mapping, DOCUMENTS, without)
        settle_attention(model, "none", loss_of_run())
        assert model.config._attn_implementation == name


def test_a_longrope_takes_one_row_at_a_time():
    """Then no other row of its pass decides about its frequencies, whatever its length is."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = build("phi3", SHAPE | {"original_max_position_embeddings": 16, "rope_parameters": rope}, "sdpa")
    one, two = ([Stage(1, 0, train.plan_batch(2, size, 1, 24))] for size in (1, 2))
    check_rope(model, two, 16)
    check_rope(model, one, 24)
    with pytest.raises(UserError, match="longrope"):
        check_rope(model, two, 24)
