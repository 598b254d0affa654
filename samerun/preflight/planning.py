"""What --plan does."""

import itertools
import os
from collections.abc import Callable
from contextlib import suppress

import pandas as pd
import transformers
from torch.distributed.fsdp import CPUOffloadPolicy

from samerun.config import Config
from samerun.data.encode import number_of_ids
from samerun.errors import UserError, as_user_error, require, say
from samerun.model.architecture import model_config
from samerun.model.balance import check_balance
from samerun.model.tokenizer import load_tokenizer
from samerun.parallel.layout import check_layers_and_heads
from samerun.plan import check_length, plan_table, say_if_idle
from samerun.preflight.host import memory_per_host
from samerun.preflight.memory import memory_per_device, total_gib
from samerun.preflight.planned_launch import PlannedLaunch
from samerun.run.launch import StopSignal, go_offline_without_network, silence_libraries


def print_plans(config: Config, process_counts: list[int], plan_stages: Callable, loss_of: Callable) -> None:
    """What --plan shows: no data, weights or device are touched."""
    StopSignal().raise_at_signals()
    silence_libraries()
    launches = [PlannedLaunch(config, count, plan_stages, loss_of) for count in process_counts]
    check_config(config, launches)
    stages = list(itertools.chain(*(launch.stages for launch in launches)))
    say(plan_table(stages, config.model.pipeline_ranks))
    for launch in launches:
        say_if_idle(min((stage.plan for stage in launch.stages), key=lambda plan: plan.global_batch_size))
    if config.perf.device_memory_gib:
        say_memory(config, launches)
    if config.perf.host_memory_gib:
        say_host_memory(config, launches)


def check_config(config: Config, launches: list[PlannedLaunch]) -> None:
    """Raises UserError for what a launch would refuse by the config alone. A model on the Hub is not asked for."""
    if config.run.max_steps:
        check_length(config, launches[0].stages, config.run.max_steps)
    if config.model.architecture or os.path.isdir(config.model.pretrained):
        any_size = 384  # Of the vocabulary, where the config does not say it.
        found = model_config(config, any_size)
        for launch in launches:
            check_layers_and_heads(launch.layout, config, found)
        check_balance(found, config.model)


def planned_model(config: Config) -> transformers.PreTrainedConfig:
    """The config of the model. Raises UserError where it, or the size of its vocabulary, cannot be had."""
    architecture, vocab_size = config.model.architecture, None
    if config.model.pretrained or "vocab_size" not in architecture:
        go_offline_without_network(config)
    if architecture and "vocab_size" not in architecture:
        vocab_size = number_of_ids(load_tokenizer(config.data, config.model))
    return model_config(config, vocab_size)


def check_is_known(launch: PlannedLaunch) -> None:
    """Raises UserError for what the memory plan does not know."""
    require(launch.precision != "fp8", "it is not known for float8")
    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"  # The plan itself is that of DDP.
    require(not uses_deepspeed, "it is not known for DeepSpeed")
    offloads = launch.plugin and isinstance(launch.plugin.cpu_offload, CPUOffloadPolicy)
    require(not offloads, "it is not known for fsdp_offload_params")


def say_memory(config: Config, launches: list[PlannedLaunch]) -> None:
    """The table of memory per device, and what to change where it is too small. Or why it is not known."""
    try:
        found = planned_model(config)
        lines, advice = [], []
        for launch in launches:
            check_is_known(launch)
            with as_user_error("it is not known for this model"):
                memory = memory_per_device(launch, found)
                lines.append(memory_line(launch, memory | {"all": sum(memory.values())}))
                advice.append(what_fits(launch, found))
    except UserError as error:
        say(f"Memory: {error}")
        return
    kind, precision = named(launches[0]), launches[0].precision
    say(f"\nGiB per device, {kind}, mixed precision {precision}:")
    if launches[0].layout.ep > 1:
        say("It assumes that the router sends equally many tokens to all experts.")
    say(pd.DataFrame(lines).to_string(index=False))
    for text in filter(None, advice):
        say(text)


def named(launch: PlannedLaunch) -> str:
    """The words for what divides the model."""
    kind = "FSDP2" if launch.is_sharded else "DDP"
    return f"{kind}, {launch.layout}" if launch.layout.is_divided or launch.layout.row_ranks > 1 else kind


def memory_line(launch: PlannedLaunch, memory: dict[str, float]) -> dict[str, str]:
    return {"processes": f"{launch.num_processes:,}"} | {name: f"{size / 2**30:,.3f}" for name, size in memory.items()}


def say_host_memory(config: Config, launches: list[PlannedLaunch]) -> None:
    """The table of memory per host, and which of its figures are too large. Or why it is not known."""
    limit, lines, too_large = config.perf.host_memory_gib, [], []
    try:
        found = planned_model(config)
        for launch in launches:
            check_is_known(launch)
            with as_user_error("it is not known for this model"):
                memory = memory_per_host(launch, found)
            lines.append(memory_line(launch, memory))
            what = max(memory, key=memory.get)
            if memory[what] > limit * 2**30:
                takes = f"{launch.num_processes:,} processes: {what} takes {memory[what] / 2**30:,.1f} GiB"
                too_large.append(f"{takes}, beyond {limit:g}.")
    except UserError as error:
        say(f"Memory of a host: {error}")
        return
    say(f"\nGiB per host of up to {config.perf.ranks_per_host} ranks, without their libraries:")
    say(pd.DataFrame(lines).to_string(index=False))
    for text in too_large:
        say(f"{text} Let fewer ranks share a host. For save, dividing the model among more ranks helps, too.")


# What saves memory, from what costs least to what costs most.
SAVINGS = [
    {"model.chunked_loss": True},
    {"model.gradient_checkpointing": "selective"},
    {"model.gradient_checkpointing": True},
    {"batch.max_micro_batch_size": 1},
    {"batch.max_micro_batch_size": 1, "batch.accumulation": "immediate"},
]


def sharding_file(launch: PlannedLaunch) -> str:
    """The launcher file by which the same ranks would shard the model, and its precision where that is another one."""
    ways = {"sp": "sequence_parallel.yaml", "cp": "context_parallel.yaml"}
    files = [file for way, file in ways.items() if launch.layout.uses(way)]
    file = f"accelerate_configs/{files[0] if files else 'fsdp2.yaml'}"
    # A plan without a launcher has float32, and the files have bf16. A precision that the launch was given stays.
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision is None:
        return f"{file} (bf16)"
    return f"{file} --mixed_precision {precision}" if precision in ("no", "fp16") else file


def what_fits(launch: PlannedLaunch, found: transformers.PreTrainedConfig) -> str:
    """What to change, one thing after the other, until a device has memory enough; "" if it has."""
    limit, total = launch.config.perf.device_memory_gib, total_gib(launch, found)
    if total <= limit:
        return ""
    said = [f"{launch.num_processes:,} processes: {total:,.1f} GiB do not fit into {limit:g}."]
    if launch.config.batch.max_micro_batch_size == "auto":
        return f"{said[0]} That is with all rows of a rank at once; with auto, the launch finds out how many fit."
    has_all_weights = not launch.is_sharded and not launch.layout.is_divided
    shards = [{}] if has_all_weights and launch.num_processes > 1 else []  # By another file, with the same settings.
    for saving in [*shards, *SAVINGS]:
        with suppress(UserError, RuntimeError):  # A launch would be refused, or torch refuses selective checkpointing.
            changed = launch.changed(saving, launch.is_sharded or not saving)
            less = total_gib(changed, found)
            if less <= limit or less < 0.99 * total:
                launch, total = changed, less
                what = " ".join(f"--{name} {str(value).lower()}" for name, value in saving.items())
                said.append(f"With {what or sharding_file(launch)}: {total:,.1f} GiB.")
        if total <= limit:
            return " ".join([*said, "That fits."])
    advice = "Then take more devices, sequence or context parallelism for long rows, or a smaller model."
    return " ".join([*said, advice])
