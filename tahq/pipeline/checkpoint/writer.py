"""Writes a stage's snapshots beside the training.

At the boundary of a step the stage's tensors are copied into a buffer; a thread writes the copy while the next steps
are computed. Invariants:

- what is written is the copy, so no step changes what a snapshot has;
- there are at most `num_buffers` copies, made when they are first needed and then used again: memory is bounded. A
  snapshot that falls due while every copy is still being written waits for one, and that is warned of once;
- snapshots are written one at a time, in the order of their steps;
- with no buffers, or for tensors that are not to be copied, the caller's thread writes, after all that was due before.

Waiting and copying count as `snapshot` of the thread that computes, writing as `beside:snapshot`. What the writing
comes to, a full disk included, is reported by `write` itself; what it raises all the same is raised again in the
thread that computes.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

import torch

from tahq.memory.exhaustion import is_out_of_memory
from tahq.pipeline.checkpoint.buffer import SnapshotBuffer
from tahq.pipeline.spans import Stopwatch

log = logging.getLogger(__name__)

Write = Callable[[int, Mapping[str, torch.Tensor]], None]
"""Writes the tensors of the snapshot after so many steps, and reports what came of it."""

_Job = tuple[int, SnapshotBuffer] | None


class SnapshotWriter:
    """One stage's writer; all calls come from the thread that computes.

    Args:
        write: see `Write`; called in the writer's thread, or in the caller's.
        num_buffers: copies that there may be at once; 0: nothing is copied, and nothing written beside.
        stopwatch: measures both threads.
    """

    def __init__(self, write: Write, num_buffers: int, stopwatch: Stopwatch) -> None:
        self._write = write
        self._num_buffers = num_buffers
        self._stopwatch = stopwatch
        self._num_made = 0
        self._free: queue.LifoQueue[SnapshotBuffer] = queue.LifoQueue()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._filled: SnapshotBuffer | None = None
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()

    def take(self, step: int, tensors: Mapping[str, torch.Tensor], *, copy: bool = True) -> None:
        """Write these tensors as they are now.

        Args:
            step: committed steps behind them.
            tensors: by their names in the snapshot; with `copy` they may change once `hold_back_changes` was called.
            copy: False: write them in this thread, before the call returns.

        Raises:
            Exception: what `write` raised, for these tensors or for those before.
        """
        self._raise_failure()
        with self._stopwatch.measure("snapshot"):
            if not (copy and self._num_buffers and self._hand_over(step, tensors)):
                self._drain()
                self._write(step, tensors)

    def hold_back_changes(self) -> None:
        """Called before the tensors are changed: the copy on a CUDA device comes first."""
        if self._filled is not None:
            self._filled.hold_back_changes()
            self._filled = None

    def finish(self) -> None:
        """Return when everything that was taken is written and reported; raises as `take` does."""
        with self._stopwatch.measure("snapshot"):
            self._drain()

    # -- the thread that computes ------------------------------------------------------------------

    def _hand_over(self, step: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy, and let the thread write; False if there is no memory for a copy."""
        buffer = self._free_buffer(step)
        try:
            buffer.fill(tensors)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._num_made -= 1  # what it had room for is given back
            self._warn(
                "no memory",
                "there is no memory for a copy of this stage, so its snapshots are written while training waits; "
                "run.snapshot_buffers: 0 says so from the start",
            )
            return False
        self._filled = buffer
        self._jobs.put((step, buffer))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tahq-snapshot", daemon=True)
            self._thread.start()
        return True

    def _free_buffer(self, step: int) -> SnapshotBuffer:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            if self._num_made < self._num_buffers:
                self._num_made += 1
                return SnapshotBuffer()
        begin_s = time.monotonic()
        buffer = self._free.get()
        self._raise_failure()
        self._warn(
            "slow disk",
            f"the snapshot after step {step} waited {time.monotonic() - begin_s:.1f} s for those before it to be "
            "written: the disk is too slow for this run.snapshot_every; raise it, or set run.dir to another disk",
        )
        return buffer

    def _drain(self) -> None:
        """Stop the thread when it has written all that it was given; the next snapshot starts another."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _warn(self, kind: str, text: str) -> None:
        """Once of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", text)

    # -- the writer's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            step, buffer = job
            try:
                with self._stopwatch.measure("snapshot", f"snapshot after step {step}"):
                    buffer.wait()
                    self._write(step, buffer.tensors)
            except Exception as error:
                self._failure = error
            self._free.put(buffer)
