"""Payloads over gloo or NCCL process groups of the two ends of a link.

They are torch's own objects without `init_process_group`, so that there is no default group, no environment variable,
and as many groups as there are links.
"""

import atexit
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed

from tahq.comm.link.frame import CPU
from tahq.errors import ConfigError

# torch.distributed's objects below `init_process_group`, which its type stubs leave out or do not export
c10d: Any = torch.distributed
Store: TypeAlias = Any
"""Where the ends of a group find each other (torch.distributed.Store)."""
Work: TypeAlias = Any
"""An operation under way (torch.distributed.Work)."""

PART_NBYTES = 4 * 1024 * 1024
"""A part of a payload: what a slow network must carry within the time limit."""

_PAYLOADS, _NOTHING = 1, 2
_FOREVER_S = 10 * 365 * 86400.0
_AT_ONCE = timedelta(milliseconds=1)
T = TypeVar("T")


class GroupBrokenError(Exception):
    """The group can move nothing more: the peer's end is gone, or ours was aborted."""


class PayloadPath(ABC):
    """Moves payloads whose length both ends know, in order. Every method may raise GroupBrokenError."""

    device: torch.device = CPU

    def open(self) -> None:  # noqa: B027
        """Do what both ends must do together before the first payload; blocks until the other end does it, too."""

    def mark(self) -> torch.cuda.Event | None:
        """Call it in the thread that computed a payload; the event after which it is ready, None if it is."""
        return None

    @abstractmethod
    def send(self, payload: torch.Tensor, mark: torch.cuda.Event | None) -> None:
        """Send a payload that the receiver has posted; returns when its memory may be used again."""

    @abstractmethod
    def post(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Begin to receive into this buffer; returns a function that waits until it is whole."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory for a payload."""
        return torch.empty(nbytes, dtype=torch.uint8)

    @abstractmethod
    def abort(self) -> None:
        """End every wait with GroupBrokenError; any thread may call it."""


class GlooPath(PayloadPath):
    """See PayloadPath; payloads in host memory, both ways at once.

    Each payload is received into a buffer of its exact length, posted by a receiver that was told that length: gloo
    aborts the process when a message is longer than its buffer. Large payloads go in parts, so that waiting for one is
    bounded by the peer's silence and not by the payload's length.
    """

    def __init__(self, store: Store, rank: int, address: str, connect_s: float, timeout_s: float) -> None:
        """Connect the two ends, of rank 0 and 1; blocks until both are there.

        The other end reaches this machine at the IP `address`; it must connect within `connect_s`, else this raises
        GroupBrokenError, and receive each part of a payload within `timeout_s`. ConfigError: this torch has no gloo.
        """
        if not c10d.is_gloo_available():
            raise ConfigError("links.inside: gloo: torch was built without gloo here; use links.inside: zmq")
        options = c10d.ProcessGroupGloo._Options()
        options._threads = 1
        options._timeout = timedelta(seconds=connect_s)
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
        self._peer = 1 - rank
        self._timeout_s = timeout_s
        self._is_aborted = False
        self._group = _moved(c10d.ProcessGroupGloo, c10d.PrefixStore("gloo", store), rank, 2, options)

    def send(self, payload: torch.Tensor, mark: torch.cuda.Event | None = None) -> None:
        """See PayloadPath."""
        works = [_moved(self._group.send, [part], self._peer, _PAYLOADS) for part in _parts(payload)]
        _wait(works, self._timeout_s)

    def post(self, buffer: torch.Tensor) -> Callable[[], None]:
        """See PayloadPath; the payload has exactly the buffer's length."""
        works = [_moved(self._group.recv, [part], self._peer, _PAYLOADS) for part in _parts(buffer)]
        return lambda: _wait(works, _FOREVER_S)

    def abort(self) -> None:
        """See PayloadPath. A wait for a part that the kernel has half sent goes on until the time limit."""
        if self._is_aborted:
            return
        self._is_aborted = True
        # gloo has no call for this. A receive that is never answered breaks every connection of the group when its
        # time is over; it raises then, as it does when the group is broken already.
        with suppress(RuntimeError):
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NOTHING).wait(_AT_ONCE)


def _parts(payload: torch.Tensor) -> list[torch.Tensor]:
    count = math.ceil(payload.numel() / PART_NBYTES)
    return [payload[i * PART_NBYTES : (i + 1) * PART_NBYTES] for i in range(count)]


def _wait(works: list[Work], timeout_s: float) -> None:
    for work in works:
        _moved(work.wait, timedelta(seconds=timeout_s))


def _moved(call: Callable[..., T], *arguments: object) -> T:
    """The call's result; torch reports a broken group as a RuntimeError with a text."""
    try:
        return call(*arguments)
    except RuntimeError as error:
        raise GroupBrokenError(str(error).partition(". This is typically")[0]) from error


_LOOK_S = 0.2
"""How often a thread that waits for its turn checks whether it was aborted."""
_EXIT_S = 10.0
"""Time for aborts to finish at exit: torch ends the process by a signal if a communicator outlives CUDA."""

_aborting: set[threading.Thread] = set()


@atexit.register
def _await_aborts() -> None:
    until_s = time.monotonic() + _EXIT_S
    for thread in list(_aborting):
        thread.join(max(0.0, until_s - time.monotonic()))


def check_nccl(device: torch.device) -> None:
    """Raise ConfigError if payloads of this device cannot go over NCCL."""
    if device.type != "cuda" or not c10d.is_nccl_available():
        raise ConfigError(
            f"links.inside: nccl needs CUDA devices and a torch that has NCCL; got device {device}, NCCL "
            f"{'available' if c10d.is_nccl_available() else 'missing'}; use links.inside: gloo or zmq"
        )


class NcclPath(PayloadPath):
    """See PayloadPath; payloads from one CUDA device's memory to another's.

    An NCCL kernel that waits for its other half keeps the device from work that needs all of it, such as loading
    another kernel at its first use, and the thread that waits for that may be the one that should start the other half.
    So no kernel is started before the receiver has memory and has said so, and all that two stages send each other
    takes turns, by a lock that the lower one holds (`turn`): then of two devices at least one can go on. Seen on two
    H200: without turns, sending both ways at once deadlocked.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        device: torch.device,
        *,
        sends: bool,
        turn: "threading.Lock | None",
    ) -> None:
        """Take a place, rank 0 or 1, in the group of this name; the ends meet in `open`, and have a device each.

        `turn` is shared by both directions of all links with the peer at the lower stage; None at the upper one.
        """
        # The ZMQ session handles a peer that dies; NCCL's watchdog would end this process, with no message.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_FOREVER_S)
        self.device = device
        self._peer = 1 - rank
        self._sends = sends
        self._turn = turn
        self._is_aborted = False
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._store = store  # NCCL uses it as long as it lives
        self._group = c10d.ProcessGroupNCCL(c10d.PrefixStore(name, store), rank, 2, options)

    def open(self) -> None:
        """Make the communicator by sending one byte across."""
        byte = self.allocate(1)
        self._run(lambda: (self._group.send if self._sends else self._group.recv)([byte], self._peer, 0))

    def mark(self) -> torch.cuda.Event:
        """See PayloadPath."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def send(self, payload: torch.Tensor, mark: torch.cuda.Event | None) -> None:
        """See PayloadPath."""
        if not payload.numel():
            return
        if mark is not None:
            self._stream.wait_event(mark)
        self._take_turn()
        self._run_in_turn(lambda: self._group.send([payload], self._peer, 0))

    def post(self, buffer: torch.Tensor) -> Callable[[], None]:
        """See PayloadPath; the device is not occupied before the returned function is called."""
        if not buffer.numel():
            return lambda: None  # an empty payload needs neither kernel nor turn
        self._take_turn()
        return lambda: self._run_in_turn(lambda: self._group.recv([buffer], self._peer, 0))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See PayloadPath."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def abort(self) -> None:
        """See PayloadPath; runs in a separate thread.

        NCCL frees memory at the end of it, which waits for the device, and so for kernels of another communicator
        that is yet to be aborted.
        """
        if not self._is_aborted:
            self._is_aborted = True
            thread = threading.Thread(target=self._abort, name="tahq-nccl-abort", daemon=True)
            _aborting.add(thread)
            thread.start()

    def _abort(self) -> None:
        with suppress(RuntimeError):  # a communicator that was never made, or is broken already
            self._group.abort()
        _aborting.discard(threading.current_thread())

    def _take_turn(self) -> None:
        while self._turn is not None and not self._turn.acquire(timeout=_LOOK_S):
            if self._is_aborted:
                raise GroupBrokenError("NCCL: aborted")

    def _run_in_turn(self, start: Callable[[], Work]) -> None:
        try:
            self._run(start)
        finally:
            if self._turn is not None:
                self._turn.release()

    def _run(self, start: Callable[[], Work]) -> None:
        """Run it on our own stream, and wait until the device has finished."""
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                start().wait()
                self._stream.synchronize()
        except RuntimeError as error:
            raise GroupBrokenError(f"NCCL: {str(error).splitlines()[0]}") from error
        if self._is_aborted:
            raise GroupBrokenError("NCCL: aborted")
