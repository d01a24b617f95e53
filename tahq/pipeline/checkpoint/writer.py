"""Writes a stage's part of checkpoints beside the training.

At a step boundary the stage's tensors are copied into a buffer; a thread writes the copy while the next steps are
computed. Invariants:

- the copy is written, so no later step changes a checkpoint;
- at most `num_buffers` copies exist, made when first needed and then reused, so memory is bounded. A checkpoint that is
  due while all copies are still being written waits for one, with one warning per run;
- checkpoints are written one at a time, in the order of their steps;
- without buffers, or for tensors that must not be copied, the caller's thread writes, after everything due before.

Waiting and copying count as `snapshot` of the compute thread, writing as `beside:snapshot`. `write` itself reports its
outcome, a full disk included; an unexpected exception in the thread is raised again in the compute thread.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tahq.memory.free_memory import free_bytes, is_out_of_memory
from tahq.pipeline.spans import Stopwatch

log = logging.getLogger(__name__)

Write = Callable[[int, Mapping[str, torch.Tensor]], None]
"""Writes the tensors of the checkpoint after a number of steps, and reports the outcome."""


class SnapshotWriter:
    """One stage's writer, called by the compute thread only; with `num_buffers` 0 that thread does all the writing.

    A buffer takes no more than the free memory divided by the `num_stages` that this machine has.
    """

    def __init__(self, write: Write, num_buffers: int, stopwatch: Stopwatch, num_stages: int = 1) -> None:
        self._write = write
        self._num_stages = num_stages
        self._num_buffers = num_buffers
        self._stopwatch = stopwatch
        self._num_made = 0
        self._free: queue.LifoQueue[SnapshotBuffer] = queue.LifoQueue()
        self._jobs: queue.SimpleQueue[tuple[int, SnapshotBuffer] | None] = queue.SimpleQueue()
        self._filled: SnapshotBuffer | None = None
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()

    def take(self, step: int, tensors: Mapping[str, torch.Tensor], *, copy: bool = True) -> None:
        """Write the tensors of the checkpoint after `step` steps with their present values.

        With `copy` they may change after `hold_back_changes`; without, they are written before the call returns. Errors
        of `write` are raised here, for these tensors or for earlier ones.
        """
        self._raise_failure()
        with self._stopwatch.measure("snapshot"):
            if not (copy and self._num_buffers and self._hand_over(step, tensors)):
                self._drain()
                self._write(step, tensors)

    def hold_back_changes(self) -> None:
        """Called before the tensors change: on a CUDA device, changes wait for the copy."""
        if self._filled is not None:
            self._filled.hold_back_changes()
            self._filled = None

    def finish(self) -> None:
        """Return when everything taken is written and reported; raises like `take`."""
        with self._stopwatch.measure("snapshot"):
            self._drain()

    def _hand_over(self, step: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy, and let the thread write; False if there is no memory for a copy."""
        buffer = self._free_buffer(step)
        try:
            buffer.fill(tensors)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._num_made -= 1  # the buffer is freed with its memory
            self._warn_once(
                "no memory for a copy of this stage, so training waits while its checkpoints are written; set "
                "run.checkpoint_buffers: 0 to plan for that"
            )
            return False
        self._filled = buffer
        self._jobs.put((step, buffer))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tahq-snapshot", daemon=True)
            self._thread.start()
        return True

    def _free_buffer(self, step: int) -> "SnapshotBuffer":
        try:
            return self._free.get_nowait()
        except queue.Empty:
            if self._num_made < self._num_buffers:
                self._num_made += 1
                return SnapshotBuffer(self._num_stages)
        begin_s = time.monotonic()
        buffer = self._free.get()
        self._raise_failure()
        self._warn_once(
            "the checkpoint after step %d waited %.1f s for earlier ones: the disk is too slow for this "
            "run.checkpoint_every; raise it, or set run.dir to another disk",
            step,
            time.monotonic() - begin_s,
        )
        return buffer

    def _drain(self) -> None:
        """Stop the thread once it has written everything; the next checkpoint starts another."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _warn_once(self, text: str, *values: object) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text, *values)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            step, buffer = job
            try:
                with self._stopwatch.measure("snapshot", f"checkpoint after step {step}"):
                    buffer.wait()
                    self._write(step, buffer.tensors)
            except Exception as error:
                self._failure = error
            self._free.put(buffer)


class SnapshotBuffer:
    """Host memory for one copy of a stage's tensors; it grows to what it is filled with, and is reused.

    From a CUDA device, tensors are copied to pinned memory on a stream of its own, behind the work queued so far: the
    host does not wait, and the device computes beside the copy. So the tensors must not change before
    `hold_back_changes`, and the copy must not be read before `wait`. On the CPU `fill` returns when it is complete.
    """

    def __init__(self, num_sharing: int = 1) -> None:
        self._num_sharing = num_sharing
        self.tensors: dict[str, torch.Tensor] = {}
        """The copy, by name."""
        self._memory: dict[str, torch.Tensor] = {}
        self._sources: Mapping[str, torch.Tensor] = {}
        self._device: torch.device | None = None
        self._stream: Any = None
        self._copied: Any = None

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of any strides, on the CPU and at most one CUDA device.

        Raises:
            MemoryError, RuntimeError: memory is full.
        """
        self._memory = {name: memory for name, memory in self._memory.items() if name in tensors}
        self._check_memory(tensors)
        self.tensors = {name: self._room(name, source) for name, source in tensors.items()}
        self._device = next((source.device for source in tensors.values() if source.is_cuda), None)
        if self._device is None:
            self._copy(tensors)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._sources = tensors  # so that the allocator does not reuse their memory before they are copied
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy(tensors)
            self._copied = self._stream.record_event()

    def hold_back_changes(self) -> None:
        """Work that the calling thread queues on the device from now on runs after the copy."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        """Return when the copy is complete."""
        if self._copied is not None:
            with torch.cuda.device(self._device):  # otherwise the writing thread would start to use the first GPU
                self._copied.synchronize()
        self._sources = {}

    def _check_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise MemoryError rather than let the system kill a process, which it does when pages are first written."""
        needed = sum(source.numel() * source.element_size() for source in tensors.values())
        needed -= sum(memory.numel() for memory in self._memory.values())
        free = free_bytes(torch.device("cpu")) if needed > 0 else 0  # 0: unknown
        if 0 < free < needed * self._num_sharing:
            raise MemoryError(f"a copy takes {needed} more bytes; {free} are free")

    def _room(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """Contiguous memory for a tensor: that used under this name before, if it is large enough."""
        nbytes = source.numel() * source.element_size()
        memory = self._memory.get(name)
        if memory is None or memory.numel() < nbytes or memory.is_pinned() != source.is_cuda:
            memory = self._memory[name] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=source.is_cuda)
        return memory[:nbytes].view(source.dtype).view(source.shape)

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, source in tensors.items():
            self.tensors[name].copy_(source.detach(), non_blocking=source.is_cuda)
