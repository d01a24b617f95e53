"""A stage's tensors as they were at one moment, in memory that is used again for the next snapshot.

Copies are made in the host's memory. From a CUDA device they go to pinned memory, on a stream of their own that waits
for what the device has been given so far: the host does not wait, and the device goes on computing beside the copy.
Two rules keep the copy whole: the tensors must not change before `hold_back_changes` was called, and nobody reads the
copy before `wait` has returned. On the CPU the copy is finished when `fill` returns, and neither has anything to do.
"""

from collections.abc import Mapping
from typing import Any

import torch


class SnapshotBuffer:
    """Memory for one copy of a stage; it grows with what it is filled with, and stays as large."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """What it was filled with last, by name."""
        self._memory: dict[str, torch.Tensor] = {}
        self._sources: Mapping[str, torch.Tensor] = {}
        self._device: torch.device | None = None
        self._stream: Any = None
        self._copied: Any = None

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy these in place of what was here.

        Args:
            tensors: of any strides, on the CPU and at most one CUDA device.

        Raises:
            RuntimeError: there is no memory for them (see `is_out_of_memory`).
        """
        self._memory = {name: memory for name, memory in self._memory.items() if name in tensors}
        self.tensors = {name: self._room(name, source) for name, source in tensors.items()}
        self._device = next((source.device for source in tensors.values() if source.is_cuda), None)
        if self._device is None:
            self._copy(tensors)
        else:
            self._copy_beside(tensors, self._device)

    def hold_back_changes(self) -> None:
        """What the calling thread gives the device from now on comes after the copy."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        """Return when the copy is finished."""
        if self._copied is not None:
            self._copied.synchronize()
        self._sources = {}

    def _room(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """Contiguous memory for a tensor: what was used under this name before, if it is large enough."""
        nbytes = source.numel() * source.element_size()
        memory = self._memory.get(name)
        if memory is None or memory.numel() < nbytes or memory.is_pinned() != source.is_cuda:
            memory = self._memory[name] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=source.is_cuda)
        return memory[:nbytes].view(source.dtype).view(source.shape)

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, source in tensors.items():
            self.tensors[name].copy_(source.detach(), non_blocking=source.is_cuda)

    def _copy_beside(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sources = tensors  # so that the allocator gives their memory to nobody else before they are copied
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._copy(tensors)
            self._copied = self._stream.record_event()
