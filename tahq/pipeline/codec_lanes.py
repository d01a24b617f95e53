"""Run encoding and decoding in two threads beside the compute loop, or in the loop itself.

With threads, the compute loop never waits for an encoder and finds its next input decoded: one thread encodes and
sends what the loop hands over, in order; the other waits for the step's frames in the order in which the loop uses
them, decodes each, and keeps at most `LOOKAHEAD` of them ready. On CPU the codec kernels release the GIL; on CUDA each
thread has its own stream, and streams wait for each other by events, never for the device.

An error in a thread is raised in the compute loop, at its next `take` or at `finish`.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tahq.comm.link.frame import LogicalId
from tahq.pipeline.boundary import Boundary, StepAbandonedError
from tahq.pipeline.spans import Stopwatch

LOOKAHEAD = 2
"""Decoded tensors that wait for the compute loop: one to continue with, one in progress; more only takes memory."""


@dataclass(frozen=True, slots=True)
class Receive:
    """A posted receive; time spent waiting for it counts as the activity `waiting`."""

    boundary: Boundary
    id: LogicalId
    sample_ids: Sequence[int] | None
    waiting: str


_Decoded = tuple[torch.Tensor | None, torch.cuda.Event | None, Receive, float]
"""A decoded tensor (None: its sender has abandoned the step), its place in the decoder's stream, and when its frame had
arrived (`time.monotonic`)."""


class InlineLanes:
    """Encodes and decodes in the caller's thread. Per step: `begin`, then `take` and `send`, then `finish`."""

    def __init__(self) -> None:
        self._receives: list[Receive] = []
        self._is_finite = True

    def begin(self, receives: Sequence[Receive]) -> None:
        """Start a step that will take these tensors, in this order."""
        self._receives = list(receives)[::-1]
        self._is_finite = True

    def take(self) -> torch.Tensor | None:
        """Return the next tensor, or None if its sender has abandoned the step; raises errors of the links."""
        receive = self._receives.pop()
        try:
            return receive.boundary.receive(receive.id, receive.sample_ids, receive.waiting)
        except StepAbandonedError:
            return None

    def send(
        self, boundary: Boundary, id: LogicalId, tensor: torch.Tensor | None, sample_ids: Sequence[int] | None
    ) -> None:
        """Encode and send a tensor, which must not change afterwards; None: tell that this step is abandoned."""
        if tensor is None:
            boundary.send_void(id)
        else:
            self._is_finite &= boundary.send(id, tensor, sample_ids)

    def pace(self) -> None:
        """Return when no more than `LOOKAHEAD` of the tensors sent wait to be encoded."""

    def drop(self, what: object) -> None:
        """Free an object that the caller does not keep and that takes long to free."""

    def finish(self) -> bool:
        """End the step when everything is encoded; returns whether all of it was finite."""
        return self._is_finite


class ThreadedLanes:
    """A thread that encodes and one that decodes, with the methods of `InlineLanes`; both end with the process.

    The stopwatch measures how long the compute loop waits for a frame and, once it has arrived, for its decoding.
    """

    def __init__(self, device: torch.device, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._encoding, self._decoding = _Stream(device), _Stream(device)
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_finite = True
        self._error: BaseException | None = None
        self._steps: queue.SimpleQueue[Sequence[Receive]] = queue.SimpleQueue()
        self._room = threading.Semaphore(LOOKAHEAD)
        self._ready: queue.SimpleQueue[_Decoded | BaseException] = queue.SimpleQueue()
        self._encoded = deque[threading.Event]()
        threading.Thread(target=self._run_encoder, name="tahq-encode", daemon=True).start()
        threading.Thread(target=self._run_decoder, name="tahq-decode", daemon=True).start()

    def begin(self, receives: Sequence[Receive]) -> None:
        """Start a step; the decoder begins with its first tensors."""
        self._steps.put(receives)

    def take(self) -> torch.Tensor | None:
        """Return the next tensor once it is decoded; see `InlineLanes.take`."""
        begin_s = time.monotonic()
        decoded = self._ready.get()
        if isinstance(decoded, BaseException):
            raise decoded
        self._room.release()
        tensor, mark, receive, arrived_s = decoded
        self._decoding.wait_for(mark, tensor)
        end_s = time.monotonic()
        arrived_s = min(max(arrived_s, begin_s), end_s)
        self._stopwatch.add(receive.waiting, begin_s, arrived_s, receive.id)
        self._stopwatch.add("wait:codec", arrived_s, end_s, receive.id)
        return tensor

    def send(
        self, boundary: Boundary, id: LogicalId, tensor: torch.Tensor | None, sample_ids: Sequence[int] | None
    ) -> None:
        """Hand a tensor to the encoder; see `InlineLanes.send`."""
        self._jobs.put(partial(self._send, boundary, id, tensor, sample_ids, self._encoding.mark()))

    def pace(self) -> None:
        """See `InlineLanes.pace`."""
        self._encoded.append(threading.Event())
        self._jobs.put(self._encoded[-1].set)
        if len(self._encoded) > LOOKAHEAD:
            with self._stopwatch.measure("wait:codec"):
                self._encoded.popleft().wait()

    def drop(self, what: object) -> None:
        """Have the encoder's thread free an object."""
        self._jobs.put(partial(_forget, what))

    def finish(self) -> bool:
        """End the step when everything is encoded; returns whether all of it was finite."""
        done = threading.Event()
        with self._stopwatch.measure("wait:codec"):
            self._jobs.put(done.set)
            done.wait()
        if self._error is not None:
            raise self._error
        finite, self._is_finite = self._is_finite, True
        return finite

    def _run_encoder(self) -> None:
        with self._encoding():
            while True:
                self._jobs.get()()  # not bound to a name, which would keep its tensor alive until the next job

    def _send(
        self,
        boundary: Boundary,
        id: LogicalId,
        tensor: torch.Tensor | None,
        sample_ids: Sequence[int] | None,
        mark: torch.cuda.Event | None,
    ) -> None:
        if self._error is not None:
            return
        try:
            if tensor is None:
                boundary.send_void(id)
                return
            self._encoding.wait_for(mark, tensor)
            self._is_finite &= boundary.send(id, tensor, sample_ids)
        except BaseException as error:
            self._error = error
            self._ready.put(error)  # the compute loop may be waiting for a frame

    def _run_decoder(self) -> None:
        with self._decoding():
            while True:
                try:
                    for receive in self._steps.get():
                        self._room.acquire()
                        self._ready.put(self._decode(receive))
                except BaseException as error:
                    self._ready.put(error)

    def _decode(self, receive: Receive) -> _Decoded:
        frame = receive.boundary.await_frame(receive.id)
        arrived_s = time.monotonic()
        with suppress(StepAbandonedError):
            tensor = receive.boundary.decode(frame, receive.sample_ids)
            return tensor, self._decoding.mark(), receive, arrived_s
        return None, None, receive, arrived_s


CodecLanes = InlineLanes | ThreadedLanes


def _forget(what: object) -> None:
    """The job that holds the last reference to an object."""


class _Stream:
    """A thread's own CUDA stream, ordered with the compute loop's by events; does nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """The point that the calling thread's stream has reached."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_for(self, mark: torch.cuda.Event | None, tensor: torch.Tensor | None) -> None:
        """Make the calling thread's stream wait for a point in another, and keep `tensor` alive for it."""
        if mark is not None and tensor is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(mark)
            tensor.record_stream(stream)

    def __call__(self) -> Any:
        """A context, for the thread's whole life, in which its own stream and device are the current ones.

        Leaving it would make the first GPU the thread's current one, and so open a context there.
        """
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
