"""What an optimizer keeps of one parameter, as data: snapshots are checked by it, and memory is counted."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor that an optimizer keeps of a parameter.

    `dtype` None: that of the parameter. `is_counter`: it lies on the CPU wherever the parameter is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    is_counter: bool = False


StateSpecs = Mapping[str, StateSpec]
"""By name, such as `exp_avg`."""


def states_nbytes(specs: StateSpecs, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a parameter's states beside it, without counters.

    Args:
        specs: what is kept of it.
        dtype: the parameter's.
    """
    return sum(math.prod(spec.shape) * (spec.dtype or dtype).itemsize for spec in specs.values() if not spec.is_counter)
