"""The wire's process, which moves frames between the hosts' TUN devices as a `Switch` decides; and its owner's end.

They exchange msgpack values over a socket pair. The owner sends the plan and the hosts' addresses, then one request at
a time, (a method of `Switch` that takes the time, its arguments); each is answered with (result, error). The process
ends with the connection or with its owner (a pidfd): a forked child of the owner may keep the connection open.
"""

import functools
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, Final

import msgpack
from pydantic import TypeAdapter

from tahq.errors import NetworkError, TahqError
from tahq_netem.network.description import NetworkPlan
from tahq_netem.programs import hurry, module_argv, module_environment
from tahq_netem.wire.lines import Switch
from tahq_netem.wire.packet import LARGEST_FRAME_BYTES

ANSWER_TIMEOUT_S: Final = 10.0
START_TIMEOUT_S: Final = 60.0
"""For the process to start, and to set up the 62,250 paths of 250 hosts."""
GRACE_S: Final = 3.0
EARLY_S: Final = 1e-4
"""How much early the process wakes up for due frames and delivers them: about the time until the receiver notices."""
HANDOVER_S: Final = 1e-4
"""About how long ago the kernel put a frame into the device that was just read.

Without these two corrections, a round trip of 20 ms measures 20.8 on a machine whose cores sleep in between, and a
message of 1 MB at 1 Gbit/s, which takes 8.4 ms, loses 5 %.
"""
FRAMES_AT_ONCE: Final = 64
"""Frames read from one host before the others get their turn."""


def _send(connection: Connection, message: Sequence[Any]) -> None:
    connection.send_bytes(msgpack.packb(message, default=asdict))


def _receive(connection: Connection) -> Any:
    """The next message: sequences, also as keys of dictionaries, are tuples; a plan is a dictionary."""
    return msgpack.unpackb(connection.recv_bytes(), use_list=False, strict_map_key=False)


def _plan_of(values: Any) -> NetworkPlan:
    return TypeAdapter(NetworkPlan).validate_python(values)


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
                _send(self._connection, message)
                if self._connection.poll(timeout_s):
                    return _receive(self._connection)
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


class WireProcess(WireControl):
    """A wire process between the hosts' devices, given by their descriptors in the plan's order."""

    def __init__(self, devices: Sequence[int], plan: NetworkPlan, addresses: Sequence[str]) -> None:
        own_end, wire_end = socket.socketpair()
        super().__init__(own_end)
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
            self.ask(plan, addresses, timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process; a second time does nothing."""
        super().close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Wire:
    """The process's loop: waits for frames, requests and the time of the next due frame, then does all that is due."""

    def __init__(self, control: Connection, owner: int, devices: Sequence[int]) -> None:
        self._control = control
        self._devices = devices
        plan, addresses = _receive(control)
        self._switch = Switch(_plan_of(plan), addresses, self._deliver)
        self._is_running = True
        self._actions: dict[int, Callable[[], None]] = {
            device: functools.partial(self._receive, host, device) for host, device in enumerate(devices)
        }
        self._actions |= {control.fileno(): self._serve, owner: self._stop}

    def run(self) -> None:
        hurry()
        self._answer(None)
        descriptors = list(self._actions)
        while self._is_running:
            due_s = self._switch.next_due_s
            wait_s = None if due_s is None else max(0.0, due_s - EARLY_S - monotonic())
            for descriptor in select.select(descriptors, [], [], wait_s)[0]:
                self._actions[descriptor]()
            self._switch.run_until(monotonic() + EARLY_S)

    def _receive(self, host: int, device: int) -> None:
        send = self._switch.send
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = os.read(device, LARGEST_FRAME_BYTES)
            except BlockingIOError:
                return
            now_s = monotonic()
            self._switch.run_until(now_s + EARLY_S)
            send(now_s - HANDOVER_S, host, frame)

    def _deliver(self, host: int, frame: bytes) -> None:
        # A device that is down refuses frames (EIO), and the kernel refuses malformed ones that a program on a host
        # made (EINVAL); neither must affect other hosts.
        with suppress(OSError):
            os.write(self._devices[host], frame)

    def _serve(self) -> None:
        try:
            name, *arguments = _receive(self._control)
        except (EOFError, OSError):
            self._stop()
            return
        try:
            if name == "set_plan":
                arguments = [_plan_of(*arguments)]
            self._answer(getattr(self._switch, name)(monotonic(), *arguments))
        except (TahqError, AttributeError, KeyError, TypeError, ValueError) as error:
            self._answer(None, f"{type(error).__name__}: {error}")

    def _answer(self, result: Any, error: str | None = None) -> None:
        with suppress(OSError):  # that the owner is gone is noticed by the next read
            _send(self._control, (result, error))

    def _stop(self) -> None:
        self._is_running = False


def main(arguments: Sequence[str]) -> None:
    """Serve the devices given by descriptor numbers; the first two are the control connection and the owner's pidfd."""
    control, owner, *devices = map(int, arguments)
    # Ctrl-C is for the owner, which closes the control connection when everything else has ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        wire = _Wire(Connection(control), owner, devices)
    except (EOFError, OSError):
        return  # the owner ended before it had sent the plan
    # Frames create no reference cycles, and a collection would delay due frames.
    gc.freeze()
    gc.disable()
    wire.run()


if __name__ == "__main__":
    main(sys.argv[1:])
