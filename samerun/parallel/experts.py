"""Expert parallelism: ranks divide the experts of each layer, and send each other tokens.

A rank sends each token to the ranks that have its experts, and they send back what these compute. FSDP2 shards an
expert among those ranks of several groups that have it, and the other weights among all ranks.
"""

from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism

from samerun.errors import as_user_error, require
from samerun.parallel.layout import Layout


def check_experts(model: PreTrainedModel, ranks: int, setting: str) -> None:
    """Raises UserError for a model whose experts cannot be divided."""
    kind, plan = model.config.model_type, model._expand_parallel_plan(model.ep_plan)
    names = expert_modules(model, plan)
    require(names, f"{setting}: transformers has no plan how ranks divide experts of a {kind}; use 1")
    for name in names:
        experts = model.get_submodule(name)
        count = experts.num_experts
        require(count % ranks == 0, f"{setting}: does not divide the {count} experts of this {kind}")
        for part, _ in experts.named_parameters():
            is_divided = plan.get(f"{name}.{part}") == "grouped_gemm"
            require(is_divided, f"{setting}: the plan of a {kind} leaves {name}.{part} whole; use 1")


def expert_modules(model: PreTrainedModel, plan: dict[str, str]) -> list[str]:
    return [name for name, _ in model.named_modules() if plan.get(name) == "ep_dispatch_experts"]


def divide_experts(model: PreTrainedModel, mesh: DeviceMesh, tp_mesh: DeviceMesh, own: list[str]) -> list[str]:
    """Replace the experts by those of this rank. Returns the names of the modules whose weights they are.

    `own`: the names of the weights that this rank has. It has all experts of a layer, so that none is sent.
    """
    plan = model._expand_parallel_plan(model.ep_plan)
    modules = [name for name in expert_modules(model, plan) if any(weight.startswith(f"{name}.") for weight in own)]
    plan = {name: style for name, style in plan.items() if any(f"{name}.".startswith(f"{one}.") for one in modules)}
    apply_expert_parallelism(model, mesh, tp_mesh, plan, ep_implementation="all_to_all")
    return modules


def shard_experts(
    model: PreTrainedModel, names: list[str], mesh: DeviceMesh, layout: Layout, options: dict[str, Any]
) -> None:
    """FSDP2 among the ranks that have the same experts: of each matrix, each of them has some rows.

    `mesh` is the one of all ranks with the dimensions dp_replicate, efsdp and ep.
    """
    among = mesh["dp_replicate", "efsdp"] if layout.dp_replicate > 1 else mesh["efsdp"]
    groups = mesh["efsdp"].size()
    # How much an expert counts for a token stays float32, as it is in the whole model.
    policy = replace(options["mp_policy"], cast_forward_inputs=False)
    options = options | {"mp_policy": policy, "shard_placement_fn": lambda parameter: Shard(1)}
    for name in names:
        experts = model.get_submodule(name)
        with as_user_error(f"model.expert_ranks: {groups} groups of ranks cannot share the experts"):
            fully_shard(experts, mesh=among, **options)
        # An expert has met the tokens of all ranks, not only of these. So its gradient is to be divided by all of them.
        experts.set_gradient_divide_factor(float(layout.averages_over))
        experts.set_force_sum_reduction_for_comms(groups > 1)  # gloo cannot divide while it sums.
