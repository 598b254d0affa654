"""The config and launcher files of this template, by name: what a fork adds beside them is its own affair."""

from helpers import ROOT

CONFIGS = [
    ROOT / "configs" / f"{name}.yaml"
    for name in ("finetune_chat", "long_context", "lora_8b", "pretrain_1b", "small", "small_chat")
]
LAUNCHERS = [
    ROOT / "accelerate_configs" / f"{name}.yaml"
    for name in (
        "context_parallel",
        "cpu",
        "deepspeed_zero2",
        "deepspeed_zero3",
        "fp8",
        "fsdp2",
        "fsdp2_tensor_parallel",
        "hsdp",
        "multi_gpu",
        "multi_node",
        "sequence_parallel",
        "single",
        "tensor_parallel",
    )
]
