"""The transformers config of a model: read or made, and refused where a setting would have no effect."""

import copy
import difflib
import itertools
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers.modeling_rope_utils import RopeParameters

from samerun.config import Config
from samerun.errors import UserError, as_user_error, require

# Fields of any transformers config that settings of the run decide.
OF_THE_LAUNCH = "leave it out; model.dtype and the mixed_precision of the launch decide it"
SET_ELSEWHERE = {
    "dtype": OF_THE_LAUNCH,
    "torch_dtype": OF_THE_LAUNCH,
    "attn_implementation": "give model.attention",
    "router_aux_loss_coef": "give model.balance_loss",
    "output_router_logits": "give model.balance_loss",
}
# The last three are of HunYuan and PhiMoE.
ROPE_SETTINGS = {*RopeParameters.__annotations__, "type", "alpha", "short_mscale", "long_mscale"}
# What transformers calls the biases by which routers choose experts.
ROUTER_BIASES = "e_score_correction_bias", "expert_bias"


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
            found = new_model_config(architecture, vocab_size, length)
    has_codes = config.model.load_in_4bit and getattr(found, "quantization_config", None) is not None
    require(not has_codes, "model.load_in_4bit: the files of model.pretrained have quantized weights; leave it out")
    check_architecture(architecture, found)
    check_is_loaded_again(found)
    positions = getattr(found.get_text_config(), "max_position_embeddings", None) or length
    require(length <= positions, f"data.sequence_length {length} exceeds the model's {positions} positions")
    return found


def new_model_config(
    architecture: dict[str, Any], vocab_size: int | None, length: int
) -> transformers.PreTrainedConfig:
    """That of model.architecture, which need not say how many tokens the model knows, nor how long its rows are."""
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
        try:
            text.pad_token_id = None  # It was that of the family's own tokenizer.
        except StrictDataclassFieldValidationError:  # Its config wants a number.
            text.pad_token_id = 0
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


def number_of_experts(text: transformers.PreTrainedConfig) -> tuple[str, int] | None:
    """The name that this family has for the number of experts in a layer, and that number. None if none are known."""
    for name in "num_local_experts", "num_experts", "n_routed_experts":
        if getattr(text, name, None):
            return name, getattr(text, name)
