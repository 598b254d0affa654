"""Expert parallelism: ranks share the experts of each layer."""

from collections.abc import Callable
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers.distributed import DistributedConfig

from samerun.config import Config
from samerun.errors import explained, require
from samerun.parallel.base import Division, Sharded
from samerun.parallel.fsdp import check_sharding, shard_layers, sharded_division, sharding_options
from samerun.parallel.mesh import ranks_per_row, tensor_parallel_size
from samerun.parallel.state import first_difference, train_instead, try_out


class ExpertParallel(Sharded):
    """Expert parallelism: the ranks of a group divide the experts of each layer, and each rank has rows of its own.

    A rank sends each token to the ranks that have its experts, and they send back what these compute. FSDP2 shards the
    other weights among all ranks, and an expert among those ranks of several groups that have it.
    """

    def __init__(self, config: Config, accelerator: Accelerator, loss_of: Callable):
        super().__init__(config, accelerator, loss_of)
        self.size = config.model.expert_ranks
        self.setting = f"model.expert_ranks {self.size}"

    def check(self) -> None:
        super().check()
        processes, model = self.accelerator.num_processes, self.config.model
        require(processes % self.size == 0, f"{self.setting}: does not divide the {processes} processes")
        divides_more = ranks_per_row() * tensor_parallel_size() * model.pipeline_ranks > 1
        refused = {
            "sequence, context, tensor or pipeline parallelism": divides_more,
            "model.lora": model.lora is not None,
            "model.compile": model.compile != "none",
            "mixed_precision fp8": self.accelerator.mixed_precision == "fp8",
            # The ranks get different numbers of tokens. If only one of them has no memory, the others wait forever.
            "batch.max_micro_batch_size auto": self.config.batch.max_micro_batch_size == "auto",
        }
        for name, asked in refused.items():
            require(not asked, f"{self.setting}: cannot be combined with {name}")
        check_sharding(self.setting, self.accelerator)

    def division(self) -> Division:
        return replace(sharded_division(self, self.accelerator.num_processes), experts=self.size)

    def prepare(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> torch.nn.Module:
        names = {parameter: name for name, parameter in model.named_parameters()}
        for experts in self.divide_as_planned(model):
            self.shard_over_groups(experts)
        shard_layers(model, self.meshes.get_mesh("fsdp"), self.accelerator)
        train_instead(optimizers, names, model)
        return model.train()

    def divide_as_planned(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """divide(), and the modules whose weights are experts. Raises UserError for a model that must stay whole."""
        kind = model.config.model_type
        plan = model._expand_parallel_plan(model.ep_plan)
        names = [name for name, _ in model.named_modules() if plan.get(name) == "ep_dispatch_experts"]
        require(names, f"{self.setting}: transformers has no plan how ranks divide experts of a {kind}; use 1")
        for name in names:
            experts = model.get_submodule(name)
            count = experts.num_experts
            require(count % self.size == 0, f"{self.setting}: does not divide the {count} experts of this {kind}")
            for part, _ in experts.named_parameters():
                is_divided = plan.get(f"{name}.{part}") == "grouped_gemm"
                require(is_divided, f"{self.setting}: the plan of a {kind} leaves {name}.{part} whole; use 1")

        before = [try_out(model, self.loss_of) if self.accelerator.is_main_process else None]
        broadcast_object_list(before)
        with explained(f"{self.setting}: the experts of this {kind} cannot be divided"):
            self.divide(model, plan)
            after = try_out(model, self.loss_of)
        other = first_difference(before[0], after)
        require(not other, f"{self.setting}: with divided experts, a {kind} computes another {other}; use 1")
        return [model.get_submodule(name) for name in names]

    def divide(self, model: torch.nn.Module, plan: dict[str, str]) -> None:
        """Replace the experts by those of this rank, on its device. Every rank has all of them, so none is sent."""
        # Not at the top of the file, because transformers before 5.22 does not have it.
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        sizes = DistributedConfig(ep_size=self.size, fsdp_size=self.accelerator.num_processes)
        _, _, self.meshes = model.prepare_distribute_model(sizes)
        groups, alone = self.meshes.get_mesh("ep"), self.meshes.get_mesh("tp")  # Neighbours, and each rank for itself.
        apply_expert_parallelism(model, groups, alone, plan, ep_implementation="all_to_all")
        model.to(self.accelerator.device)

    def shard_over_groups(self, experts: torch.nn.Module) -> None:
        """FSDP2 among the ranks that have the same experts: of each matrix, each of them has some rows."""
        mesh = self.meshes.get_mesh("efsdp")
        options = sharding_options(self.accelerator)
        # How much an expert counts for a token stays float32, as it is in the whole model.
        options["mp_policy"] = replace(options["mp_policy"], cast_forward_inputs=False)
        with explained(f"{self.setting}: {mesh.size()} groups of ranks cannot share the experts"):
            fully_shard(experts, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1), **options)
        # An expert has met the tokens of all ranks, not only of these. So its gradient is to be divided by all of them.
        experts.set_gradient_divide_factor(self.accelerator.num_processes)
        experts.set_force_sum_reduction_for_comms(mesh.size() > 1)  # gloo cannot divide while it sums.
