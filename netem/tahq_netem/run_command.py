"""`tahq-netem run`: anybody's program on the hosts of a slow network.

The network goes when the program has ended, and also at Ctrl-C, which the terminal sends to the program as
well, and at SIGTERM (`tahq_netem.leftovers`). What is said goes to stderr: stdout is the program's.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tahq.errors import ConfigError, NetworkError
from tahq_netem.backend_choice import backend_of_own_hosts
from tahq_netem.calibration import calibrate
from tahq_netem.description import BackendName, NetworkConfig, known_host, plan_network
from tahq_netem.fault_player import play
from tahq_netem.faults import Timeline
from tahq_netem.host_programs import HostProgram
from tahq_netem.json_file import write_json
from tahq_netem.network import Network, build_network
from tahq_netem.profiles import profile

ALL: Final = "all"
LEAVE_S: Final = 3.0
"""How long programs may take to leave after Ctrl-C before they are made to."""

_ADVICE: Final = "run it as root (sudo), where namespaces and veth or TUN are allowed; `tahq-netem probe` says more"
_PLACEHOLDER = re.compile(r"\{(host[0-9]+)\}")

HostCommand = tuple[str, Sequence[str]]
"""A host, and what runs there."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a person asked for on the command line of `tahq-netem run`.

    `on` is a host or `all`; `also` is what runs beside, each as HOST=COMMAND; with a `calibration` file the
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
        The command's exit status, 128 + n if signal n ended it; of several the first that is not 0.

    Raises:
        ConfigError: no such profile or host, or a timeline that makes no sense.
        NetworkError: the network cannot be made here, or is not as described.
        UserError: the command cannot be started.
    """
    config = profile(request.profile, request.num_hosts)
    hosts = list(config.hosts) if request.on == ALL else [known_host(request.on, config.hosts)]
    also = [_host_command(text, config.hosts) for text in request.also]
    for argv in (request.command, *(argv for _, argv in also)):
        _check_names(argv, config.hosts)
    timeline = Timeline() if request.faults is None else Timeline.load(request.faults)
    timeline.check(plan_network(config), has_steps=False)
    with ExitStack() as afterwards, build_network(config, backend=_backend(config, request.backend)) as network:
        if request.calibration is not None:
            _measure(network, request.calibration)
        addresses = {host: network.address(host) for host in config.hosts}
        _say(f"{', '.join(f'{host} is {address}' for host, address in addresses.items())}; by {network.backend}")
        programs = _Programs(network, addresses, afterwards)
        programs.serve(also)
        with _playing(timeline, network):
            return programs.run(hosts, request.command)


def _backend(config: NetworkConfig, wanted: BackendName) -> BackendName:
    if wanted == "relay":
        raise NetworkError(
            "--backend relay: a program that was not made for it cannot be sent through relays; "
            f"its hosts have to be namespaces: {_ADVICE}"
        )
    return backend_of_own_hosts(config, wanted, "--backend", _ADVICE)


@contextmanager
def _playing(timeline: Timeline, network: Network) -> Iterator[None]:
    """The timeline is played; afterwards it is said what was done when."""
    with play(timeline, network) as player:
        yield
    for event in player.log:
        link = " → ".join(event.fault.hosts)
        due = "" if event.due_s is None else f" (due at {event.due_s:.2f} s)"
        _say(f"{event.at_s:.2f} s: {event.fault.what} of {link} {event.change}{due}")


def _host_command(text: str, hosts: Mapping[str, object]) -> HostCommand:
    """`host1=iperf3 -s`, taken apart as a shell does."""
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
    write_json(path, measured.as_dict())
    for line in measured.lines():
        _say(line)
    measured.check()


class _Programs:
    """What is started on the hosts of one network, each program with its environment and its addresses.

    Args:
        network: the hosts'.
        addresses: of every host.
        afterwards: closed when the network is gone; programs' last words are then waited for.
    """

    def __init__(self, network: Network, addresses: Mapping[str, str], afterwards: ExitStack) -> None:
        self._network = network
        self._addresses = addresses
        self._afterwards = afterwards

    def serve(self, commands: Sequence[HostCommand]) -> None:
        """Start what runs beside, each when the one before listens; it ends with the network."""
        for host, argv in commands:
            self._start(host, argv, copied_to=sys.stderr.fileno()).await_listening()

    def run(self, hosts: Sequence[str], argv: Sequence[str]) -> int:
        """Run a command on these hosts to its end; its exit status, of several the first that is not 0."""
        copied_to = None if len(hosts) == 1 else sys.stdout.fileno()
        programs = [self._start(host, argv, copied_to=copied_to) for host in hosts]
        try:
            statuses = [program.wait() for program in programs]
        except KeyboardInterrupt:
            # The terminal has told them too; whoever is still there after this is ended with the network.
            for program in programs:
                program.leave(LEAVE_S)
            raise
        return next((status for status in statuses if status), 0)

    def _start(self, host: str, argv: Sequence[str], *, copied_to: int | None) -> HostProgram:
        filled = [_PLACEHOLDER.sub(lambda match: self._addresses[match[1]], argument) for argument in argv]
        env = {
            **os.environ,
            "TAHQ_HOST": host,
            "TAHQ_HOSTS": ",".join(f"{name}={address}" for name, address in self._addresses.items()),
            "TAHQ_INTERFACE": self._network.interface(host),
        }
        program = HostProgram(self._network, host, filled, env, copied_to=copied_to)
        self._afterwards.callback(program.finish_output)
        return program


def _say(line: str) -> None:
    print(f"tahq-netem: {line}", file=sys.stderr, flush=True)
