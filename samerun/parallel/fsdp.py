"""FSDP2 and HSDP: ranks share the weights."""

from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from samerun.errors import require
from samerun.parallel.base import DDP, Division, Sharded

# How FSDP2 computes in bf16 and float8. Accelerate's and torch's own policies would also sum over the ranks in bf16.
BF16_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class FSDP2(Sharded):
    """Fully sharded data parallelism: each rank holds a shard of the model, and gathers one layer at a time.

    HSDP is this class, too: in hsdp.yaml, dp_shard_size says how many ranks share one copy of the model.
    """

    def division(self) -> Division:
        processes, parallelism = self.accelerator.num_processes, self.accelerator.parallelism_config
        copies = parallelism.dp_replicate_size if parallelism else 1
        return sharded_division(self, processes // copies)

    def prepare(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> torch.nn.Module:
        if self.accelerator.mixed_precision != "no":
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = BF16_POLICY
        return super().prepare(model, optimizers)


def check_sharding(setting: str, accelerator: Accelerator) -> None:
    """Raises UserError for what only Accelerate's own FSDP2 does, and shard_layers() does not."""
    parallelism, plugin = accelerator.parallelism_config, accelerator.state.fsdp_plugin
    copies = parallelism.dp_replicate_size if parallelism else 1
    require(copies == 1, f"{setting}: cannot be combined with HSDP; let dp_replicate_size be 1")
    asked = {
        "fsdp_activation_checkpointing": plugin.activation_checkpointing,
        "fsdp_cpu_ram_efficient_loading": plugin.cpu_ram_efficient_loading,
        "fsdp_offload_params": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
    }
    for name, value in asked.items():
        advice = "set it to false; model.gradient_checkpointing saves memory, too"
        require(not value, f"{setting}: cannot be combined with {name}; {advice}")


def sharded_division(strategy: DDP, shards: int) -> Division:
    """FSDP2 among so many ranks. While a synchronization is deferred, gradients are whole."""
    return Division(
        weights=shards,
        gradients=shards,
        optimizer=shards,
        defers=not strategy.config.batch.sync_each_micro_step,
        gathers=True,
        gathers_all=not strategy.accelerator.state.fsdp_plugin.reshard_after_forward,
    )


def shard_layers(model: torch.nn.Module, mesh: DeviceMesh, accelerator: Accelerator) -> None:
    """FSDP2 among the ranks of a mesh, where Accelerate would shard over all ranks."""
    elsewhere = {parameter for parameter in model.parameters() if parameter.is_meta}
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or [])]
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh, ignored_params=elsewhere, **sharding_options(accelerator))


def sharding_options(accelerator: Accelerator) -> dict[str, Any]:
    """What the launcher file says about FSDP2, as fully_shard() takes it."""
    return {
        "reshard_after_forward": accelerator.state.fsdp_plugin.reshard_after_forward,
        "mp_policy": BF16_POLICY if accelerator.mixed_precision == "bf16" else MixedPrecisionPolicy(),
    }
