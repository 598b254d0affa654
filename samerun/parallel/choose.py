"""The parallelism of a launch."""

from collections.abc import Callable

from accelerate import Accelerator

from samerun.config import Config
from samerun.errors import UserError
from samerun.parallel.deepspeed import DeepSpeed
from samerun.parallel.layout import layout_of
from samerun.parallel.mesh import Parallelism


def choose_parallelism(config: Config, accelerator: Accelerator, loss_of: Callable) -> Parallelism:
    """What the launcher file and the config ask for. Raises UserError for what is not here."""
    kind, processes = accelerator.distributed_type.value, accelerator.num_processes
    layout = layout_of(config, processes, accelerator.is_fsdp2, accelerator.process_index)
    if kind == "DEEPSPEED":
        parallel = DeepSpeed(config, accelerator, layout, loss_of)
    elif accelerator.is_fsdp2 or kind == "NO" or kind.startswith("MULTI_"):
        parallel = Parallelism(config, accelerator, layout, loss_of)
    else:
        raise UserError(f"launch: {kind} is not supported; take another file of accelerate_configs/")
    parallel.check()
    return parallel
