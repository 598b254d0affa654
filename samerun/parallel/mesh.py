"""The sizes of the groups of ranks that the launcher file asks for."""

import os
import re

from samerun.errors import require


def tensor_parallel_size() -> int:
    """How many ranks share each matrix: parallelism_config_tp_size of the launcher file, which Accelerate passes on."""
    return launched_size("TP")


def sequence_parallel_size() -> int:
    """How many ranks share each row by sequence parallelism: parallelism_config_sp_size, passed on likewise."""
    return launched_size("SP")


def context_parallel_size() -> int:
    """How many ranks share each row by context parallelism: parallelism_config_cp_size, passed on likewise."""
    return launched_size("CP")


def launched_size(kind: str) -> int:
    name = f"PARALLELISM_CONFIG_{kind}_SIZE"
    value = os.environ.get(name, "1")
    require(re.fullmatch("0*[1-9][0-9]*", value), f"launch: {name} is {value!r}; give a number of processes")
    return int(value)


def ranks_per_row() -> int:
    """How many ranks share each row, in one way or the other."""
    return sequence_parallel_size() * context_parallel_size()
