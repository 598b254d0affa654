"""A small model of the same kind, for what is tried before the first step: no rank needs a whole one for it.

It has the attention and the adapters of the model of the run, and few layers. Where its config names them, it has few
tokens, experts, and columns within an MLP, too. What it cannot see: what only further layers of a kind do, what depends
on those numbers, and what is the matter with the weights of a pretrained model.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import transformers
from transformers import PreTrainedModel

from samerun.config import Model
from samerun.model.architecture import number_of_experts
from samerun.model.attention import attention
from samerun.model.build import make_model
from samerun.model.weights import names_of_placeholders

FEW = 960  # Sizes change by multiples of it, so that they leave the same remainder for the usual numbers of ranks.
LENGTHS = "vocab_size", "vocab_size_per_layer_input", "ffn_dim", "n_inner"
LENGTHS += "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"


def model_to_try(model: torch.nn.Module, config: Model, new_tokens: Sequence[int] = ()) -> torch.nn.Module:
    """A small model as a new one begins, with adapters. A model that has all its weights already is tried itself."""
    if not names_of_placeholders(model) and not getattr(model, "is_quantized", False):
        return model
    settings = config.model_copy(update={"pretrained": None, "dtype": "float32"})

    def make(found: transformers.PreTrainedConfig) -> torch.nn.Module:
        rows = found.get_text_config().vocab_size
        return make_model(settings, found, 0, 0, sorted({token % rows for token in new_tokens}))

    return first_that_works(make, model, config, chunks=1)


def small_model(model: PreTrainedModel, config: Model, chunks: int, device: torch.device) -> PreTrainedModel:
    """A small model in float32, the same on all ranks, to be divided or to share rows.

    What differs from one rank to another, such as the plans of transformers and the sums over ranks, is a matter of the
    kind and the layout. So a mistake in it shows in a few layers.
    """

    def make(found: transformers.PreTrainedConfig) -> torch.nn.Module:
        if config.lora is not None:  # Then no rank divides it.
            return make_model(config.model_copy(update={"pretrained": None, "dtype": "float32"}), found, 0, 0)
        return type(model)._from_config(found, dtype=torch.float32)

    small = first_that_works(make, model, config, chunks)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in small.parameters():  # No two alike, and large enough that all gradients are above rounding.
            if parameter.ndim < 2:
                parameter.data += 0.1 * torch.randn_like(parameter)
            else:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    small.set_attn_implementation(model.config._attn_implementation)
    return small.to(device).eval()


def first_that_works(make: Callable, model: torch.nn.Module, config: Model, chunks: int) -> torch.nn.Module:
    """A small model of this kind that computes. Some kinds cannot have few columns, or few layers: then it is whole."""
    with torch.random.fork_rng(devices=[]):
        for is_narrow in True, False:
            torch.manual_seed(0)
            with suppress(Exception):  # Whatever the code of the model makes of it.
                few = with_layers(model.config, layers_to_try(model, chunks))
                small = make(narrow(few, config.expert_ranks) if is_narrow else few).eval()
                with torch.no_grad(), attention(small, "eager"):
                    small(input_ids=torch.ones(1, 2, dtype=torch.long), use_cache=False)
                return small
        torch.manual_seed(0)
        return make(copy.deepcopy(model.config)).eval()


def narrow(found: transformers.PreTrainedConfig, expert_ranks: int) -> transformers.PreTrainedConfig:
    """The config with few tokens, experts, and columns within an MLP. The widths of the attention are as they are."""
    found = copy.deepcopy(found)
    text = found.get_text_config()
    for name in LENGTHS:
        size = getattr(text, name, None)
        if isinstance(size, int) and size >= 2 * FEW:
            setattr(text, name, FEW + size % FEW)
    if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
        text.pad_token_id = 0  # Some configs want a number, and no embedding can leave out a row that it lacks.
    if experts := number_of_experts(text):
        name, count = experts
        setattr(text, name, fewer_experts(text, count, expert_ranks))
    return found


def fewer_experts(text: transformers.PreTrainedConfig, count: int, ranks: int) -> int:
    """How many experts a small model has: at least twice as many as see a token, several for each rank, and as many in
    each of DeepSeek's groups."""
    chosen = getattr(text, "num_experts_per_tok", None)
    if not isinstance(chosen, int):  # HunYuan may have a number for each layer.
        return count
    groups, open_groups = getattr(text, "n_group", None) or 1, getattr(text, "topk_group", None) or 1
    for fewer in range(max(2 * chosen, 2 * ranks), count):
        in_a_group = fewer // groups
        if fewer % ranks == fewer % groups == 0 and in_a_group > 1 and in_a_group * open_groups >= chosen:
            return fewer
    return count


def with_layers(found: transformers.PreTrainedConfig, count: int) -> transformers.PreTrainedConfig:
    """The config with the first layers only."""
    found = copy.deepcopy(found)
    text = found.get_text_config()
    before, text.num_hidden_layers = text.num_hidden_layers, count
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == before:  # Such as layer_types.
            setattr(text, name, value[:count])
    return found


def layers_to_try(model: PreTrainedModel, chunks: int) -> int:
    """So many of the first layers that there is one of each kind, and one for each chunk of a pipeline."""
    text = model.config.get_text_config()
    every = text.num_hidden_layers
    types = getattr(text, "layer_types", None) or [""] * every
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == every]
    if not lists:
        return every
    first = {}  # The first layer of each kind.
    for number, layer in enumerate(lists[0]):
        shapes = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
        first.setdefault((types[number], shapes), number)
    return min(every, max(2, chunks, 1 + max(first.values())))
