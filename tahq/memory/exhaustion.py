"""Whether an error means that a device's memory is full."""

import torch

_TEXTS = ("can't allocate memory", "CUDA error: out of memory")
"""Of the CPU's allocator, and of CUDA's for pinned memory of the host."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; torch has no exception of its own for the CPU's memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
    )
