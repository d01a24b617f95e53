"""How the payloads of one direction travel between the two ends of a group: from host memory, or from a device's."""

from collections.abc import Callable
from typing import Protocol

import torch

from tahq.comm.group.gloo_group import GlooGroup
from tahq.comm.link.frame import CPU


class PayloadPath(Protocol):
    """Moves payloads whose length both ends know, in order. All of it may raise GroupBrokenError."""

    device: torch.device

    def open(self) -> None:
        """Whatever both ends must do together before the first payload; blocks until the other has come to it."""

    def mark(self) -> torch.cuda.Event | None:
        """In the thread that computed a payload: when it will be there. None: it is."""

    def send(self, payload: torch.Tensor, mark: torch.cuda.Event | None) -> None:
        """Send a payload that the receiver has posted; returns when its memory may be used again."""

    def post(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Begin to receive into this buffer; what is returned waits until it is whole."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory for a payload."""

    def abort(self) -> None:
        """Wake whoever waits, with GroupBrokenError; any thread may call it."""


class HostPath:
    """Payloads in host memory, over the gloo group that carries the announcements too."""

    device = CPU

    def __init__(self, group: GlooGroup) -> None:
        self._group = group

    def open(self) -> None:
        """Nothing: the group is connected."""

    def mark(self) -> None:
        """Nothing to wait for: what a CPU has computed is there."""

    def send(self, payload: torch.Tensor, mark: torch.cuda.Event | None) -> None:
        """See PayloadPath.send."""
        self._group.send_payload(payload)

    def post(self, buffer: torch.Tensor) -> Callable[[], None]:
        """See PayloadPath.post."""
        return self._group.post_payload(buffer)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See PayloadPath.allocate."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def abort(self) -> None:
        """See PayloadPath.abort."""
        self._group.abort()
