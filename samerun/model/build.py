"""From a config to a model: weights, adapters, which attention it gets, torch.compile, the FLOPs of a token."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from samerun.config import Config, Model
from samerun.data.encode import number_of_ids
from samerun.errors import as_user_error, is_main_process, one_line, require, say
from samerun.model.architecture import model_config
from samerun.model.attention import DOCUMENTS, document_attention
from samerun.model.lora import add_lora, starts_from_weights, train_in_float32
from samerun.model.outline import (
    extend_embeddings,
    is_of_transformers,
    is_quantized,
    load_whole,
    outline,
    unsplit_modules,
)
from samerun.model.recompute import recompute_layers
from samerun.model.weights import FirstWeights, put_placeholders


def build_model(config: Config, tokenizer: transformers.PreTrainedTokenizerBase | None) -> torch.nn.Module:
    """The model of a run, with placeholders for the weights until fill_weights()."""
    found = model_config(config, number_of_ids(tokenizer) if tokenizer else None)
    rows, new_tokens = rows_needed(config, tokenizer), added_tokens(config, tokenizer)
    return outlined_model(config.model, found, rows, config.run.seed, new_tokens)


def rows_needed(config: Config, tokenizer: transformers.PreTrainedTokenizerBase | None) -> int:
    """How many embeddings a run wants to have. Ready tokens came with their vocabulary, to which the config may add."""
    if config.data.format == "tokens":
        return 1 + max(added_tokens(config, tokenizer), default=-1)
    return number_of_ids(tokenizer) if tokenizer else 0


def added_tokens(config: Config, tokenizer: transformers.PreTrainedTokenizerBase | None) -> list[int]:
    """The ids of data.special_tokens."""
    return tokenizer.convert_tokens_to_ids(config.data.special_tokens) if tokenizer else []


def outlined_model(
    config: Model, found: transformers.PreTrainedConfig, vocab_size: int, seed: int, new_tokens: Sequence[int] = ()
) -> torch.nn.Module:
    """The model with a row for each token and its adapters, and with placeholders for its other weights."""
    torch.manual_seed(seed)
    with as_user_error(f"model: cannot build {config.pretrained or found.model_type}", config.pretrained):
        weights = FirstWeights(config, found, vocab_size, seed)
        is_whole = is_quantized(config, found)
        model = load_whole(config, found) if is_whole else outline(config, found)
        can_learn = not getattr(model, "is_quantized", False) or config.lora is not None
        require(can_learn, "its weights are quantized, and cannot be trained; give model.lora, or take another model")
        check_vocab_size(config, model, vocab_size)
        extend_embeddings(model, vocab_size)
        if not is_whole:
            weights.names = put_placeholders(model)
        if config.attention == "sdpa" and model._supports_attention_backend and has_known_layers(model):
            transformers.AttentionInterface.register(DOCUMENTS, document_attention)
            model.set_attn_implementation(DOCUMENTS)
        if config.lora is not None:
            if starts_from_weights(config.lora):
                weights.fill(model, torch.device("cpu"))
            model = add_lora(model, config.lora, new_tokens)
            if config.dtype != "float32":
                train_in_float32(model, getattr(torch, config.dtype))
    model.first_weights = weights
    if config.gradient_checkpointing:
        recompute_layers(model, "model.gradient_checkpointing", config.gradient_checkpointing == "selective")
    return model


def make_model(
    config: Model, found: transformers.PreTrainedConfig, vocab_size: int, seed: int, new_tokens: Sequence[int] = ()
) -> torch.nn.Module:
    """outlined_model() of a small model, with all its weights in the memory of the host."""
    model = outlined_model(config, found, vocab_size, seed, new_tokens)
    model.first_weights.fill(model, torch.device("cpu"), is_small=True)
    return model


def check_vocab_size(config: Model, model: torch.nn.Module, vocab_size: int) -> None:
    """Raises UserError if the config itself gives a new model too few rows."""
    size = model.get_input_embeddings().num_embeddings
    if vocab_size > size:
        advice = f"is less than the {vocab_size} of the tokenizer; leave it out to have as many"
        require("vocab_size" not in (config.architecture or {}), f"its vocab_size {size} {advice}")


def download_weights(config: Model, found: transformers.PreTrainedConfig) -> None:
    """Let the cache have all files of a pretrained model. Its weights get no memory: they are on no device."""
    with as_user_error(f"model.pretrained: cannot load {config.pretrained}", config.pretrained):
        remote = config.trust_remote_code
        transformers.AutoModelForCausalLM.from_pretrained(
            config.pretrained, config=found, device_map="meta", attn_implementation="eager", trust_remote_code=remote
        )


def vocabulary_size(model: torch.nn.Module) -> int:
    return len(model.get_input_embeddings().weight)  # LoRA may have wrapped the layer, which then only has its weight.


def has_known_layers(model: transformers.PreTrainedModel) -> bool:
    """Whether every layer attends to all earlier tokens, or to those of a sliding window, as far as one can know.

    The code that comes with a model may have other limits, which a short try would not show.
    """
    layers = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    chooses = getattr(model.config, "index_topk", None) is not None  # Which tokens it attends to.
    is_causal = all(getattr(module, "is_causal", True) for module in model.get_decoder().modules())
    return is_of_transformers(model) and is_causal and layers <= {"full_attention", "sliding_attention"} and not chooses


def compile_model(model: torch.nn.Module, config: Model, packing: str, chunked: bool, tp: int) -> None:
    """Have torch compile the model at its first pass, in place, so that the names of the weights stay as they are.

    On a GPU it also compiles the loss, see compiles_loss().
    """
    model.is_compiled = config.compile != "none"
    # Rows of any length get code for all lengths at once. Otherwise the second length would be compiled anew.
    dynamic = None if packing == "concat" else True
    if tp > 1:
        dynamic = False  # torch 2.13 compiles DTensors for one length at a time only. `concat` has few, see REFUSED.
    if config.compile == "full":
        whole = model.get_decoder() if chunked else model
        whole.compile(dynamic=dynamic)
    if config.compile == "regional":
        for module in unsplit_modules(model):
            module.compile(dynamic=dynamic)


def flops_per_token(found: transformers.PreTrainedConfig, lora: dict[str, Any] | None, length: int) -> float:
    """The FLOPs of the matrix products, forward and backward, per token of a document of this length. Only the main
    process, which logs what follows from them, counts; the others get NaN.

    torch counts them on a model without storage, without fused kernels because it does not see into them. For a Llama
    they are 6 N + 12 L H Q T, as in appendix B of PaLM (arXiv:2204.02311).
    """
    if not is_main_process():
        return math.nan
    works_without_storage = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    counter = FlopCounterMode(display=False)
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(found), **works_without_storage)
            if model._supports_attention_backend and has_known_layers(model):
                transformers.AttentionInterface.register("counted", counted_attention)
                model.set_attn_implementation("counted")
            if lora is not None:
                model = add_lora(model, lora)
        with fake, counter:
            model.to_empty(device="cpu")
            ids = torch.ones(1, length, dtype=torch.long)
            model(input_ids=ids, use_cache=False).logits.sum().backward()
    except Exception as error:  # Of a rope that asks how long the row is, or a fork's model. Only a figure needs this.
        say(f"MFU is not known: FLOPs cannot be counted for this {found.model_type}: {one_line(error)[:200]}")
        return math.nan
    return counter.get_total_flops() / length


def counted_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention for transformers with the matrix products of each token and as many others as it can see.

    Eager attention multiplies by all tokens and masks most of them. The values mean nothing: which tokens a window has
    makes no difference to their number. As in PaLM, the later tokens count, too.
    """
    groups = query.shape[1] // key.shape[1]
    seen = sliding_window or key.shape[2]
    key, value = (states[:, :, :seen].repeat_interleave(groups, dim=1) for states in (key, value))
    weights = (query @ key.transpose(2, 3)).softmax(3)
    return (weights @ value).transpose(1, 2).contiguous(), None
