"""`tahq-netem run`: any program on the hosts of a slow network.

The network goes when the program has ended, and also at Ctrl-C, which the terminal sends to the program as well, and
at SIGTERM (`backends.namespace_group`). Messages go to stderr: stdout is the program's.

A server has to listen before its clients start, so `HostProgram.await_listening` watches the sockets of its host for a
new one. A program may leave others behind that hold its output open, so its output is copied to the end only when the
network, and they with it, are gone: `finish_output`.
"""

import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tahq.comm.network_config import BackendName
from tahq.errors import ConfigError, UserError
from tahq_netem.backends.choice import build_network
from tahq_netem.backends.namespaces import HOST_DEVICE
from tahq_netem.backends.network import Network
from tahq_netem.measure.calibration import calibrate
from tahq_netem.network.description import known_host, plan_network, profile
from tahq_netem.network.faults import FaultEvent, Timeline, play

ALL: Final = "all"
LEAVE_S: Final = 3.0
"""How long programs may take to exit after Ctrl-C."""
LISTEN_WITHIN_S: Final = 10.0
"""How long to wait for a server to listen before its clients are started anyway."""
OUTPUT_WITHIN_S: Final = 3.0
"""How long to wait for the rest of a program's output when no process is left that writes to it."""

_SOCKET_LISTS: Final = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""Lists in /proc/net, and the state of a socket that waits for others: TCP listens, UDP is unconnected."""
_STATE, _INODE = 3, 9
"""Columns of these lists."""
_PLACEHOLDER = re.compile(r"\{(host[0-9]+)\}")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The arguments of `tahq-netem run`.

    `on` is a host or `all`; `also` lists programs that run beside, as HOST=COMMAND; with a `calibration` file the
    network is measured before anything runs; `faults` is a file with a timeline, which begins with the command.
    """

    profile: str
    command: tuple[str, ...]
    num_hosts: int = 2
    backend: BackendName = "auto"
    on: str = "host0"
    also: tuple[str, ...] = ()
    calibration: Path | None = None
    faults: Path | None = None


def run_command(request: RunRequest) -> int:
    """Build the network, run the command, remove the network.

    Returns the command's exit status, 128 + n if signal n ended it; with several hosts, the first that is not 0.
    """
    config = profile(request.profile, request.num_hosts)
    hosts = list(config.hosts) if request.on == ALL else [known_host(request.on, config.hosts)]
    also = [_host_command(text, config.hosts) for text in request.also]
    for name in _PLACEHOLDER.findall(" ".join([*request.command, *(word for _, argv in also for word in argv)])):
        if name not in config.hosts:
            raise ConfigError(f"{{{name}}}: there is no {name}; hosts are {', '.join(config.hosts)} (--hosts)")
    timeline = Timeline() if request.faults is None else Timeline.load(request.faults)
    timeline.check(plan_network(config), has_steps=False)
    with ExitStack() as afterwards, build_network(config, backend=request.backend, option="--backend") as network:

        def start(host: str, argv: Sequence[str], copied_to: int | None) -> HostProgram:
            program = HostProgram(network, host, argv, copied_to=copied_to)
            afterwards.callback(program.finish_output)
            return program

        if request.calibration is not None:
            measured = calibrate(network, quick=True)
            measured.write(request.calibration)
            _say(*measured.lines())
            measured.check()
        _say(f"{', '.join(f'{host} is {network.address(host)}' for host in config.hosts)}; by {network.backend}")
        for host, argv in also:
            start(host, argv, sys.stderr.fileno()).await_listening()
        with play(timeline, network) as player:
            copied_to = None if len(hosts) == 1 else sys.stdout.fileno()
            status = _wait([start(host, request.command, copied_to) for host in hosts])
        _say(*map(_event_line, player.log))
        return status


def _host_command(text: str, hosts: Mapping[str, object]) -> tuple[str, Sequence[str]]:
    """Parse `host1=iperf3 -s`."""
    host, equals, command = text.partition("=")
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--also {text}: {error}") from None
    if not equals or not argv:
        raise ConfigError(f"--also {text}: expected a host and a command, such as --also 'host1=iperf3 -s'")
    return known_host(host, hosts), argv


def _event_line(event: FaultEvent) -> str:
    due = "" if event.due_s is None else f" (due at {event.due_s:.2f} s)"
    return f"{event.at_s:.2f} s: {event.fault.what} of {' → '.join(event.fault.hosts)} {event.change}{due}"


def _wait(programs: Sequence["HostProgram"]) -> int:
    """Wait for programs to end; return the first exit status that is not 0, else 0."""
    try:
        statuses = [program.wait() for program in programs]
    except KeyboardInterrupt:
        # The terminal has signalled the programs too; those that stay are ended with the network.
        for program in programs:
            with suppress(subprocess.TimeoutExpired):
                program.wait(LEAVE_S)
        raise
    return next((status for status in statuses if status), 0)


class HostProgram:
    """A command that runs on a host, with its variables set and `{host1}` filled in.

    Its output is copied to the descriptor `copied_to`, the host's name before each line; None: it shares this
    process's input and output.
    """

    def __init__(self, network: Network, host: str, argv: Sequence[str], *, copied_to: int | None = None) -> None:
        self._network = network
        self._host = host
        self._name = shlex.join(argv)
        self._copied_to = copied_to
        self._others = listening_sockets(network, host)
        addresses = {name: network.address(name) for name in network.plan.hosts}
        filled = [_PLACEHOLDER.sub(lambda match: addresses[match[1]], argument) for argument in argv]
        env = os.environ | {
            "TAHQ_HOST": host,
            "TAHQ_HOSTS": ",".join(f"{name}={address}" for name, address in addresses.items()),
            "TAHQ_INTERFACE": HOST_DEVICE,
        }
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            self._process = network.popen(host, filled, env=env, **({} if copied_to is None else pipes))
        except OSError as error:
            raise UserError(f"cannot start {argv[0]}: {error.strerror}") from error
        self._copier = threading.Thread(target=self._copy_lines, daemon=True)
        self._copier.start()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end and return its exit status, 128 + n for signal n; output may still be being copied."""
        status = self._process.wait(timeout_s)
        return status if status >= 0 else 128 - status

    def finish_output(self) -> None:
        """Wait a little until its output is copied, when the network is gone."""
        self._copier.join(OUTPUT_WITHIN_S)
        self._process.poll()  # reaps it

    def await_listening(self, timeout_s: float = LISTEN_WITHIN_S) -> None:
        """Return when its host has a new socket that waits for TCP connections or UDP packets, or at the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < deadline_s:
            if not listening_sockets(self._network, self._host) <= self._others:
                return
            time.sleep(0.02)
        if self._process.returncode:
            raise UserError(f"{self._name} on {self._host} ended with status {self._process.returncode} at once")

    def _copy_lines(self) -> None:
        if self._copied_to is None or self._process.stdout is None:
            return
        with self._process.stdout as lines:
            for line in lines:
                # If our own reader has gone, the program must not be held up by that.
                with suppress(BrokenPipeError):
                    os.write(self._copied_to, b"%s | %s\n" % (self._host.encode(), line.removesuffix(b"\n")))


def listening_sockets(network: Network, host: str) -> set[str]:
    """The inodes of a host's sockets that wait for connections or packets."""
    found = set()
    with network.entered(host):
        for name, state in _SOCKET_LISTS.items():
            with suppress(OSError):  # the kernel has no IPv6
                rows = map(str.split, Path(f"/proc/thread-self/net/{name}").read_text().splitlines()[1:])
                found |= {fields[_INODE] for fields in rows if fields[_STATE] == state}
    return found


def _say(*lines: str) -> None:
    for line in lines:
        print(f"tahq-netem: {line}", file=sys.stderr, flush=True)
