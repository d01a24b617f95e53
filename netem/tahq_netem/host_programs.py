"""Programs that `tahq-netem run` starts on the hosts: their output told apart, their ends awaited.

A program that serves others has to listen before those who ask begin. Nobody says when it does, so
`await_listening` looks at the sockets of its host, as the kernel lists them, for one that was not there before.

A program may leave others behind that hold its output open. So its end is not that of its output, which is copied
to the end when their network is gone, and they with it: `finish_output`.
"""

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Final

from tahq.errors import UserError
from tahq_netem.namespaces import entered
from tahq_netem.network import Network

LISTEN_WITHIN_S: Final = 10.0
"""How long a server has before those who need it are started nevertheless."""
OUTPUT_WITHIN_S: Final = 3.0
"""How long programs' output may take to be written once nobody is left who adds to it."""

_TCP_LISTEN: Final = "0A"
_UDP_UNCONNECTED: Final = "07"
_SOCKET_LISTS: Final = (
    ("tcp", _TCP_LISTEN),
    ("tcp6", _TCP_LISTEN),
    ("udp", _UDP_UNCONNECTED),
    ("udp6", _UDP_UNCONNECTED),
)
_STATE, _INODE = 3, 9
"""Columns of these lists."""


class HostProgram:
    """A command that runs on a host.

    Args:
        network: the host's.
        host: its name.
        argv: the command line.
        env: its environment.
        copied_to: the descriptor that its output goes to, the host's name before each line; None: its output is
            this process's, and so is its input.

    Raises:
        UserError: it cannot be started.
    """

    def __init__(
        self, network: Network, host: str, argv: Sequence[str], env: Mapping[str, str], *, copied_to: int | None = None
    ) -> None:
        self.host = host
        self._network = network
        self._name = shlex.join(argv)
        self._others = listening_sockets(network, host)
        pipes = (
            {}
            if copied_to is None
            else {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        )
        try:
            self._process: subprocess.Popen[bytes] = network.popen(host, argv, env=env, **pipes)
        except OSError as error:
            raise UserError(f"cannot start {argv[0]}: {error.strerror}") from error
        self._copier = threading.Thread(target=_copy_lines, args=(self._process.stdout, host, copied_to), daemon=True)
        self._copier.start()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def wait(self) -> int:
        """Its exit status, as a shell has it; all of its output may not have been copied yet."""
        status = self._process.wait()
        return status if status >= 0 else 128 - status

    def finish_output(self, timeout_s: float = OUTPUT_WITHIN_S) -> None:
        """Wait until its output is copied, but not for ever: somebody else may hold it open, or not read it."""
        self._copier.join(timeout_s)

    def leave(self, timeout_s: float) -> None:
        """Wait for it, but not for ever."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def await_listening(self, timeout_s: float = LISTEN_WITHIN_S) -> None:
        """Return as soon as something on its host waits for TCP connections or UDP packets, or the time is over.

        What waited before this program was started does not count.

        Raises:
            UserError: it has failed.
        """
        deadline_s = time.monotonic() + timeout_s
        while self.is_running and not self._has_listener() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        if self._process.returncode:
            raise UserError(f"{self._name} on {self.host} ended with status {self._process.returncode} at once")

    def _has_listener(self) -> bool:
        return not listening_sockets(self._network, self.host) <= self._others


def listening_sockets(network: Network, host: str) -> frozenset[str]:
    """The sockets of a host that wait for others to begin, by their inodes."""
    namespace = network.namespace(host)
    with nullcontext() if namespace is None else entered(namespace):
        return frozenset().union(*(_inodes(name, state) for name, state in _SOCKET_LISTS))


def _inodes(name: str, state: str) -> set[str]:
    try:
        _, *rows = Path(f"/proc/thread-self/net/{name}").read_text().splitlines()
    except OSError:
        return set()  # the kernel has no IPv6
    return {fields[_INODE] for fields in map(str.split, rows) if fields[_STATE] == state}


def _copy_lines(lines: IO[bytes] | None, host: str, descriptor: int | None) -> None:
    if lines is None or descriptor is None:
        return
    with lines:
        for line in lines:
            # Nobody may read on; the program is not to be held up by that.
            with suppress(BrokenPipeError):
                os.write(descriptor, b"%s | %s\n" % (host.encode(), line.removesuffix(b"\n")))
