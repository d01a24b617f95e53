"""Payloads over a gloo process group of the two ends of a link.

torch's own object without `init_process_group`, so that there is no default group, no environment variable, and
as many groups as there are links. Each payload is received into a buffer of its exact length, posted by a receiver that
was told that length: gloo aborts the process when a message is longer than its buffer. Large payloads go in parts, so
that waiting for one is bounded by the peer's silence and not by the payload's length.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

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


class PayloadPath(Protocol):
    """Moves payloads whose length both ends know, in order. All of it may raise GroupBrokenError."""

    device: torch.device

    def open(self) -> None:
        """Do what both ends must do together before the first payload; blocks until the other end does it, too."""

    def mark(self) -> torch.cuda.Event | None:
        """Call it in the thread that computed a payload; the event after which it is ready, None if it is."""

    def send(self, payload: torch.Tensor, mark: torch.cuda.Event | None) -> None:
        """Send a payload that the receiver has posted; returns when its memory may be used again."""

    def post(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Begin to receive into this buffer; returns a function that waits until it is whole."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory for a payload."""

    def abort(self) -> None:
        """End every wait with GroupBrokenError; any thread may call it."""


class GlooPath:
    """See PayloadPath; payloads in host memory, both ways at once."""

    device = CPU

    def __init__(self, store: Store, rank: int, address: str, connect_s: float, timeout_s: float) -> None:
        """Connect the two ends; blocks until both are there.

        Args:
            store: where the ends find each other.
            rank: 0 or 1.
            address: this machine's IP address that the other end reaches.
            connect_s: time limit for the other end to connect.
            timeout_s: time limit for it to receive a part of a payload.

        Raises:
            GroupBrokenError: it did not connect in time.
            ConfigError: this torch has no gloo.
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

    def open(self) -> None:
        """See PayloadPath; the group is connected already."""

    def mark(self) -> None:
        """See PayloadPath; a CPU's results are ready at once."""

    def send(self, payload: torch.Tensor, mark: torch.cuda.Event | None = None) -> None:
        """See PayloadPath."""
        works = [_moved(self._group.send, [part], self._peer, _PAYLOADS) for part in _parts(payload)]
        _wait(works, self._timeout_s)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See PayloadPath."""
        return torch.empty(nbytes, dtype=torch.uint8)

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
