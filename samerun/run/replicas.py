"""Ranks that hold the same weights must hold the same bits of them."""

import functools
import socket
import zlib
from collections import Counter, defaultdict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from samerun.model.outline import unwrapped
from samerun.model.weight_files import region_of, sample_of
from samerun.model.weights import names_of_placeholders
from samerun.parallel.state import local_tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # By their bytes.


def sample_of_weights(model: torch.nn.Module, frozen: bool = False) -> int:
    """A checksum of some numbers of each weight that is there already, or of each that is frozen."""
    found = 0
    waiting = names_of_placeholders(model)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and name not in waiting and not (frozen and parameter.requires_grad):
            found = zlib.crc32(sample_of(parameter).to_bytes(4), found)
    return found


def checksum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """int64, on the tensor's device. It differs whenever a single number has other bits.

    It is the sum of the bits of the numbers, each times an odd factor that depends on its place. The integers wrap
    around, and an odd factor maps no two of them to the same one.
    """
    factors = odd_numbers(tensor.device)
    bits = tensor.detach().contiguous().flatten().view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in bits.split(len(factors)):
        total = total * 0x9E3779B1 + (part * factors[: len(part)]).sum()
    return total


@functools.cache
def odd_numbers(device: torch.device) -> torch.Tensor:
    """int32, as many as numbers are summed at a time: they fit into a processor's cache, or are 16 MiB of a GPU."""
    count = 2**18 if device.type == "cpu" else 2**22
    return torch.arange(count, dtype=torch.int32, device=device) * 2 + 1


def held_parts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds of each weight, by its name and place in the whole weight, as checkpoints know them."""
    parts = {}
    for name, parameter in unwrapped(model).named_parameters():
        if parameter.is_meta:  # Another rank has it.
            continue
        place = ""
        if isinstance(parameter, DTensor):
            place = f" from {[there.start for there in region_of(parameter)]}"
        parts[name + place] = local_tensor(parameter)
    return parts


def check_copies(model: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raises ArithmeticError, on all ranks of the group, if some hold the same part of a weight with other bits.

    Waits for the device. The main process gets a checksum of each part from each rank.
    """
    if group is None:
        return
    parts = held_parts(model)
    sums = torch.stack([checksum_of_bits(part) for part in parts.values()]).tolist()
    told = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object((socket.gethostname(), dict(zip(parts, sums))), told, group=group, group_dst=0)
    problem = [drifted_apart(told) if told else ""]
    dist.broadcast_object_list(problem, group=group, group_src=0)
    if problem[0]:
        raise ArithmeticError(problem[0])


def drifted_apart(told: list[tuple[str, dict[str, int]]]) -> str:
    """Which ranks differ from most of the others, and in what, by the host and the sums of each; "" if none does."""
    held_by = defaultdict(dict)
    for rank, (_, sums) in enumerate(told):
        for part, total in sums.items():
            held_by[part][rank] = total
    wrong = {part: sums for part, sums in held_by.items() if len(set(sums.values())) > 1}
    if not wrong:
        return ""
    odd = set()
    for sums in wrong.values():
        [(most, _)] = Counter(sums.values()).most_common(1)
        odd |= {rank for rank, total in sums.items() if total != most}
    who = ", ".join(f"rank {rank} on {told[rank][0]}" for rank in sorted(odd))
    return (
        f"copies of the weights have drifted apart: {who} has other bits than other ranks in {min(wrong)} and in "
        f"{len(wrong)} parts in all. This checkpoint is not kept. Look for a faulty device, or for code that does not "
        "run on all ranks; the same command continues from the checkpoint before"
    )
