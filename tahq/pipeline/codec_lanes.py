"""Where encoding and decoding are done: in two threads beside the compute loop, or in it.

The compute loop never waits for an encoder, and finds what it needs next decoded already: one thread encodes and
sends what the loop hands to it, in that order; another waits for the step's frames in the order in which the loop
will use them, decodes each, and keeps at most `LOOKAHEAD` of them ready. On CPU the codecs' kernels release the
GIL; on CUDA each lane has a stream of its own, and streams wait for each other by events, never the device.

What goes wrong in a lane is raised in the compute loop, at its next `take` or at `finish`.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from tahq.comm.link.frame import Frame, LogicalId
from tahq.pipeline.spans import Stopwatch

LOOKAHEAD = 2
"""Decoded tensors that wait for the compute loop: one to go on with, one being made; more would only take memory."""

Send = Callable[[], bool]
"""Encodes and sends a tensor; whether all of it is finite."""


@dataclass(frozen=True, slots=True)
class Receive:
    """A posted receive: waiting for its frame, and making a tensor of it.

    `waiting` is what the wait is called where times are told, `id` the tensor's.
    """

    wait: Callable[[], Frame]
    decode: Callable[[Frame], torch.Tensor]
    waiting: str = "wait"
    id: LogicalId | None = None


class CodecLanes(Protocol):
    """One step after another: `begin`, then `take` and `send` as the schedule goes, then `finish`."""

    def begin(self, receives: Iterable[Receive]) -> None:
        """Start a step that will take these tensors, in this order."""

    def take(self) -> torch.Tensor:
        """The next of them; whatever went wrong with it, or with anything sent, is raised."""

    def send(self, tensor: torch.Tensor, send: Send) -> None:
        """Have `tensor` encoded and sent; it must not change afterwards."""

    def drop(self, what: object) -> None:
        """Let go of something of which the caller keeps nothing, and which takes long to take apart."""

    def finish(self) -> bool:
        """End the step: everything has been encoded; returns whether all of it was finite."""


class InlineLanes:
    """Everything at once, in the caller's thread: for a stage whose links live in that thread."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._receives: list[Receive] = []
        self._is_finite = True

    def begin(self, receives: Iterable[Receive]) -> None:
        """Start a step; see CodecLanes."""
        self._receives = list(receives)[::-1]
        self._is_finite = True

    def take(self) -> torch.Tensor:
        """Wait and decode; see CodecLanes."""
        receive = self._receives.pop()
        with self._stopwatch.measure(receive.waiting, receive.id):
            frame = receive.wait()
        return receive.decode(frame)

    def send(self, tensor: torch.Tensor, send: Send) -> None:
        """Encode and send; see CodecLanes."""
        self._is_finite &= send()

    def drop(self, what: object) -> None:
        """It goes when the caller returns; see CodecLanes."""

    def finish(self) -> bool:
        """End the step; see CodecLanes."""
        return self._is_finite


class ThreadedLanes:
    """A thread that encodes and a thread that decodes; both end with the process.

    Args:
        device: where tensors are.
        stopwatch: told the seconds that the compute loop waits for a frame and, once that is there, for its decoding.
    """

    def __init__(self, device: torch.device, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._sender = _SendLane(_Stream(device))
        self._receiver = _ReceiveLane(_Stream(device))
        self._sender.on_error = self._receiver.fail

    def begin(self, receives: Iterable[Receive]) -> None:
        """Start a step; see CodecLanes."""
        self._receiver.begin(list(receives))

    def take(self) -> torch.Tensor:
        """The next tensor, as soon as it is decoded; see CodecLanes."""
        begin_s = time.monotonic()
        decoded = self._receiver.take()
        end_s = time.monotonic()
        receive, arrived_s = decoded.receive, min(max(decoded.arrived_s, begin_s), end_s)
        self._stopwatch.add(receive.waiting, begin_s, arrived_s, receive.id)
        self._stopwatch.add("wait:codec", arrived_s, end_s, receive.id)
        return decoded.tensor

    def send(self, tensor: torch.Tensor, send: Send) -> None:
        """Hand over to the thread that encodes; see CodecLanes."""
        self._sender.submit(tensor, send)

    def drop(self, what: object) -> None:
        """Hand over to the thread that encodes; see CodecLanes."""
        self._sender.drop(what)

    def finish(self) -> bool:
        """Wait until everything is encoded; see CodecLanes."""
        with self._stopwatch.measure("wait:codec"):
            return self._sender.flush()


class _Stream:
    """A CUDA stream of a lane's own, and how it and the compute loop's wait for each other; on CPU, nothing."""

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

    def wait_for(self, mark: torch.cuda.Event | None, tensor: torch.Tensor) -> None:
        """Have the calling thread's stream wait for a point on another, and keep `tensor` alive for it."""
        if mark is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(mark)
            tensor.record_stream(stream)

    def __call__(self) -> "torch.cuda.StreamContext | nullcontext[None]":
        """A context in which the lane's stream is the current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@dataclass(frozen=True, slots=True)
class _ToSend:
    tensor: torch.Tensor
    mark: torch.cuda.Event | None
    send: Send


@dataclass(frozen=True, slots=True)
class _ToDrop:
    what: object


class _SendLane:
    """Encodes and sends, first come first served."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._jobs: queue.SimpleQueue[_ToSend | _ToDrop | threading.Event] = queue.SimpleQueue()
        self._is_finite = True
        self._error: BaseException | None = None
        self.on_error: Callable[[BaseException], None] | None = None
        self._thread = threading.Thread(target=self._run, name="tahq-encode", daemon=True)
        self._thread.start()

    def submit(self, tensor: torch.Tensor, send: Send) -> None:
        """Queue a tensor as it is now."""
        self._jobs.put(_ToSend(tensor, self._stream.mark(), send))

    def drop(self, what: object) -> None:
        """Queue something that is not needed any more."""
        self._jobs.put(_ToDrop(what))

    def flush(self) -> bool:
        """Wait for everything queued; whether it was all finite since the last call."""
        done = threading.Event()
        self._jobs.put(done)
        done.wait()
        if self._error is not None:
            raise self._error
        finite, self._is_finite = self._is_finite, True
        return finite

    def _run(self) -> None:
        while True:
            self._do(self._jobs.get())  # by no name here, which would keep it until the next one comes

    def _do(self, job: _ToSend | _ToDrop | threading.Event) -> None:
        if isinstance(job, threading.Event):
            job.set()
        elif isinstance(job, _ToSend) and self._error is None:
            self._send(job)

    def _send(self, job: _ToSend) -> None:
        try:
            with self._stream():
                self._stream.wait_for(job.mark, job.tensor)
                self._is_finite &= job.send()
        except BaseException as error:
            self._error = error
            if self.on_error is not None:
                self.on_error(error)


@dataclass(frozen=True, slots=True)
class _Decoded:
    tensor: torch.Tensor
    mark: torch.cuda.Event | None
    receive: Receive
    arrived_s: float
    """When its frame was there, by `time.monotonic`."""


class _ReceiveLane:
    """Waits for frames and decodes them, in the order in which they will be used."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._steps: queue.SimpleQueue[list[Receive]] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_Decoded | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(LOOKAHEAD)
        self._thread = threading.Thread(target=self._run, name="tahq-decode", daemon=True)
        self._thread.start()

    def begin(self, receives: list[Receive]) -> None:
        """Start on the frames of a step."""
        self._steps.put(receives)

    def fail(self, error: BaseException) -> None:
        """Have the next `take` raise; any thread may call it."""
        self._ready.put(error)

    def take(self) -> "_Decoded":
        """The next tensor, ready for use on the calling thread's stream."""
        ready = self._ready.get()
        if isinstance(ready, BaseException):
            raise ready
        self._room.release()
        self._stream.wait_for(ready.mark, ready.tensor)
        return ready

    def _run(self) -> None:
        while True:
            try:
                for receive in self._steps.get():
                    self._room.acquire()
                    self._ready.put(self._decoded(receive))
            except BaseException as error:
                self._ready.put(error)

    def _decoded(self, receive: Receive) -> _Decoded:
        frame = receive.wait()
        arrived_s = time.monotonic()
        with self._stream():
            return _Decoded(receive.decode(frame), self._stream.mark(), receive, arrived_s)
