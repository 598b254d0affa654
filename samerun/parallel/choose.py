"""Which strategy a launch gets."""

from collections.abc import Callable

from accelerate import Accelerator

from samerun.config import Config
from samerun.errors import UserError, require
from samerun.parallel.base import DDP
from samerun.parallel.deepspeed import DeepSpeed
from samerun.parallel.expert import ExpertParallel
from samerun.parallel.fsdp import FSDP2
from samerun.parallel.mesh import context_parallel_size, sequence_parallel_size, tensor_parallel_size
from samerun.parallel.pipeline import Pipeline, PipelineFSDP2
from samerun.parallel.sequence import (
    ContextParallelDDP,
    ContextParallelFSDP2,
    SequenceParallelDDP,
    SequenceParallelFSDP2,
)
from samerun.parallel.tensor import TensorParallel, TensorParallelFSDP2


def choose_strategy(config: Config, accelerator: Accelerator, loss_of: Callable) -> DDP:
    """The strategy of the launch. Raises UserError for one that is not here."""
    kind = accelerator.distributed_type.value
    if config.model.expert_ranks > 1:
        require(accelerator.is_fsdp2, "model.expert_ranks: needs FSDP2; take accelerate_configs/fsdp2.yaml, or use 1")
    if accelerator.is_fsdp2:
        strategy = kind_of_fsdp2(config)(config, accelerator, loss_of)
    elif kind == "NO" or kind.startswith("MULTI_"):
        strategy = kind_of_ddp(config)(config, accelerator, loss_of)
    elif kind == "DEEPSPEED":
        strategy = DeepSpeed(config, accelerator, loss_of)
    else:
        raise UserError(f"launch: {kind} is not supported; take another file of accelerate_configs/")
    strategy.check()
    return strategy


def kind_of_fsdp2(config: Config) -> type[DDP]:
    if config.model.expert_ranks > 1:
        return ExpertParallel
    if config.model.pipeline_ranks > 1:
        return PipelineFSDP2
    if tensor_parallel_size() > 1:
        return TensorParallelFSDP2
    if sequence_parallel_size() > 1:
        return SequenceParallelFSDP2
    if context_parallel_size() > 1:
        return ContextParallelFSDP2
    return FSDP2


def kind_of_ddp(config: Config) -> type[DDP]:
    if config.model.pipeline_ranks > 1:
        return Pipeline
    if tensor_parallel_size() > 1:
        return TensorParallel
    if sequence_parallel_size() > 1:
        return SequenceParallelDDP
    if context_parallel_size() > 1:
        return ContextParallelDDP
    return DDP
