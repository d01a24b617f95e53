"""The wire's process as its owner sees it: started with the hosts' devices, asked for changes, ended.

They exchange msgpack values over a socket pair. The owner sends an order, (plan, addresses), then one request at a
time, (name, arguments…) as in `process.Wire`; each is answered with (result, error). The process ends at end of file,
and so with its owner.
"""

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, Final

import msgpack

from tahq.errors import NetworkError
from tahq_netem.network.description import NetworkPlan
from tahq_netem.programs import module_argv, module_environment

ANSWER_TIMEOUT_S: Final = 10.0
START_TIMEOUT_S: Final = 60.0
"""For a process to start and to take its order: 7 s for the 62,250 paths of 250 hosts."""
_GRACE_S: Final = 3.0


def send(connection: Connection, message: Sequence[Any]) -> None:
    """Send plain values; dictionaries may have tuples as keys."""
    connection.send_bytes(msgpack.packb(message))


def receive(connection: Connection) -> Any:
    """The next message, its sequences as tuples; EOFError at the end."""
    return msgpack.unpackb(connection.recv_bytes(), use_list=False, strict_map_key=False)


class WireControl:
    """The owner's end of the connection. Threads may share it."""

    def __init__(self, own_end: socket.socket) -> None:
        self._socket = own_end
        self._connection = Connection(os.dup(own_end.fileno()))
        self._turn = threading.Lock()
        self._owner = os.getpid()
        self._failure: str | None = None

    def ask(self, *message: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Send a message and return the result that the process answers with."""
        with self._turn:
            result, error = self._exchange(message, timeout_s)
        if error is not None:
            raise NetworkError(f"the network's wire process refused: {error}")
        return result

    def _exchange(self, message: Any, timeout_s: float) -> Any:
        # After a failure every exchange fails: the next answer could be that to an earlier message.
        if self._failure is None:
            try:
                send(self._connection, message)
                if self._connection.poll(timeout_s):
                    return receive(self._connection)
                self._failure = f"did not answer within {timeout_s:g} s"
            except EOFError:
                self._failure = "has ended (see its output on stderr)"
            except OSError as error:
                self._failure = f"is gone ({error.strerror or error})"
        raise NetworkError(f"the network's wire process {self._failure}; build the network again")

    def close(self) -> None:
        """End the process; also from a signal handler, or while another thread waits for an answer."""
        # Closing alone would not wake that thread up. A forked child only closes its copy.
        if os.getpid() == self._owner:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._connection.close()


class WireProcess:
    """A wire process between the hosts' devices, given by their descriptors."""

    def __init__(self, devices: Sequence[int], plan: NetworkPlan, addresses: Sequence[str]) -> None:
        own_end, wire_end = socket.socketpair()
        self.control = WireControl(own_end)
        owner = os.pidfd_open(os.getpid())
        descriptors = [wire_end.fileno(), owner, *devices]
        with wire_end, os.fdopen(owner, "rb"):
            self._process = subprocess.Popen(
                module_argv("tahq_netem.wire.process", *map(str, descriptors)),
                pass_fds=descriptors,
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid
        try:
            self.scheduling: str = self.control.ask(asdict(plan), addresses, timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process; a second time does nothing."""
        self.control.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
