"""Whether an error means that a device's memory is full."""

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; torch has no exception of its own for the CPU's memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
