"""`tahq-netem run`: any program on the hosts of a slow network.

The network goes when the program has ended, and also at Ctrl-C, which the terminal sends to the program as well, and
at SIGTERM (`backends.leftovers`). Messages go to stderr: stdout is the program's.

A server has to listen before its clients start. `HostProgram.await_listening` watches the sockets of its host, as the
kernel lists them, for a new one. A program may leave others behind that hold its output open, so its output is copied
to the end only when the network, and they with it, are gone: `finish_output`.
"""

import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tahq.errors import ConfigError, UserError
from tahq_netem.backends.choice import build_network
from tahq_netem.backends.namespaces import HOST_DEVICE, entered
from tahq_netem.backends.network import Network
from tahq_netem.measure.calibration import calibrate
from tahq_netem.network.description import BackendName, known_host, plan_network
from tahq_netem.network.fault_player import play
from tahq_netem.network.faults import Timeline
from tahq_netem.network.profiles import profile

ALL: Final = "all"
LEAVE_S: Final = 3.0
"""How long programs may take to exit after Ctrl-C."""
LISTEN_WITHIN_S: Final = 10.0
"""How long to wait for a server to listen before its clients are started anyway."""
OUTPUT_WITHIN_S: Final = 3.0
"""How long to wait for the rest of a program's output when no process is left that writes to it."""

_TCP_LISTEN, _UDP_UNCONNECTED = "0A", "07"
_SOCKET_LISTS: Final = {
    "tcp": _TCP_LISTEN,
    "tcp6": _TCP_LISTEN,
    "udp": _UDP_UNCONNECTED,
    "udp6": _UDP_UNCONNECTED,
}
"""Lists in /proc/net, and the state of a socket that waits for others."""
_STATE, _INODE = 3, 9
"""Columns of these lists."""
_PLACEHOLDER = re.compile(r"\{(host[0-9]+)\}")

HostCommand = tuple[str, Sequence[str]]
"""A host and a command line."""


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

    Returns:
        The command's exit status, 128 + n if signal n ended it; with several hosts, the first that is not 0.

    Raises:
        ConfigError: no such profile or host, or a timeline that makes no sense.
        NetworkError: the network cannot be built here, or is not as described.
        UserError: the command cannot be started.
    """
    config = profile(request.profile, request.num_hosts)
    hosts = list(config.hosts) if request.on == ALL else [known_host(request.on, config.hosts)]
    also = [_host_command(text, config.hosts) for text in request.also]
    for argv in (request.command, *(argv for _, argv in also)):
        _check_names(argv, config.hosts)
    timeline = Timeline() if request.faults is None else Timeline.load(request.faults)
    timeline.check(plan_network(config), has_steps=False)
    with ExitStack() as afterwards, build_network(config, backend=request.backend, option="--backend") as network:
        if request.calibration is not None:
            _measure(network, request.calibration)
        addresses = {host: network.address(host) for host in config.hosts}
        _say(f"{', '.join(f'{host} is {address}' for host, address in addresses.items())}; by {network.backend}")
        programs = _Programs(network, addresses, afterwards)
        programs.serve(also)
        with _playing(timeline, network):
            return programs.run(hosts, request.command)


@contextmanager
def _playing(timeline: Timeline, network: Network) -> Iterator[None]:
    """Play the timeline, and report its events afterwards."""
    with play(timeline, network) as player:
        yield
    for event in player.log:
        link = " → ".join(event.fault.hosts)
        due = "" if event.due_s is None else f" (due at {event.due_s:.2f} s)"
        _say(f"{event.at_s:.2f} s: {event.fault.what} of {link} {event.change}{due}")


def _host_command(text: str, hosts: Mapping[str, object]) -> HostCommand:
    """Parse `host1=iperf3 -s`."""
    host, equals, command = text.partition("=")
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--also {text}: {error}") from None
    if not equals or not argv:
        raise ConfigError(f"--also {text}: expected a host and a command, such as --also 'host1=iperf3 -s'")
    return known_host(host, hosts), argv


def _check_names(command: Sequence[str], hosts: Mapping[str, object]) -> None:
    for argument in command:
        for name in _PLACEHOLDER.findall(argument):
            if name not in hosts:
                raise ConfigError(f"{{{name}}}: there is no {name}; hosts are {', '.join(hosts)} (--hosts)")


def _measure(network: Network, path: Path) -> None:
    measured = calibrate(network, quick=True)
    measured.write(path)
    for line in measured.lines():
        _say(line)
    measured.check()


class _Programs:
    """The programs on the hosts of one network.

    Args:
        network: the network.
        addresses: of every host.
        afterwards: closed when the network is gone; waits for the programs' last output.
    """

    def __init__(self, network: Network, addresses: Mapping[str, str], afterwards: ExitStack) -> None:
        self._network = network
        self._addresses = addresses
        self._afterwards = afterwards

    def serve(self, commands: Sequence[HostCommand]) -> None:
        """Start the programs that run beside, each when the one before listens; they end with the network."""
        for host, argv in commands:
            self._start(host, argv, copied_to=sys.stderr.fileno()).await_listening()

    def run(self, hosts: Sequence[str], argv: Sequence[str]) -> int:
        """Run a command on these hosts to its end; return the first exit status that is not 0, else 0."""
        copied_to = None if len(hosts) == 1 else sys.stdout.fileno()
        programs = [self._start(host, argv, copied_to=copied_to) for host in hosts]
        try:
            statuses = [program.wait() for program in programs]
        except KeyboardInterrupt:
            # The terminal has signalled the programs too; those that stay are ended with the network.
            for program in programs:
                program.leave(LEAVE_S)
            raise
        return next((status for status in statuses if status), 0)

    def _start(self, host: str, argv: Sequence[str], *, copied_to: int | None) -> "HostProgram":
        filled = [_PLACEHOLDER.sub(lambda match: self._addresses[match[1]], argument) for argument in argv]
        env = {
            **os.environ,
            "TAHQ_HOST": host,
            "TAHQ_HOSTS": ",".join(f"{name}={address}" for name, address in self._addresses.items()),
            "TAHQ_INTERFACE": HOST_DEVICE,
        }
        program = HostProgram(self._network, host, filled, env, copied_to=copied_to)
        self._afterwards.callback(program.finish_output)
        return program


class HostProgram:
    """A command that runs on a host.

    Args:
        network: the network.
        host: where it runs.
        argv: the command line.
        env: its environment.
        copied_to: the descriptor that its output is copied to, the host's name before each line; None: it shares this
            process's input and output.

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
        """Wait for its end and return its exit status, 128 + n for signal n; output may still be being copied."""
        status = self._process.wait()
        return status if status >= 0 else 128 - status

    def finish_output(self, timeout_s: float = OUTPUT_WITHIN_S) -> None:
        """Wait until its output is copied, but no longer than `timeout_s`."""
        self._copier.join(timeout_s)

    def leave(self, timeout_s: float) -> None:
        """Wait for its end, but no longer than `timeout_s`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def await_listening(self, timeout_s: float = LISTEN_WITHIN_S) -> None:
        """Return when its host has a new socket that waits for TCP connections or UDP packets, or at the timeout.

        Raises:
            UserError: the program has failed.
        """
        deadline_s = time.monotonic() + timeout_s
        while self.is_running and not self._has_listener() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        if self._process.returncode:
            raise UserError(f"{self._name} on {self.host} ended with status {self._process.returncode} at once")

    def _has_listener(self) -> bool:
        return not listening_sockets(self._network, self.host) <= self._others


def listening_sockets(network: Network, host: str) -> frozenset[str]:
    """The inodes of a host's sockets that wait for connections or packets."""
    with entered(network.namespace(host)):
        return frozenset().union(*(_inodes(name, state) for name, state in _SOCKET_LISTS.items()))


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
            # If our own reader has gone, the program must not be held up by that.
            with suppress(BrokenPipeError):
                os.write(descriptor, b"%s | %s\n" % (host.encode(), line.removesuffix(b"\n")))


def _say(line: str) -> None:
    print(f"tahq-netem: {line}", file=sys.stderr, flush=True)
