"""LoRA: adapters by peft, and the settings that peft would leave out without a word."""

import copy
import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from samerun.errors import as_user_error, require
from samerun.value_types import as_list

# What peft warns of where a field of its config has no effect.
NO_EFFECT = ".*(were set but no parameter|but no modules were excluded)"


def add_lora(model: torch.nn.Module, lora: dict[str, Any], new_tokens: Sequence[int] = ()) -> torch.nn.Module:
    """Adapters as peft makes them, and trained embeddings of `new_tokens`, which nothing has trained so far."""
    import peft  # Not at the top of the file, because it takes long.

    layers = [f".{name}" for name, _ in model.named_modules(remove_duplicate=False)]
    with as_user_error("model.lora"), warnings.catch_warnings():
        warnings.filterwarnings("error", NO_EFFECT)
        warnings.filterwarnings("ignore", "The following .*_pattern keys")  # Also of what peft adds; see check_lora().
        lora = {"task_type": "CAUSAL_LM", **lora, "modules_to_save": as_list(lora.get("modules_to_save")) or None}
        if new_tokens:
            lora.setdefault("trainable_token_indices", rows_of_tokens(model, lora, new_tokens))
        is_of_text = lora["task_type"] != "CAUSAL_LM" or hasattr(model, "prepare_inputs_for_generation")
        require(is_of_text, f"a {type(model).__name__} generates no text; give its task_type, such as SEQ_CLS")
        advice = "ensure_weight_tying: what is trained for two layers at once could not be saved; leave it out"
        require(not lora.get("ensure_weight_tying"), advice)
        found = peft.LoraConfig(**copy.deepcopy(lora))  # peft writes into what it is given.
        check_for_codes(model, found)
        adapted = peft.get_peft_model(model, found)
        tuner = adapted.base_model
        check_lora(lora, found, layers, [*tuner.targeted_module_names, *tuner.targeted_parameter_names])
    learns = lora.get("lora_alpha") != 0 and not lora.get("inference_mode")
    require(learns, "model.lora: its adapters would learn nothing; leave out inference_mode, and a lora_alpha of 0")
    return adapted


def check_lora(lora: dict[str, Any], found: Any, layers: list[str], adapted: list[str]) -> None:
    """Raises UserError for a name that peft has found among no layers, and would leave out without a word.

    In `found`, its own config, it has translated the names that the layers of mixtures had in earlier transformers.
    `adapted`: the names of the layers, and of experts' weights, that have got an adapter.
    """
    for setting, start in ("target_modules", "."), ("modules_to_save", ""):  # Of these, peft takes the end of a name.
        given = [] if isinstance(lora.get(setting), str) else lora.get(setting) or []
        names = [name for name in given if name in getattr(found, setting)]
        unknown = [name for name in names if not any(layer.endswith(f"{start}{name}") for layer in layers)]
        require(not unknown, f"{setting}: no layer is called {', '.join(map(str, unknown))}; leave it out")
    for setting in "rank_pattern", "alpha_pattern":  # peft adds others, which may match nothing.
        for pattern in lora.get(setting) or {}:
            is_known = any(re.match(rf"(.*\.)?({pattern})$", name) for name in adapted)  # As peft reads them.
            require(is_known, f"{setting}: nothing that gets an adapter is called {pattern}; leave it out")
    given = lora.get("layers_to_transform") or []
    numbers = {part for layer in layers for part in layer.split(".")}
    unknown = [number for number in ([given] if isinstance(given, int) else given) if str(number) not in numbers]
    require(not unknown, f"layers_to_transform: no layer has the number {unknown}; the first one is 0")


def check_adapter_loads(model: torch.nn.Module) -> None:
    """Raises UserError if peft would not load all that it saves of an adapter. It only warns, and leaves the rest as a
    new adapter begins: it renames weights as transformers renames those of the family's published files."""
    import peft

    if not hasattr(model, "peft_config"):  # Of a fork that forgets add_lora(), check_adapted() tells.
        return
    with as_user_error("model.lora: peft could not load what it saves"):
        saved = peft.get_peft_model_state_dict(model, save_embedding_layers=False)  # "auto" asks the Hub.
        loaded = peft.set_peft_model_state_dict(model, saved)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    lost = {re.sub(r"^base_model\.model\.|\.lora_.*", "", name) for name in trained.intersection(loaded.missing_keys)}
    lost = ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in lost}))  # Of all layers at once.
    found = f"peft would not load these adapters of a saved {model.config.model_type}, because it renames them: {lost}"
    require(not lost, f"model.lora: {found}; name their layers in exclude_modules")


def check_for_codes(model: torch.nn.Module, found: Any) -> None:
    """Raises UserError if peft would train the codes of quantized weights, or take them for the weights."""
    if not getattr(model, "is_quantized", False):
        return
    reads = str(found.init_lora_weights).startswith(("pissa", "loftq"))
    advice = f"init_lora_weights {found.init_lora_weights} needs weights that are not quantized; leave it out"
    require(not reads, advice)
    for name, module in model.named_modules():
        is_saved = any(name.endswith(end) for end in found.modules_to_save or ())
        has_codes = any(type(weight) is not torch.nn.Parameter for weight in module.parameters())
        advice = "is quantized, and cannot be trained; give it to target_modules"
        require(not (is_saved and has_codes), f"modules_to_save: {name} {advice}")


def rows_of_tokens(model: torch.nn.Module, lora: dict[str, Any], tokens: Sequence[int]) -> dict[str, list[int]] | None:
    """The rows of these tokens in the embedding and in the output layer, unless an adapter trains the layer anyway."""
    trained = [*as_list(lora.get("target_modules")), *as_list(lora.get("modules_to_save"))]
    layers = [model.get_input_embeddings()]
    if model.get_output_embeddings().weight is not layers[0].weight:  # Otherwise peft trains both as one.
        layers.append(model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if module in layers]
    return {name: list(tokens) for name in names if name.split(".")[-1] not in trained} or None


def starts_from_weights(lora: dict[str, Any]) -> bool:
    """Whether the first values of an adapter depend on those of the weights that it adapts, as those of PiSSA do."""
    return lora.get("init_lora_weights", True) not in (True, False, "gaussian") or lora.get("use_dora", False)


def train_in_float32(model: torch.nn.Module, of_frozen: torch.dtype) -> None:
    """Let lora.modules_to_save be float32 beside frozen weights in 16 bits, for which most updates are too small.

    peft itself sees to that for its adapters. Such a module computes in float32, and returns 16 bits to the layers.
    """
    from peft.utils.other import ModulesToSaveWrapper

    def before(module: torch.nn.Module, args: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return as_type(torch.float32, (args, options))

    def after(module: torch.nn.Module, args: tuple, output: Any) -> Any:
        return as_type(of_frozen, output)

    def as_type(dtype: torch.dtype, values: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, values)

    for wrapper in model.modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            for trained in wrapper.modules_to_save.values():
                trained.float()
                trained.register_forward_pre_hook(before, with_kwargs=True)
                trained.register_forward_hook(after)
