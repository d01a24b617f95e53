"""Before anything is started over ssh: all hosts at once, and all that is wrong with them in one table.

Each host, this machine too if it is one, runs `tahq check-host` (`host_check`), looks for what its worker will need,
listens where the worker will listen, and dials the coordinator and its neighbours. Hosts whose workers are started by
hand are not asked.
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.table import Table

from tahq import __version__
from tahq.comm.config import MachineConfig
from tahq.comm.zmq.addresses import LOOPBACK, advertised_address, format_address, parse_address, unless_taken
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_json, load_config
from tahq.config.stage_estimate import stage_estimate
from tahq.errors import UserError
from tahq.worker.assembly import resolved_spec
from tahq.worker.links import is_local_address
from tahq_launch.command_line import announce, rendered
from tahq_launch.start.host_check import MARK
from tahq_launch.start.prepared_run import StartRequest
from tahq_launch.start.resolution import resolve_for_run
from tahq_launch.start.worker_command import ssh_argv

AT_ONCE: Final = 8
"""Connections at a time; sshd refuses some of more than ten that have not logged in yet."""
TIMEOUT_S: Final = 90.0
"""For one host, with the import of torch from a slow disk."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a host, and what to do about it."""

    host: str
    what: str
    remedy: str


def reachable_start(start: StartRequest) -> tuple[StartRequest, tuple[Fault, ...]]:
    """The start, with `run.bind` as the hosts reach this machine if it is open, and all that is wrong with the hosts.

    Unchanged, with nothing found, if no worker is started over ssh.
    """
    given = load_config(start.config_path, start.all_overrides)
    if isinstance(given.hosts, str) or all(host.ssh is None for host in given.hosts):
        return start, ()
    faults, bind = _Preflight(resolve_for_run(given), is_bind_open="bind" not in given.run.model_fields_set).run()
    found = start if bind is None else replace(start, overrides=(*start.overrides, f"run.bind={bind}"))
    return found, tuple(faults)


def refuse(faults: Sequence[Fault]) -> None:
    """Print a table of what is wrong, and raise UserError, if anything is."""
    if not faults:
        return
    table = Table(title="Not ready", title_justify="left", show_lines=True)
    for title in ("host", "what is wrong", "what to do"):
        table.add_column(title, overflow="fold")
    for fault in faults:
        table.add_row(fault.host, fault.what, fault.remedy)
    announce(rendered(table))
    names = list(dict.fromkeys(fault.host for fault in faults))
    raise UserError(f"not ready: {', '.join(names)}; nothing was started")


class _Preflight:
    """The conversations with all hosts, and the faults found in them."""

    def __init__(self, config: ClusterConfig, *, is_bind_open: bool) -> None:
        assert isinstance(config.hosts, list), "only listed hosts can be asked"
        self._config = config
        self._is_bind_open = is_bind_open
        self._hosts = dict(enumerate(config.hosts))
        self._asked = {stage: host for stage, host in self._hosts.items() if host.is_started}
        self._faults: list[tuple[int, Fault]] = []

    def run(self) -> tuple[list[Fault], str | None]:
        """All faults in the order of hosts, and the address for `run.bind`."""
        spec = resolved_spec(self._config, None)
        kept = self._config.run.keep_checkpoints + 1  # the next is written before the oldest is removed
        with ExitStack() as stack, ThreadPoolExecutor(AT_ONCE) as pool:
            talks = {stage: stack.enter_context(closing(_Talk(host))) for stage, host in self._asked.items()}

            def ask(stages: Sequence[int]) -> Mapping[int, Mapping[str, Any] | None]:
                text = config_json(self._config)

                def first(stage: int) -> Mapping[str, Any] | None:
                    nbytes = kept * stage_estimate(self._config, spec, stage, device="cpu").snapshot
                    request = {"version": __version__, "config": text, "stage": stage, "checkpoint_nbytes": nbytes}
                    return talks[stage].ask(request)

                return dict(zip(stages, pool.map(first, stages), strict=True))

            replies = dict(ask([stage for stage, host in self._asked.items() if not host.local]))
            bind = self._bind({stage: reply for stage, reply in replies.items() if reply is not None})
            if bind is not None:
                self._config = _with_local_address(self._config, parse_address(bind, "run.bind")[0])
            replies |= ask([stage for stage, host in self._asked.items() if host.local])
            for stage, reply in replies.items():
                if reply is None:
                    self._add(stage, *ssh_fault(talks[stage].end(), self._asked[stage], stage))
                for what, remedy in reply["faults"] if reply is not None else ():
                    self._add(stage, what, remedy)
            answered = {stage: reply for stage, reply in replies.items() if reply is not None}
            targets = stack.enter_context(closing(_Targets(self._config, bind)))
            dials = {stage: self._dials(stage, answered, targets.coordinator) for stage in answered}
            second = pool.map(lambda stage: talks[stage].ask({"dial": dials[stage]}), dials)
            failures = {stage: (reply or {}).get("unreachable", {}) for stage, reply in zip(dials, second, strict=True)}
        self._note_unreachable(dials, failures, targets.trouble)
        return [fault for _, fault in sorted(self._faults, key=lambda pair: pair[0])], bind

    def _add(self, stage: int, what: str, remedy: str) -> None:
        name = "this machine" if self._hosts[stage].local else self._hosts[stage].address
        self._faults.append((stage, Fault(f"{name} (stage {stage})", what, remedy)))

    def _bind(self, answered: Mapping[int, Mapping[str, Any]]) -> str | None:
        """Where the coordinator listens, by how the hosts see this machine; a fault where that is not one address."""
        run = self._config.run
        seen = {stage: reply["seen_from"] for stage, reply in answered.items() if reply["seen_from"]}
        others = {stage: address for stage, address in seen.items() if not address.startswith(LOOPBACK)}
        if not self._is_bind_open or run.advertise is not None or not others:
            return None
        address = next(iter(others.values()))
        for stage, other in others.items():
            if other != address:
                self._add(stage, f"sees this machine as {other}, another host as {address}", _SET_BIND)
                return None
        if not is_local_address(address):
            stage = next(iter(others))
            self._add(stage, f"sees this machine as {address}, which is its router's address", _BEHIND_NAT)
            return None
        return unless_taken(format_address(address, run.base_port))

    def _dials(self, stage: int, answered: Mapping[int, Mapping[str, Any]], coordinator: str) -> dict[str, str]:
        """Name and address of all that a stage's worker may dial."""
        stages = self._config.pipeline.stages
        near = [other for other in (stage - 1, stage + 1) if other // stages == stage // stages]
        dialled = {f"stage {other}": answered[other]["dialled"] for other in near if other in answered}
        return {name: address for name, address in {"coordinator": coordinator, **dialled}.items() if address}

    def _note_unreachable(
        self, dials: Mapping[int, Mapping[str, str]], failures: Mapping[int, Mapping[str, str]], trouble: str
    ) -> None:
        """A link needs one end that can dial the other; the coordinator must be dialled."""
        if trouble:
            self._add(0, trouble, "end what listens there, or set run.bind or run.base_port to another port")
        for stage, unreachable in failures.items():
            for name, reason in unreachable.items():
                address = dials[stage][name]
                if name == "coordinator":
                    self._add(stage, f"cannot dial the coordinator at {address}: {reason}", _OPEN_COORDINATOR)
                    continue
                other = int(name.removeprefix("stage "))
                mine = f"stage {stage}"
                if mine in dials.get(other, {}) and mine not in failures[other]:
                    continue
                if other > stage or mine not in dials.get(other, {}):
                    self._add(
                        stage, f"cannot dial {name} at {address}: {reason}, nor the other way round", _OPEN_WORKER
                    )


def _with_local_address(config: ClusterConfig, address: str) -> ClusterConfig:
    """The configuration with the address at which the others see this machine, where an entry leaves it open."""
    assert isinstance(config.hosts, list), "only listed hosts have addresses"
    hosts = [
        host.model_copy(update={"address": address}) if host.local and "address" not in host.model_fields_set else host
        for host in config.hosts
    ]
    return config.model_copy(update={"hosts": hosts})


_SET_BIND: Final = "set run.bind to 0.0.0.0:PORT, and run.advertise to an address that all reach"
_BEHIND_NAT: Final = "forward a port to this machine and set run.bind and run.advertise to it, or join all by a VPN"
_OPEN_COORDINATOR: Final = "open this port in this machine's firewall (run.bind, run.base_port)"
_OPEN_WORKER: Final = "open this port in its firewall, or the other's port there (hosts.N.bind, run.base_port)"


class _Targets:
    """This machine listens as its coordinator will; `coordinator`: what hosts dial, "" if it could not listen."""

    def __init__(self, config: ClusterConfig, bind: str | None) -> None:
        self.coordinator = self.trouble = ""
        self._server: socket.socket | None = None
        text = bind or config.run.bind
        host, port = parse_address(text, "run.bind")
        try:
            self._server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            self.trouble = f"this machine cannot listen on run.bind {text}: {os.strerror(error.errno or 0)}"
            return
        self.coordinator = advertised_address(text, self._server.getsockname()[1], config.run.advertise)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class _Talk:
    """A conversation with `tahq check-host` on one host; `close` ends it."""

    def __init__(self, host: MachineConfig) -> None:
        self._env = dict(os.environ)
        self._argv: Sequence[str] = ssh_argv(host, ["check-host"])
        if host.local:
            self._env.pop("SSH_CONNECTION", None)  # the caller is this machine, even if its user sits elsewhere
            self._argv = (sys.executable, "-m", "tahq_launch.cli", "check-host")
        self._process: subprocess.Popen[str] | None = None
        self._timer: threading.Timer | None = None
        self._said: list[str] = []

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The reply; None if the host cannot be asked, or ended or hung before it replied."""
        if self._process is None:
            pipe = subprocess.PIPE
            try:
                self._process = subprocess.Popen(
                    self._argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=self._env
                )
            except OSError as error:
                raise UserError(f"cannot start ssh: {error.strerror}") from error
            self._timer = threading.Timer(TIMEOUT_S, self._process.kill)
            self._timer.start()
        assert self._process.stdin is not None, "a pipe was asked for"
        assert self._process.stdout is not None, "a pipe was asked for"
        with suppress(BrokenPipeError):  # its output says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                reply: Mapping[str, Any] = json.loads(line.removeprefix(MARK))
                return reply
            self._said.append(line.strip())
        return None

    def end(self) -> tuple[int, Sequence[str]]:
        """Exit status and all lines that were no reply, once the process has ended."""
        assert self._process is not None, "only asked after a failed request"
        return self._process.wait(), [line for line in self._said if line]

    def close(self) -> None:
        if self._timer is not None and self._process is not None:
            self._timer.cancel()
            self._process.kill()
            self._process.communicate()


def ssh_fault(end: tuple[int, Sequence[str]], host: MachineConfig, stage: int) -> tuple[str, str]:
    """What is wrong if `tahq check-host` ended with this status and these lines, and what to do."""
    status, lines = end
    if any(re.search("No module named '?tahq", line) for line in lines):
        wheel = f"tahq-{__version__}-py3-none-any.whl"
        install = f"ssh {host.ssh} {host.python} -m pip install {wheel}, or correct hosts.{stage}.python"
        return f"tahq is not installed for {host.python}", install
    for pattern, remedy in _remedies(host, stage):
        line = next((line for line in reversed(lines) if re.search(pattern, line)), "")
        if line:
            return line if status != 255 or line.startswith("ssh: ") else f"ssh: {line}", remedy
    if status < 0:
        return f"no answer in {TIMEOUT_S:.0f} s", f"try: ssh {host.ssh} true"
    last = lines[-1] if lines else "nothing was printed"
    return f"status {status}: {last}", f"try: ssh {host.ssh} {host.python} -m tahq_launch.cli --version"


def _remedies(host: MachineConfig, stage: int) -> Iterator[tuple[str, str]]:
    """What ssh, the shell and Python print there, and what to do about it."""
    key = f"hosts.{stage}"
    yield (
        "Permission denied \\(|Too many authentication",
        f"ssh-copy-id {host.ssh}, or correct {key}.ssh, the user in it",
    )
    yield "Host key verification failed", f"ssh {host.ssh} once by hand, and accept its key"
    yield "Could not resolve", f"correct the name in {key}.ssh, or use the IP address"
    yield "Connection refused", f'start sshd there, or give its port: {key}.ssh_options: ["-p", "2222"]'
    yield "timed out|No route to host|unreachable", "switch it on, or open port 22 in its firewall"
    yield "No module named", f"install tahq there with its requirements, or correct {key}.python"
    yield "cd: ", f"ssh {host.ssh} mkdir -p {host.workdir}, or correct {key}.workdir"
    yield "not found|No such file", f"install Python there, or correct {key}.python"
