"""The wire's process: moves frames between the hosts' TUN devices, as `switch` decides.

Started by `backends.tun` as ``python -m tahq_netem.wire.process CONTROL OWNER DEVICE DEVICE …`` with open descriptors.
It ends with the control socket or with its owner (a pidfd): a forked child of the owner may keep the socket open. One
thread waits with epoll for frames, for requests, and for a timer set to the next due frame, then does all that is due.
"""

import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from time import monotonic
from typing import Any, Final

from tahq.errors import LocalProtocolError
from tahq_netem.network.description import HostShape, PathShape
from tahq_netem.programs import hurry
from tahq_netem.wire.control import answer_owner, plan_from_json, read_line, serve
from tahq_netem.wire.packet import LARGEST_FRAME_BYTES
from tahq_netem.wire.switch import Switch

EARLY_S: Final = 1e-4
"""How much early the timer is set and due frames are delivered: about the time until the receiver notices."""
HANDOVER_S: Final = 1e-4
"""About how long ago the kernel put a frame into the device that was just read.

Without these two corrections, a round trip of 20 ms measures 20.8 on a machine whose cores sleep in between, and a
message of 1 MB at 1 Gbit/s, which takes 8.4 ms, loses 5 %.
"""
FRAMES_AT_ONCE: Final = 64
"""Frames read from one host before the others get their turn."""
_TIMER_SPEC: Final = Struct("qqqq")  # struct itimerspec: interval, value; each in seconds and nanoseconds
_CLOCK_MONOTONIC: Final = 1
_TFD_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME: Final = 1


class Timer:
    """A timerfd on the monotonic clock. (`os.timerfd_create` came with Python 3.13.)"""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._due_s: float | None = None
        self.descriptor: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, due_s: float | None) -> None:
        """Become readable at `due_s` and not before; None: never."""
        if due_s == self._due_s:
            return
        self._due_s = due_s
        # Zero would stop the timer; a past time makes it fire at once.
        due_ns = 0 if due_s is None else max(1, int(due_s * 1e9))
        spec = _TIMER_SPEC.pack(0, 0, *divmod(due_ns, 1_000_000_000))
        self._libc.timerfd_settime(self.descriptor, _TFD_TIMER_ABSTIME, spec, None)

    def note_fired(self) -> None:
        """Note that it fired: it stays readable until it is set again."""
        self._due_s = -1.0


class Wire:
    """The loop, over the descriptors of the devices in the plan's order."""

    def __init__(self, order: Mapping[str, Any], devices: Sequence[int], control: socket.socket, owner: int) -> None:
        addresses = [socket.inet_aton(address) for address in order["addresses"]]
        self._devices = devices
        self._switch = Switch(plan_from_json(order["plan"]), addresses, self._deliver, seed=order["seed"])
        self._control = control
        self._timer = Timer()
        self._epoll = select.epoll()
        self._is_running = True
        self._actions: dict[int, Callable[[], None]] = {
            device: functools.partial(self._receive, host, device) for host, device in enumerate(devices)
        }
        self._actions |= {
            self._timer.descriptor: self._timer.note_fired,
            control.fileno(): self._serve,
            owner: self._stop,
        }

    def run(self) -> None:
        """Move frames until the owner is gone."""
        for descriptor in self._actions:
            self._epoll.register(descriptor, select.EPOLLIN)
        answer_owner(self._control, {"ready": {"scheduling": hurry()}})
        while self._is_running:
            due_s = self._switch.next_due_s
            self._timer.set(None if due_s is None else due_s - EARLY_S)
            for descriptor, _ in self._epoll.poll():
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

    def _deliver(self, host: int, frame: bytes) -> bool:
        # A device that is down refuses frames (EIO), and the kernel refuses malformed ones that a program on a host
        # made (EINVAL); neither must affect other hosts.
        try:
            os.write(self._devices[host], frame)
        except OSError:
            return False
        return True

    def _serve(self) -> None:
        self._is_running = self._is_running and serve(self._control, self._carry_out)

    def _carry_out(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request:
            case {"do": "rates", "host": host, "shape": shape}:
                self._switch.set_rates(monotonic(), host, HostShape(**shape))
            case {"do": "path", "source": source, "destination": destination, "shape": shape}:
                self._switch.set_path(monotonic(), source, destination, PathShape(**shape))
            case {"do": "link", "host": host, "is_up": bool(is_up)}:
                self._switch.set_link(host, is_up=is_up)
            case {"do": "counters"}:
                return self._switch.counters()
            case _:
                raise LocalProtocolError(f"no such request: {request}")
        return {}

    def _stop(self) -> None:
        self._is_running = False


def main(arguments: Sequence[str]) -> None:
    """Serve the devices given by descriptor numbers; the first two are the control socket and the owner's pidfd."""
    control_descriptor, owner, *devices = map(int, arguments)
    # Ctrl-C is for the owner, which closes the control socket when everything else has ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=control_descriptor) as control:
        order = read_line(control)
        if order is None:
            return  # the owner ended before it had sent the order
        wire = Wire(json.loads(order), devices, control, owner)
        # Frames create no reference cycles, and a collection would delay due frames.
        gc.freeze()
        gc.disable()
        wire.run()


if __name__ == "__main__":
    main(sys.argv[1:])
