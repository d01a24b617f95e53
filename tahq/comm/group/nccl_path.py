"""Payloads from one CUDA device's memory to another's, over NCCL.

An NCCL kernel that waits for its other half keeps the device from work that needs all of it, such as loading
another kernel at its first use, and the thread that waits for that may be the one that should start the other half. So
no kernel is started before the receiver has memory and has said so, and the two directions of a link take turns, by
a lock that the lower stage holds (`turn`): then of two devices at least one can go on. Seen on two
H200: without turns, sending both ways at once deadlocked.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

from tahq.comm.group.gloo_path import GroupBrokenError, Store, Work, c10d
from tahq.errors import ConfigError

_FOR_EVER = timedelta(days=365)
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


def _nothing() -> None:
    """An empty payload needs neither kernel nor turn."""


def check_nccl(device: torch.device) -> None:
    """Raise ConfigError if payloads of this device cannot go over NCCL."""
    if device.type != "cuda" or not c10d.is_nccl_available():
        raise ConfigError(
            f"links.inside: nccl needs CUDA devices and a torch that has NCCL; got device {device}, NCCL "
            f"{'available' if c10d.is_nccl_available() else 'missing'}; use links.inside: gloo or zmq"
        )


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
            store: where the ends find each other.
            name: of the group, unique in the store.
            rank: 0 or 1.
            device: of the payloads; each end needs a separate one.
            sends: whether this is the sending end.
            turn: shared by both directions of the link at the lower stage; None at the upper one.
        """
        # The ZMQ session handles a peer that dies; NCCL's watchdog would end this process, with no message.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = _FOR_EVER
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
            return _nothing
        self._take_turn()
        return lambda: self._run_in_turn(lambda: self._group.recv([buffer], self._peer, 0))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See PayloadPath."""
        with torch.cuda.stream(self._stream):
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
