"""From a config to a model: weights, adapters, which attention it gets, torch.compile, the FLOPs of a token."""

import copy
import difflib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_rope_utils import RopeParameters

from samerun.config import Config, Model
from samerun.data.encode import number_of_ids
from samerun.errors import UserError, as_user_error, is_main_process, one_line, require, say
from samerun.model.attention import DOCUMENTS, document_attention
from samerun.model.lora import add_lora, starts_from_weights, train_in_float32
from samerun.model.outline import (
    check_kind,
    extend_embeddings,
    is_of_transformers,
    is_quantized,
    load_whole,
    outline,
    unsplit_modules,
)
from samerun.model.recompute import recompute_layers
from samerun.model.weights import FirstWeights, put_placeholders

# Fields of any transformers config that settings of the run decide.
OF_THE_LAUNCH = "leave it out; model.dtype and the mixed_precision of the launch decide it"
SET_ELSEWHERE = {"dtype": OF_THE_LAUNCH, "torch_dtype": OF_THE_LAUNCH, "attn_implementation": "give model.attention"}
# The last three are of HunYuan and PhiMoE.
ROPE_SETTINGS = {*RopeParameters.__annotations__, "type", "alpha", "short_mscale", "long_mscale"}


def model_config(config: Config, vocab_size: int | None) -> transformers.PreTrainedConfig:
    """The transformers config of the model. Raises UserError for one that does not exist or does not fit the data."""
    name, architecture = config.model.pretrained, config.model.architecture or {}
    length = config.data.sequence_length
    is_below = name and config.model.lora is not None
    told = "model.load_in_4bit: is for the weights of model.pretrained, below model.lora; give both"
    require(is_below or not config.model.load_in_4bit, told)
    with as_user_error(f"model.pretrained or model.architecture: cannot configure {name or architecture}", name):
        if name:
            is_adapter = transformers.utils.find_adapter_config_file(name) is not None
            advice = "merge it into its model, or continue a checkpoint of its run by run.init_from"
            require(not is_adapter, f"it is a LoRA adapter; {advice}")
            remote = config.model.trust_remote_code
            found = transformers.AutoConfig.from_pretrained(name, trust_remote_code=remote)
        else:
            kind = architecture.get("model_type")
            near = difflib.get_close_matches(str(kind), transformers.CONFIG_MAPPING)
            is_known = kind is None or kind in transformers.CONFIG_MAPPING
            require(is_known, f"transformers has no model_type {kind}; near are {near}")
            defaults = {"vocab_size": vocab_size, "max_position_embeddings": length}
            own_names = transformers.AutoConfig.for_model(**architecture).attribute_map  # GPT-2 says n_positions.
            defaults = {name: value for name, value in defaults.items() if own_names.get(name) not in architecture}
            found = transformers.AutoConfig.for_model(**{**defaults, **architecture})
            text = found.get_text_config()
            padding, size = (getattr(text, name, None) for name in ("pad_token_id", "vocab_size"))
            given = architecture | (architecture.get("text_config") or {})
            if "pad_token_id" not in given and None not in (padding, size) and padding >= size:
                text.pad_token_id = None  # It was that of the family's own tokenizer.

    has_codes = config.model.load_in_4bit and getattr(found, "quantization_config", None) is not None
    require(not has_codes, "model.load_in_4bit: the files of model.pretrained have quantized weights; leave it out")
    check_architecture(architecture, found)
    check_is_loaded_again(found)
    positions = getattr(found.get_text_config(), "max_position_embeddings", None) or length
    require(length <= positions, f"data.sequence_length {length} exceeds the model's {positions} positions")
    return found


def check_is_loaded_again(found: transformers.PreTrainedConfig) -> None:
    """Raises UserError if AutoModelForCausalLM makes a model of a part of the config, and does not know that part.

    Of the config of an Mllama, for example, it makes a model of the text, and saves the config of the text with it.
    """
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(found), None)
    part = getattr(kind, "config_class", None) or type(found)
    is_known = part is type(found) or part in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    name = found.model_type
    refusal = f"model: AutoModelForCausalLM could not load a trained {name}, of which it takes the text alone"
    require(is_known, f"{refusal}; take another model")


def check_architecture(architecture: dict[str, Any], found: transformers.PreTrainedConfig) -> None:
    """Raises UserError for settings that transformers takes without a word, and that would have no effect."""
    check_settings(architecture, found)
    for part in found.sub_configs:
        if isinstance(architecture.get(part), dict):
            check_settings(architecture[part], found, part)


def check_settings(given: dict[str, Any], found: transformers.PreTrainedConfig, part: str = "") -> None:
    """check_architecture() of a whole config, or of one of its parts."""
    for name, advice in SET_ELSEWHERE.items():
        require(name not in given, f"model.architecture: {name} has no effect here; {advice}")
    holder, title = found, found.model_type
    if part:
        holder, title = getattr(found, part), part
    defaults = type(holder)().to_dict()
    unknown = [key for key in given if key in holder.to_dict() and key not in defaults]
    with as_user_error(f"model.architecture: cannot build {given}"):
        unknown = [key for key in unknown if not shapes_weights(key, found, part)]
    refuse(unknown, title, defaults)
    known = {*ROPE_SETTINGS, *holder.ignore_keys_at_rope_validation, *(defaults.get("rope_parameters") or {})}
    keys = itertools.chain(*ropes_in(given.get("rope_scaling") or given.get("rope_parameters")))
    refuse([key for key in keys if key not in known], f"the rope of {title}", known)


def ropes_in(rope_parameters: Any) -> list[dict[str, Any]]:
    """The only rope of a model, or one for each kind of its layers."""
    if not isinstance(rope_parameters, dict):
        return []
    return [rope for rope in rope_parameters.values() if isinstance(rope, dict)] or [rope_parameters]


def refuse(unknown: list[str], what: str, known: Iterable[str]) -> None:
    """Raises UserError for unknown settings, with the names of known ones that are similar to the first."""
    if unknown:
        near = difflib.get_close_matches(min(unknown), known, cutoff=0.4)
        raise UserError(f"model.architecture: {what} has no setting {', '.join(unknown)}; near are {near}")


def shapes_weights(setting: str, found: transformers.PreTrainedConfig, part: str = "") -> bool:
    """Whether a model cannot be built without this setting, which may be one of a part of the config, or another value
    of it makes other weights. Some models read one that their config class does not declare, as those of Qwen3-MoE do
    with head_dim."""
    changed = copy.deepcopy(found)
    holder = getattr(changed, part) if part else changed
    value = getattr(holder, setting)
    if not isinstance(value, int | float):
        return False
    shapes = shapes_of(found)
    try:
        delattr(holder, setting)
        shapes_of(changed)
    except Exception:  # Whatever the code of the model makes of it.
        return True
    setattr(holder, setting, not value if isinstance(value, bool) else 2 * value)
    return shapes_of(changed) != shapes


def shapes_of(found: transformers.PreTrainedConfig) -> list[torch.Size]:
    """The shapes of the weights of a model."""
    with torch.device("meta"):
        return [weight.shape for weight in transformers.AutoModelForCausalLM.from_config(found).parameters()]


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
                train_in_float32(model)
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
    check_kind(found)
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


def number_of_experts(text: transformers.PreTrainedConfig) -> tuple[str, int] | None:
    """The name that this family has for the number of experts in a layer, and that number. None if none are known."""
    for name in "num_local_experts", "num_experts", "n_routed_experts":
        if getattr(text, name, None):
            return name, getattr(text, name)
