"""A model without its numbers: the names and shapes of its weights, on the meta device; and one with all of them."""

import copy
import importlib.util
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from samerun.config import Model
from samerun.errors import require


def outline(config: Model, found: transformers.PreTrainedConfig) -> PreTrainedModel:
    """The model with its buffers, and with weights on the meta device. Raises UserError if its files lack some."""
    model = plain = bare(config, found)
    if config.pretrained:  # Its files say how its weights are called there, and how it generates text.
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            config.pretrained, config=found, device_map="meta", output_loading_info=True, **loading_options(config)
        )
        require(not report["missing_keys"], f"its files lack {', '.join(sorted(report['missing_keys']))}")
        train_every_row(model)
        for module, same in zip(model.modules(), plain.modules()):
            module._buffers |= same._buffers
    return model


def bare(config: Model, found: transformers.PreTrainedConfig, fills_buffers: bool = True) -> PreTrainedModel:
    """The model before anything else is done to it, with its buffers, and with weights on the meta device."""
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(found), None)
    lacks_sdpa = config.attention == "sdpa" and not getattr(kind, "_supports_sdpa", True)
    require(not lacks_sdpa, "transformers has no sdpa for it; give model.attention: eager")
    with init_empty_weights(include_buffers=False), nullcontext() if fills_buffers else no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(found), **loading_options(config))
    model.tie_weights()
    if fills_buffers and not is_of_transformers(model):
        check_ties(model, config, found)
    train_every_row(model)
    return model


def check_ties(model: PreTrainedModel, config: Model, found: transformers.PreTrainedConfig) -> None:
    """Raises UserError if code outside of transformers gives one weight to two modules, and does not tell transformers:
    they would be trained as two."""
    try:
        with torch.device("meta"), no_init_weights():
            made = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(found), **loading_options(config))
    except Exception:  # Such code may compute with numbers, which this device has not.
        return
    firsts = {weight: name for name, weight in made.named_parameters()}
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in made.named_parameters(remove_duplicate=False):
        first = firsts[weight]
        advice = f'set _tied_weights_keys = {{"{name}": "{first}"}} in its class and tie_word_embeddings in its config'
        require(weights[name] is weights[first], f"its {name} is {first}, but transformers does not know; {advice}")


def check_kind(model: torch.nn.Module) -> None:
    """Raises UserError if a fork's model is a plain module: nothing would know its config or how it is saved."""
    found = getattr(model, "config", None)
    advice = "make the model a PreTrainedModel with a PreTrainedConfig, as tests/forks/own_model.py does"
    is_known = isinstance(found, transformers.PreTrainedConfig)
    require(is_known, f"model: its config is a {type(found).__name__}, not one of transformers; {advice}")


def loading_options(config: Model) -> dict[str, Any]:
    """What transformers is told about a model in any case."""
    return {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": config.attention,
        "trust_remote_code": config.trust_remote_code,
    }


def train_every_row(model: torch.nn.Module) -> None:
    """Let no embedding leave out the pad token, whose row would stay 0.

    Nothing is padded with it here, and by its number it may be any token: families have a default for pad_token_id,
    whatever the tokenizer is.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None


def extend_embeddings(model: PreTrainedModel, vocab_size: int) -> None:
    """Give the model a row for each token, which a pretrained one may lack."""
    embedding = model.get_input_embeddings()
    if vocab_size > embedding.num_embeddings:
        model.resize_token_embeddings(vocab_size, mean_resizing=not embedding.weight.is_meta)


def load_whole(config: Model, found: transformers.PreTrainedConfig) -> PreTrainedModel:
    """The model as transformers makes it: in the memory of the host or, if it is quantized, on the device."""
    kind, options = transformers.AutoModelForCausalLM, loading_options(config)
    if config.pretrained:
        if config.load_in_4bit:
            options["quantization_config"] = four_bits(config)
        model = kind.from_pretrained(config.pretrained, config=found, **options)
    else:
        model = kind.from_config(found, **options)
    train_every_row(model)
    for module in model.modules():
        # With AVX512-BF16, bitsandbytes rearranges weights in evaluations on a CPU. Then they pass on no gradients.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def four_bits(config: Model) -> transformers.BitsAndBytesConfig:
    """As in QLoRA (arxiv.org/abs/2305.14314). The layers compute in the type of the weights that are left."""
    is_there = importlib.util.find_spec("bitsandbytes") is not None
    require(is_there, "model.load_in_4bit needs bitsandbytes; pip install bitsandbytes==0.50.2")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, config.dtype),
        # FSDP2 shards no integers, and would cast codes that are kept as another type than it computes in.
        bnb_4bit_quant_storage=torch.float16 if config.dtype == "float16" else torch.bfloat16,
    )


def is_quantized(config: Model, found: transformers.PreTrainedConfig) -> bool:
    """Whether the weights are to be quantized, or their files are. A new model has none that are."""
    in_files = getattr(found, "quantization_config", None) is not None
    return bool(config.pretrained) and (config.load_in_4bit or in_files)


def is_of_transformers(model: torch.nn.Module) -> bool:
    """Whether the class of the model is one of transformers, which draw all weights in _init_weights()."""
    return type(model).__module__.startswith("transformers.")


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model that DDP or DeepSpeed has wrapped, or the model itself."""
    return getattr(model, "module", model)


def unsplit_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those that transformers says are to stay whole, which are the decoder layers of most models."""
    return [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or [])]


def state_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weights and saved buffers by their names, tied ones once."""
    return {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}


def let_go(module: torch.nn.Module, recurse: bool = True) -> None:
    """Put the weights on the meta device, so that the memory that they took is free."""
    for owner in module.modules() if recurse else [module]:
        for name, weight in owner._parameters.items():
            if weight is not None:
                owner._parameters[name] = torch.nn.Parameter(weight.to("meta"), weight.requires_grad)
