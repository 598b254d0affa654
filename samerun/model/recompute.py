"""What the backward pass computes again instead of keeping it: model.gradient_checkpointing."""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from samerun.errors import require

# Matrix products and fused attention take nearly all of the time, and norms, activations and rotations most of the
# memory. Products within eager attention are not kept: there is a number for each pair of tokens.
KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::linear",  # On Apple's GPUs.
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
}
MARKS = torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction


def recompute_layers(model: PreTrainedModel, setting: str, selective: bool = False) -> None:
    """Let each layer compute its activations again in the backward pass: all of them, or those that take little time.

    Raises UserError, which names the setting, for a model that does not offer it.
    """
    advice = f"transformers does not offer it for a {model.config.model_type}; use false"
    require(model.supports_gradient_checkpointing, f"{setting}: {advice}")
    options = {"use_reentrant": False}
    if selective:
        # FSDP2 marks more places of experts for profilers in the second pass than in the first.
        SAC_IGNORED_OPS.update(MARKS)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keeps)
    model.activation_checkpointing_enable(options)


def keeps(context: SelectiveCheckpointContext, function: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Whether torch keeps what this function of its own returns, by its arguments.

    All that draws random numbers is computed again, in the same order, so that it draws the same numbers.
    """
    is_kept = function.name() in KEPT
    if is_kept:
        names = [argument.name for argument in function._schema.arguments]
        is_kept = not (dict(zip(names, args)) | options).get("dropout_p")
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
