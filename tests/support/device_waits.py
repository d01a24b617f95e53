"""That a piece of code launches its work on a CUDA device, and does not wait for it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def host_must_not_wait() -> Iterator[None]:
    """Raises RuntimeError where the host waits for the device; torch sees most of these places, not all."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
