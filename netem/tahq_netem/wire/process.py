"""The wire's process: moves frames between the hosts' TUN devices, as `switch` decides.

Started by `control.WireProcess` as ``python -m tahq_netem.wire.process CONTROL OWNER DEVICE DEVICE …`` with open
descriptors. It ends with the control connection or with its owner (a pidfd): a forked child of the owner may keep the
connection open. One thread waits for frames, requests and the time of the next due frame, then does all that is due.
"""

import functools
import gc
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, Final

from pydantic import TypeAdapter

from tahq.errors import TahqError
from tahq_netem.network.description import HostShape, NetworkPlan, PathShape
from tahq_netem.programs import hurry
from tahq_netem.wire.control import receive, send
from tahq_netem.wire.packet import LARGEST_FRAME_BYTES
from tahq_netem.wire.switch import Switch

EARLY_S: Final = 1e-4
"""How much early the process wakes up for due frames and delivers them: about the time until the receiver notices."""
HANDOVER_S: Final = 1e-4
"""About how long ago the kernel put a frame into the device that was just read.

Without these two corrections, a round trip of 20 ms measures 20.8 on a machine whose cores sleep in between, and a
message of 1 MB at 1 Gbit/s, which takes 8.4 ms, loses 5 %.
"""
FRAMES_AT_ONCE: Final = 64
"""Frames read from one host before the others get their turn."""


class Wire:
    """The loop, over the descriptors of the devices in the plan's order."""

    def __init__(self, control: Connection, owner: int, devices: Sequence[int]) -> None:
        self._control = control
        self._devices = devices
        plan, addresses = receive(control)
        self._switch = switch = Switch(TypeAdapter(NetworkPlan).validate_python(plan), addresses, self._deliver)
        self._requests: dict[str, Callable[..., None]] = {
            "set_rates": lambda host, shape: switch.set_rates(monotonic(), host, HostShape(**shape)),
            "set_path": lambda source, destination, shape: switch.set_path(
                monotonic(), source, destination, PathShape(**shape)
            ),
            "set_link": lambda host, is_up: switch.set_link(host, is_up=is_up),
        }
        self._is_running = True
        self._actions: dict[int, Callable[[], None]] = {
            device: functools.partial(self._receive, host, device) for host, device in enumerate(devices)
        }
        self._actions |= {control.fileno(): self._serve, owner: self._stop}

    def run(self) -> None:
        """Move frames until the owner is gone."""
        self._answer(hurry())
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
            name, *arguments = receive(self._control)
        except (EOFError, OSError):
            self._stop()
            return
        try:
            self._answer(self._requests[name](*arguments))
        except (TahqError, KeyError, TypeError, ValueError) as error:
            self._answer(None, f"{type(error).__name__}: {error}")

    def _answer(self, result: Any, error: str | None = None) -> None:
        with suppress(OSError):  # that the owner is gone is noticed by the next read
            send(self._control, (result, error))

    def _stop(self) -> None:
        self._is_running = False


def main(arguments: Sequence[str]) -> None:
    """Serve the devices given by descriptor numbers; the first two are the control connection and the owner's pidfd."""
    control, owner, *devices = map(int, arguments)
    # Ctrl-C is for the owner, which closes the control connection when everything else has ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        wire = Wire(Connection(control), owner, devices)
    except (EOFError, OSError):
        return  # the owner ended before it had sent the order
    # Frames create no reference cycles, and a collection would delay due frames.
    gc.freeze()
    gc.disable()
    wire.run()


if __name__ == "__main__":
    main(sys.argv[1:])
