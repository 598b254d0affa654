"""Tensor parallelism: ranks share each matrix, and compute on the same rows.

The model's own plan in transformers says how a matrix is divided, such as the projections by their heads, and where the
ranks add up what each has computed. Other weights, such as norms, are whole on every rank, and stay the same.
"""

import fnmatch
import math

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from samerun.data.batches import MicroBatch, in_one_row, lengthen
from samerun.errors import as_user_error, require


def divide_matrices(
    model: PreTrainedModel, mesh: DeviceMesh, setting: str, own: list[str], done: list[str]
) -> list[str]:
    """Replace matrices by the parts of this rank, but for the modules named in `done`, which are divided already.

    `own`: the names of the weights that this rank has, each of them whole, so that nothing need be sent. Returns the
    names of whole weights of whose gradients each rank has a part. transformers would add these up after each
    micro-step, and what it has added up before once more. They are to be added up after the last one instead.
    """
    kind = model.config.model_type
    rules = [rule for rule, style in model.tp_plan.items() if style == "replicated_with_grad_allreduce"]
    plan = model._expand_parallel_plan(model.tp_plan | dict.fromkeys(rules, "replicate"))
    untie(model)
    own = [*own, *(name for name, same in model.all_tied_weights_keys.items() if same in own)]
    names = [name for name in plan if any(is_in(weight, [name]) for weight in own) and not is_in(name, done)]
    plan = {name: plan[name] for name in names}
    with as_user_error(f"{setting}: must divide the attention heads and the key heads of this {kind}"):
        apply_tensor_parallelism(model, mesh, plan)
    model.tie_weights()
    check_parts(model, own, setting, done)
    trained = [name for name in own if model.get_parameter(name).requires_grad]
    return [name for name in trained if any(fnmatch.fnmatch(name, f"{rule}.*") for rule in rules)]


def untie(model: PreTrainedModel) -> None:
    """Give the output layer a parameter of its own. A plan divides both, and afterwards they are tied again."""
    for name in model.all_tied_weights_keys:
        owner, _, attribute = name.rpartition(".")
        weight = model.get_parameter(name)
        alone = torch.nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
        setattr(model.get_submodule(owner), attribute, alone)


def is_in(name: str, modules: list[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def check_parts(model: PreTrainedModel, names: list[str], setting: str, done: list[str]) -> None:
    """Raises UserError if the plan has divided too little, or so that a checkpoint cannot hold it."""
    kind = model.config.model_type
    sizes = {name: model.get_parameter(name) for name in names if not is_in(name, done)}
    whole = sum(one.numel() for one in sizes.values() if not isinstance(one, DTensor))
    few = whole <= sum(one.numel() for one in sizes.values()) / 2
    require(few, f"{setting}: a {kind} has no plan in transformers that divides its layers; take FSDP2")
    other = "FSDP2, alone or with model.expert_ranks" if model.ep_plan else "FSDP2"
    for name, parameter in model.named_parameters():
        # Of matrices that are two in one, a rank may have a piece of each. torch's checkpoints cannot save that.
        in_one_piece = all(type(one) in (Shard, Replicate) for one in getattr(parameter, "placements", ()))
        require(in_one_piece, f"{setting}: a part of {name} of this {kind} cannot be saved; take {other}")


def with_few_lengths(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """Joined rows are lengthened to a multiple of 64 tokens: for each new length, DTensor works out anew how it divides
    each operation, which takes a tenth of a second."""
    if not micro_batches[0].documents:
        return micro_batches
    micro_batches = [in_one_row(batch) for batch in micro_batches]
    return [lengthen(batch, math.ceil(batch.length / 64) * 64) for batch in micro_batches]
