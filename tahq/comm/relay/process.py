"""The coordinator's end of the relay: it starts the process, starts it again if it dies, and reads its counters."""

import hashlib
import mmap
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from tahq.comm.relay.forwarding import COUNTER_NBYTES, MOST_UNKNOWN
from tahq.comm.relay.tickets import issue
from tahq.errors import UserError

PROGRAM: Final = "tahq.comm.relay.forwarding"
_RESTART_S: Final = 1.0
_LEAVE_S: Final = 1.0


class Relay:
    """A relay beside the coordinator, which runs from the first call of `open` on.

    The listening socket and the counters belong to this process, so neither is lost with the relay's.

    Args:
        host: the address to listen on.
        port: 0: any free one.
        secret: the coordinator's secret key, "" without CURVE; a coordinator that was restarted has the same.
        run_id: of the run.
        num_links: of the run.
        log: a file for the process's errors.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: str,
        run_id: int,
        num_links: int,
        log: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = (host, port)
        self._secret = hashlib.blake2b(f"relay of run {run_id}".encode(), key=bytes.fromhex(secret)).digest()
        self._log = log
        self._clock = clock
        self._counts = [0] * (2 * num_links)
        self._listener: socket.socket | None = None
        self._file: BinaryIO | None = None
        self._memory: mmap.mmap | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0

    def open(self) -> None:
        """Listen, and start the process; safe to call twice.

        Raises:
            UserError: the port cannot be listened on.
        """
        if self._listener is not None:
            return
        host, port = self._address
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(
                address[:2], family=family, backlog=MOST_UNKNOWN, dualstack_ipv6=host == "::"
            )
        except OSError as error:
            reason = str(error.strerror).partition(" (")[0]
            raise UserError(
                f"the relay cannot listen on port {port} of {host}: {reason}; set run.relay to another port"
            ) from error
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the relay
        self._file.truncate(COUNTER_NBYTES * len(self._counts))
        self._memory = mmap.mmap(self._file.fileno(), 0)
        self._start()

    def ticket(self, link: int, epoch: int, end: int) -> str:
        """``PORT/TICKET`` of an end of a link, as PLAN has it; opens the relay."""
        self.open()
        assert self._listener is not None, "it is open"
        return f"{self._listener.getsockname()[1]}/{issue(self._secret, link, epoch, end)}"

    def check(self) -> str:
        """Start the process again if it has ended, once a second at most; what happened, empty: nothing."""
        if self._process is None or self._process.poll() is None or self._clock() < self._started_s + _RESTART_S:
            return ""
        status = self._process.returncode
        self._start()
        return f"the relay has died (status {status}, {self._log}) and is started again; links over it reconnect"

    def take_counts(self) -> dict[tuple[int, int], int]:
        """Bytes that each end (LOWER or UPPER) of each link has sent over the relay since the last call."""
        if self._memory is None:
            return {}
        with memoryview(self._memory) as memory:
            before, self._counts = self._counts, memory.cast("Q").tolist()
        return {divmod(slot, 2): now - then for slot, (then, now) in enumerate(zip(before, self._counts, strict=True))}

    def close(self) -> None:
        """End the process; safe to call twice."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for part in (self._listener, self._file, self._memory):
            if part is not None:
                part.close()
        self._listener = self._file = self._memory = self._process = None

    def _start(self) -> None:
        assert self._listener is not None, "it is open"
        assert self._file is not None, "it is open"
        descriptors = [self._listener.fileno(), self._file.fileno()]
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *map(str, descriptors)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        self._started_s = self._clock()
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.write(self._secret.hex().encode() + b"\n")  # a command line would be public
        self._process.stdin.flush()
