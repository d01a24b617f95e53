"""Payloads from one CUDA device's memory to another's, over NCCL; announcements stay on gloo.

A kernel of NCCL's that waits for its other half keeps the device from doing what needs all of it, such as the
loading of another kernel at its first use, and whoever waits for that may be who should start the other half. So
none is started before the receiver has memory and has said so, and the two directions of a link take turns, by
a lock that the lower stage holds (`turn`): then of two devices at least one can go on. Seen on two
H200: without turns, sending both ways at once stood still for ever.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

from tahq.comm.group.gloo_group import GroupBrokenError
from tahq.comm.group.torch_groups import Store, Work, c10d
from tahq.errors import ConfigError

_FOR_EVER = timedelta(days=365)
_LOOK_S = 0.2
"""How often one that waits for its turn looks whether it was aborted."""
_EXIT_S = 10.0
"""For what was aborted to end before the process does: torch ends it by a signal if a communicator outlives CUDA."""

_aborting: set[threading.Thread] = set()


@atexit.register
def _await_aborts() -> None:
    until_s = time.monotonic() + _EXIT_S
    for thread in list(_aborting):
        thread.join(max(0.0, until_s - time.monotonic()))


def _nothing() -> None:
    """An empty payload needs no kernel, nor a turn."""


class NcclPath:
    """See PayloadPath."""

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
        """Take a place in the group; the ends meet in `open`.

        Args:
            store: where the ends find each other; it must outlive the path.
            name: of the group, unique in the store.
            rank: 0 or 1.
            device: where the payloads lie; each end needs one of its own.
            sends: whether this is the sending end.
            turn: shared by both directions of the link at the lower stage; None at the upper one.

        Raises:
            ConfigError: no CUDA device, or a torch without NCCL.
        """
        if device.type != "cuda" or not c10d.is_nccl_available():
            raise ConfigError(
                f"links.inside: nccl needs CUDA devices and a torch that has NCCL; here is device {device}, NCCL "
                f"{'there' if c10d.is_nccl_available() else 'missing'}; use links.inside: gloo or zmq"
            )
        # A peer that dies is the ZMQ session's business; NCCL's watchdog would end this process, with no message.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = _FOR_EVER
        self.device = device
        self._peer = 1 - rank
        self._sends = sends
        self._turn = turn
        self._is_aborted = False
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._group = c10d.ProcessGroupNCCL(c10d.PrefixStore(name, store), rank, 2, options)

    def open(self) -> None:
        """Make the communicator, by one byte that crosses."""
        byte = self.allocate(1)
        self._run(lambda: (self._group.send if self._sends else self._group.recv)([byte], self._peer, 0))

    def mark(self) -> torch.cuda.Event:
        """What this thread has given the device until now."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def send(self, payload: torch.Tensor, mark: torch.cuda.Event | None) -> None:
        """See PayloadPath.send."""
        if not payload.numel():
            return
        if mark is not None:
            self._stream.wait_event(mark)
        self._take_turn()
        self._run_in_turn(lambda: self._group.send([payload], self._peer, 0))

    def post(self, buffer: torch.Tensor) -> Callable[[], None]:
        """See PayloadPath.post; nothing occupies the device before what is returned is called."""
        if not buffer.numel():
            return _nothing
        self._take_turn()
        return lambda: self._run_in_turn(lambda: self._group.recv([buffer], self._peer, 0))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See PayloadPath.allocate."""
        with torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def abort(self) -> None:
        """See PayloadPath.abort; goes on in a thread of its own.

        NCCL frees memory at the end of it, which waits for the device, and so for whatever another
        communicator that is yet to be aborted has running there.
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
        """Do it on our own stream, and wait until the device has."""
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                start().wait()
                self._stream.synchronize()
        except RuntimeError as error:
            raise GroupBrokenError(f"NCCL: {str(error).splitlines()[0]}") from error
        if self._is_aborted:
            raise GroupBrokenError("NCCL: aborted")
