"""How many ranks each dimension has, where a rank is, and what cannot be combined. None of it needs a process group."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import PreTrainedConfig

from samerun.config import Config, Model
from samerun.errors import UserError, require


@dataclass(frozen=True)
class Layout:
    """The ranks as one mesh. A rank has a coordinate in each dimension, under the names of Accelerate and TorchTitan:

    pp            other layers                            model.pipeline_ranks
    dp_replicate  other rows, and a copy of the weights   parallelism_config_dp_replicate_size; DDP: what is left
    dp_shard      other rows, and a shard of the weights  FSDP2: what is left
    cp or sp      other tokens of the same rows           parallelism_config_cp_size, parallelism_config_sp_size
    tp            the same rows, and a part of each matrix  parallelism_config_tp_size

    and, for the experts of a mixture, in a second mesh, in which ep (model.expert_ranks) and what is left of
    dp_shard x cp x sp x tp take the place of these four.
    """

    rank: int = 0
    is_sharded: bool = False  # By FSDP2.
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1

    # From the slowest links to the fastest: neighbours in tp are on one machine, and a pipeline may be on several.
    DIMENSIONS: ClassVar = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
    DATA: ClassVar = ("dp_replicate", "dp_shard", "cp", "sp")  # Ranks with other tokens. Their gradients are added up.

    def size(self, *names: str) -> int:
        return math.prod(getattr(self, name) for name in names)

    def place(self, *names: str) -> int:
        """The number of this rank among those that differ in these dimensions only."""
        where = np.unravel_index(self.rank, [self.size(name) for name in self.DIMENSIONS])
        where = dict(zip(self.DIMENSIONS, where))
        return int(np.ravel_multi_index([where[name] for name in names], [self.size(name) for name in names]))

    @cached_property
    def processes(self) -> int:
        return self.size(*self.DIMENSIONS)

    @cached_property
    def data_parallel_size(self) -> int:
        """How many ranks, or groups of ranks that share them, compute on different rows."""
        return self.size("dp_replicate", "dp_shard")

    @cached_property
    def data_parallel_rank(self) -> int:
        return self.place("dp_replicate", "dp_shard")

    @cached_property
    def ranks_per_row(self) -> int:
        """How many ranks share the work on each row, by its tokens or by the weights."""
        return self.processes // self.data_parallel_size

    @cached_property
    def row_ranks(self) -> int:
        """How many ranks share the tokens of each row."""
        return self.size("cp", "sp")

    @cached_property
    def shards(self) -> int:
        """Among how many ranks FSDP2 shards what a rank has of the model."""
        return self.size("dp_shard", "cp", "sp") if self.is_sharded else 1

    @cached_property
    def is_divided(self) -> bool:
        """Whether ranks have other weights for another reason than FSDP2. Then Accelerate does not wrap the model."""
        return self.size("pp", "tp", "ep") > 1

    @cached_property
    def averages_over(self) -> int:
        """Over how many ranks DDP or FSDP2 average the gradients. Others are added up, see reduce_gradients()."""
        return self.size(*self.DATA) if self.is_sharded or not self.is_divided else 1

    @cached_property
    def has_buckets(self) -> bool:
        """Whether DDP holds the gradients in buckets, which take memory all the time."""
        return self.processes > 1 and not self.is_sharded and not self.is_divided

    def uses(self, name: str) -> bool:
        return self.is_sharded if name == "dp_shard" else self.size(name) > 1

    def setting(self, name: str) -> str:
        """What a user has asked for to get this dimension."""
        if name == "dp_shard":
            return "launch: FSDP2"
        of_model = {"pp": "model.pipeline_ranks", "ep": "model.expert_ranks"}
        return f"{of_model.get(name, f'launch: parallelism_config_{name}_size')} {self.size(name)}"

    def __str__(self) -> str:
        sizes = [f"{name} {self.size(name)}" for name in (*self.DIMENSIONS, "ep") if self.size(name) > 1]
        return " x ".join(sizes) or "one device"


def launched_size(name: str) -> int:
    """A size of the launcher file's parallelism section, which Accelerate passes on."""
    variable = f"PARALLELISM_CONFIG_{name.upper()}_SIZE"
    value = os.environ.get(variable, "1")
    require(re.fullmatch("0*[1-9][0-9]*", value), f"launch: {variable} is {value!r}; give a number of processes")
    return int(value)


def uses_fsdp() -> bool:
    """Whether the launcher file asks for FSDP2."""
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def layout_of(config: Config, processes: int, is_sharded: bool, rank: int = 0) -> Layout:
    """The layout of a launch by the launcher file in the environment. Raises UserError for sizes that do not fit."""
    sizes = {name: launched_size(name) for name in ("cp", "sp", "tp")} | {"pp": config.model.pipeline_ranks}
    if is_sharded:
        sizes["dp_replicate"] = launched_size("dp_replicate")
    one_way = 1 in (sizes["cp"], sizes["sp"])
    require(one_way, "launch: give parallelism_config_sp_size or parallelism_config_cp_size, not both")
    shards = 1 if is_sharded else launched_size("dp_shard")
    needs = "needs FSDP2; take accelerate_configs/fsdp2.yaml, or leave out this setting"
    require(shards == 1, f"launch: parallelism_config_dp_shard_size {shards}: {needs}")
    asked = Layout(rank, is_sharded, **sizes)
    names = " x ".join(asked.setting(name) for name in sizes if asked.size(name) > 1)
    left, over = divmod(processes, asked.processes)
    require(over == 0 and left, f"{names}: does not divide the {processes} processes")
    rest = "dp_shard" if is_sharded else "dp_replicate"
    given = launched_size(rest)
    fits = f"of {processes} processes, {left} are left for it; leave it out"
    require(given in (1, left), f"launch: parallelism_config_{rest}_size is {given}, but {fits}")
    layout = Layout(rank, is_sharded, **sizes | {rest: left}, ep=config.model.expert_ranks)
    has_shards = not is_sharded or processes == 1 or layout.dp_replicate < processes
    advice = "then FSDP2 divides nothing; take accelerate_configs/multi_gpu.yaml, or more processes"
    require(has_shards, f"{layout.setting('dp_replicate')}: is the number of processes, and {advice}")
    if layout.ep > 1:
        require(is_sharded, "model.expert_ranks: needs FSDP2; take accelerate_configs/fsdp2.yaml, or use 1")
        among = layout.size("dp_shard", "cp", "sp", "tp")
        kind = "processes" if among == processes else "processes that have the same layers and one copy of them"
        require(among % layout.ep == 0, f"{layout.setting('ep')}: does not divide the {among} {kind}")
        whole = layout.ep % layout.tp == 0
        require(whole, f"{layout.setting('ep')}: must be a multiple of parallelism_config_tp_size {layout.tp}")
    return layout


def check_layers_and_heads(layout: Layout, config: Config, found: PreTrainedConfig) -> None:
    """Raises UserError unless the ranks can divide the layers and heads of the model, whose config is `found`.

    Other checks say why a model without such numbers is refused.
    """
    found = found.get_text_config()
    if layout.pp > 1:
        layers = number_in_config(found, "num_hidden_layers")
        chunks = layout.pp * config.model.chunks_per_rank()
        fits = not layers or chunks <= layers
        require(fits, f"{layout.setting('pp')}: the {layers} layers cannot be divided among {chunks} chunks")
    heads = number_in_config(found, "num_attention_heads")
    if layout.sp > 1 and heads:
        among = layout.setting("sp") + (f" x tp {layout.tp}" if layout.tp > 1 else "")
        advice = "for other sizes take accelerate_configs/context_parallel.yaml"
        fits = heads % layout.size("sp", "tp") == 0
        require(fits, f"{among}: must divide the {heads} attention heads; {advice}")
    plan = found.base_model_tp_plan or {}
    if layout.tp > 1 and heads and plan.get("layers.*.self_attn.k_proj") == "colwise":
        keys = number_in_config(found, "num_key_value_heads") or heads
        fits = heads % layout.tp == 0 and keys % layout.tp == 0
        require(fits, f"{layout.setting('tp')}: must divide the {heads} attention heads and the {keys} key heads")


def number_in_config(found: PreTrainedConfig, name: str) -> int | None:
    """None where the model has no such number, or another one in each layer."""
    try:
        return getattr(found, name, None)
    except RuntimeError:
        return None


class Refusal(NamedTuple):
    """What a launch cannot have beside any of some dimensions."""

    dimensions: tuple[str, ...]
    setting: str
    reason: str
    is_asked: Callable[[Config, str, Any], bool]  # By the config, the precision, or Accelerate's plugin for FSDP2.


BY_HAND = ("pp", "tp", "ep")
REFUSED = [
    Refusal(
        BY_HAND,
        "model.lora",
        "transformers' plans do not name the layers that peft puts in",
        lambda config, *_: config.model.lora is not None,
    ),
    Refusal(
        BY_HAND,
        "mixed_precision fp8",
        "torchao replaces layers that are divided by then; use bf16, or no",
        lambda config, precision, plugin: precision == "fp8",
    ),
    Refusal(
        ("ep",),
        "model.compile regional",
        "torch 2.13 fails on DTensors whose lengths change; use none",
        lambda config, *_: config.model.compile == "regional",
    ),
    Refusal(
        ("tp", "ep"),
        "model.compile regional without data.packing concat",
        "torch 2.13 fails on DTensors whose lengths change; use none",
        lambda config, *_: config.model.compile == "regional" and config.data.packing != "concat",
    ),
    Refusal(
        BY_HAND,
        "model.compile full",
        "torch compiles no model that a rank has only a part of; with pp use regional",
        lambda config, *_: config.model.compile == "full",
    ),
    Refusal(
        ("pp",),
        "eval.prompts",
        "generate() of transformers needs all layers",
        lambda config, *_: bool(config.eval.prompts),
    ),
    Refusal(
        ("pp", "cp", "ep"),
        "batch.max_micro_batch_size auto",
        "if one rank has too little memory, the others wait forever; give a number",
        lambda config, *_: config.batch.max_micro_batch_size == "auto",
    ),
    Refusal(
        ("dp_shard", "tp", "ep"),
        "optim.name muon",
        "it needs whole matrices; use adamw, or DDP",
        lambda config, *_: config.optim.name == "muon",
    ),
    Refusal(
        ("dp_shard", "tp", "ep"),
        "optim.name adamw_8bit",
        "bitsandbytes has it for whole weights only; use adamw, or DDP",
        lambda config, *_: config.optim.name == "adamw_8bit",
    ),
    Refusal(
        BY_HAND,
        "fsdp_activation_checkpointing_offload",
        "only Accelerate's own FSDP2 has it; set it to false",
        lambda config, precision, plugin: plugin and getattr(plugin, "activation_checkpointing_offload", False),
    ),
    Refusal(
        ("dp_shard", "cp", "sp", *BY_HAND),
        "fsdp_cpu_ram_efficient_loading",
        "each rank reads only its part anyway; set it to false",
        lambda config, precision, plugin: plugin and plugin.cpu_ram_efficient_loading,
    ),
    Refusal(
        BY_HAND,
        "fsdp_offload_params",
        "only Accelerate's own FSDP2 has it; set it to false",
        lambda config, precision, plugin: plugin and isinstance(plugin.cpu_offload, CPUOffloadPolicy),
    ),
]


def check_combination(layout: Layout, config: Config, precision: str, plugin: Any) -> None:
    """Raises UserError for what is in REFUSED. `plugin` is the fsdp_plugin of Accelerate, or None."""
    accumulation = config.batch.accumulation
    needs = {"within_copies": ("hsdp", layout.is_sharded and layout.dp_replicate > 1)}
    needs["kept_weights"] = ("fsdp2", layout.is_sharded)
    file, is_there = needs.get(accumulation, ("", True))
    advice = f"take accelerate_configs/{file}.yaml, or use immediate"
    require(is_there, f"batch.accumulation {accumulation}: needs {file.upper()}; {advice}")
    check_type_of_codes(config.model, precision)
    for refusal in REFUSED:
        used = [name for name in refusal.dimensions if layout.uses(name)]
        if used and refusal.is_asked(config, precision, plugin):
            what = f"cannot be combined with {refusal.setting}: {refusal.reason}"
            raise UserError(f"{layout.setting(used[0])}: {what}")


def check_type_of_codes(model: Model, precision: str) -> None:
    """Raises UserError if FSDP2 would cast the codes of weights in 4 bits, see four_bits()."""
    in_fp16 = precision == "fp16"
    is_kept = (model.dtype == "float16") == in_fp16 or not model.load_in_4bit
    advice = f"with mixed_precision {precision}, use model.dtype {'float16' if in_fp16 else 'bfloat16'}"
    require(is_kept, f"model.load_in_4bit: {advice}")
