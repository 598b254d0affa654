"""A launch that --plan asks about: its layout and batch plans by the launcher file, without any of its processes."""

import os
from collections.abc import Callable
from typing import Any

import accelerate

from samerun.config import Config
from samerun.errors import as_user_error, require
from samerun.parallel.layout import check_combination, layout_of, uses_fsdp
from samerun.plan import Plan
from samerun.run.launch import check_precision


class PlannedLaunch:
    """A launch on so many processes, by the launcher file that `accelerate launch` has put into the environment."""

    def __init__(
        self, config: Config, num_processes: int, plan_stages: Callable, loss_of: Callable, is_sharded: bool = False
    ):
        self.config, self.num_processes = config, num_processes
        self.plan_stages, self.loss_of = plan_stages, loss_of  # Those of train.py.
        self.is_sharded, self.plugin = is_sharded or uses_fsdp(), None
        if self.is_sharded:
            with as_user_error("launch: the FSDP section of the launcher file cannot be used"):
                self.plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=None if uses_fsdp() else 2)
            is_known = self.plugin.fsdp_version == 2
            require(is_known, "launch: FSDP is not supported; take another file of accelerate_configs/")
        by_named_file = is_sharded and not uses_fsdp()  # See changed(). It is in bf16, unless the launch says another.
        self.precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "bf16" if by_named_file else "no")
        check_precision(self.precision)
        self.layout = layout_of(config, num_processes, self.is_sharded)
        check_combination(self.layout, config, self.precision, self.plugin)
        limit = config.batch.max_micro_batch_size
        if limit == "auto":  # As if each device could hold all its rows at once.
            limit = max(rows for _, rows in config.batch_stages())
        self.stages = plan_stages(config, limit, num_processes, num_processes // self.layout.data_parallel_size)

    def changed(self, settings: dict[str, Any], is_sharded: bool) -> "PlannedLaunch":
        """The launch with other settings by their dotted paths, and by the launcher file of FSDP2 if it is sharded."""
        config = self.config
        for name, value in settings.items():
            section, field = name.split(".")
            part = getattr(config, section).model_copy(update={field: value})
            config = config.model_copy(update={section: part})
        return PlannedLaunch(config, self.num_processes, self.plan_stages, self.loss_of, is_sharded)

    @property
    def accumulates(self) -> bool:
        """Whether some step has several micro-steps."""
        return any(stage.plan.grad_accum_steps > 1 for stage in self.stages)

    @property
    def has_old_gradients(self) -> bool:
        """Whether there is memory for gradients before the last micro-step begins."""
        return self.layout.has_buckets or self.accumulates

    @property
    def kept_share(self) -> float:
        """The share of a new gradient that takes more memory: none if there was memory for it before."""
        return 0.0 if self.has_old_gradients else 1 / self.layout.shards

    @property
    def defers(self) -> bool:
        """Whether gradients that wait for further micro-steps are whole, and not shards."""
        return self.is_sharded and self.accumulates and self.config.batch.accumulation == "deferred"

    @property
    def plan(self) -> Plan:
        """The plan with the largest micro-batch."""
        plans = [stage.plan for stage in self.stages]
        return max(plans, key=lambda plan: (plan.micro_batch_size, plan.grad_accum_steps))
