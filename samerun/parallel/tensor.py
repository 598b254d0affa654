"""Tensor parallelism: ranks share each matrix."""

import fnmatch
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed import DistributedConfig

from samerun.config import Config
from samerun.data.batches import MicroBatch
from samerun.errors import explained, require
from samerun.parallel.base import Division, Sharded
from samerun.parallel.fsdp import check_sharding, shard_layers, sharded_division
from samerun.parallel.mesh import ranks_per_row, tensor_parallel_size
from samerun.parallel.state import first_difference, local, train_instead, try_out


class TensorParallel(Sharded):
    """Tensor parallelism: the ranks of a group share each matrix, and compute on the same rows.

    The model's own plan in transformers says how a matrix is divided, such as the projections by their heads, and where
    the ranks add up what each has computed. Other weights, such as norms, are whole on every rank, and stay the same.
    """

    def __init__(self, config: Config, accelerator: Accelerator, loss_of: Callable):
        super().__init__(config, accelerator, loss_of)
        self.size = tensor_parallel_size()
        # Neighbours form a group, so that it is on one machine. What is whole must drop out alike on all of them.
        self.data_parallel_rank = self.dropout_rank = accelerator.process_index // self.size
        self.data_parallel_size = self.averages_over = accelerator.num_processes // self.size
        self.setting = f"launch: parallelism_config_tp_size {self.size}"
        self.partial: list[torch.nn.Parameter] = []  # Whole weights, each rank having the gradient of its own heads.

    def check(self) -> None:
        super().check()
        self.check_processes(self.accelerator.num_processes)
        advice = "take another file of accelerate_configs/"
        require(self.config.model.lora is None, f"{self.setting}: cannot be combined with model.lora; {advice}")
        is_float8 = self.accelerator.mixed_precision == "fp8"
        require(not is_float8, f"{self.setting}: cannot be combined with mixed_precision fp8; use bf16, or no")
        is_compiled = self.config.model.compile != "none"  # torch 2.13 fails on DTensors whose lengths change.
        require(not is_compiled, f"{self.setting}: cannot be combined with model.compile; use none")
        alone = ranks_per_row() == 1
        require(alone, f"{self.setting}: cannot be combined with sequence or context parallelism; {advice}")

    def check_processes(self, count: int) -> None:
        advice = "for several groups take accelerate_configs/fsdp2_tensor_parallel.yaml"
        require(count == self.size, f"{self.setting} must be the number of processes, {count}; {advice}")

    def division(self) -> Division:
        return Division(matrices=self.size)

    def prepare(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> torch.nn.Module:
        self.check_model(model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        partial = self.divide_as_planned(model)
        self.shard_over_groups(model)
        self.partial = [model.get_parameter(name) for name in partial]
        train_instead(optimizers, names, model)
        return model.train()

    def check_model(self, bare: torch.nn.Module) -> None:
        kind = bare.config.model_type
        require(bare.tp_plan, f"{self.setting}: transformers has no plan how ranks share a {kind}; take FSDP2")

    def divide_as_planned(self, model: torch.nn.Module) -> list[str]:
        """divide(). Raises UserError for a model whose plan changes what it computes, or divides too little of it."""
        kind = model.config.model_type
        before = [try_out(model, self.loss_of) if self.accelerator.is_main_process else None]
        broadcast_object_list(before)
        with explained(f"{self.setting}: must divide the attention heads and the key heads of this {kind}"):
            partial = self.divide(model)
            after = try_out(model, self.loss_of, partial, self.ranks)
        other = first_difference(before[0], after)
        refusal = f"with its plan in transformers, a {kind} computes another {other}; take FSDP2"
        require(not other, f"{self.setting}: {refusal}")
        whole = sum(parameter.numel() for parameter in model.parameters() if not isinstance(parameter, DTensor))
        few = whole < model.num_parameters() / 2
        require(few, f"{self.setting}: a {kind} has no plan in transformers that divides its layers; take FSDP2")
        for name, parameter in model.named_parameters():
            # Of matrices that are two in one, a rank may have a piece of each. torch's checkpoints cannot save that.
            in_one_piece = all(
                type(placement) in (Shard, Replicate) for placement in getattr(parameter, "placements", ())
            )
            require(in_one_piece, f"{self.setting}: a part of {name} of this {kind} cannot be saved; take FSDP2")
        return partial

    def divide(self, model: torch.nn.Module) -> list[str]:
        """Replace the matrices by the parts of this rank, on its device. Returns the names of self.partial.

        Every rank has the whole matrices, from the seed or the files, so nothing need be sent.
        """
        sizes = DistributedConfig(tp_size=self.size, fsdp_size=self.data_parallel_size)
        _, _, self.meshes = model.prepare_distribute_model(sizes)
        self.ranks = self.meshes.get_mesh("tp").get_group()
        # transformers would add up these gradients over the ranks after each micro-step, and what it has added up
        # before once more. They are added up after the last micro-step instead.
        rules = [rule for rule, style in model.tp_plan.items() if style == "replicated_with_grad_allreduce"]
        plan = model.tp_plan | dict.fromkeys(rules, "replicate")
        for name in model.all_tied_weights_keys:  # A plan divides both of them, and afterwards they are tied again.
            owner, _, attribute = name.rpartition(".")
            weight = model.get_parameter(name)
            setattr(model.get_submodule(owner), attribute, torch.nn.Parameter(weight.detach()))
        model.maybe_distribute_model(model, DistributedConfig(tp_size=self.size, tp_plan=plan), self.meshes)
        del model.config.distributed_config  # So that the export is that of any model.
        model.tie_weights()
        model.to(self.accelerator.device)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        return [name for name in trained if any(fnmatch.fnmatch(name, f"{rule}.*") for rule in rules)]

    def shard_over_groups(self, model: torch.nn.Module) -> None:
        """There is one group only."""

    def forward_backward(
        self, model: torch.nn.Module, micro_batches: list[MicroBatch], scale: float
    ) -> dict[str, torch.Tensor]:
        metrics = super().forward_backward(model, micro_batches, scale)
        for parameter in self.partial:
            dist.all_reduce(local(parameter.grad), group=self.ranks)
        return metrics

    def sum_over_ranks(self, metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # The ranks of a group have the same values. To sum over all makes sure that the bits are the same, too.
        return {name: total / self.size for name, total in super().sum_over_ranks(metrics).items()}


class TensorParallelFSDP2(TensorParallel):
    """Several groups, each with rows of its own. FSDP2 shards among them what each rank of a group has."""

    def check_processes(self, count: int) -> None:
        fits = count % self.size == 0 and count > self.size
        advice = "for a single group take accelerate_configs/tensor_parallel.yaml"
        require(fits, f"{self.setting}: {count} processes must be a multiple of it, and more than one group; {advice}")
        check_sharding(self.setting, self.accelerator)

    def division(self) -> Division:
        return replace(sharded_division(self, self.data_parallel_size), matrices=self.size)

    def shard_over_groups(self, model: torch.nn.Module) -> None:
        shard_layers(model, self.meshes.get_mesh("fsdp"), self.accelerator)
