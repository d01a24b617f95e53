"""Memory for frames that come in: the device's to copy from at once, where frames are decoded on a GPU.

A copy from pageable memory goes through the driver's own pinned memory and waits for it; from pinned memory it is
queued behind what the lane's stream does, and nobody waits. Blocks are torch's: it keeps them, and hands none out
again before the copies from it are done.
"""

from collections.abc import Callable

import torch

Allocate = Callable[[int], torch.Tensor]
"""Bytes, to be written, for a frame of so many."""


def pageable(nbytes: int) -> torch.Tensor:
    """Memory as any."""
    return torch.empty(nbytes, dtype=torch.uint8)


def memory_for(device: torch.device) -> Allocate:
    """What frames that this device decodes are best received in."""
    if device.type != "cuda":
        return pageable

    def pinned(nbytes: int) -> torch.Tensor:
        with torch.cuda.device(device):  # of the thread that receives, which else would start to use the first GPU
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    return pinned
