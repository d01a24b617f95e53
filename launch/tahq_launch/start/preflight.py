"""Before anything is started over ssh: all hosts at once, and all that is wrong with them in one table.

Each host, this machine too if it is one, runs `tahq check-host` (`host_check`), looks for what its worker will need,
listens where the worker will listen, and dials the coordinator, the relay and its neighbours. `tahq doctor` asks for
more, which takes longer. Hosts whose workers are started by hand are not asked.
"""

import os
import random
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from rich.table import Table

from tahq import __version__
from tahq.comm.config import MachineConfig
from tahq.comm.zmq.addresses import LOOPBACK, advertised_address, format_address, parse_address, unless_taken
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_json, load_config
from tahq.config.stage_estimate import memory_savings, stage_estimate
from tahq.errors import UserError
from tahq.observe.figures import duration
from tahq.units import format_rate, format_size
from tahq.version import is_same_source
from tahq.worker.assembly import resolved_spec
from tahq.worker.links import is_local_address
from tahq_launch.command_line import announce, rendered
from tahq_launch.plan.step_traffic import relayed_nbytes, step_flows
from tahq_launch.start.host_check import ssh_words
from tahq_launch.start.host_talk import HostTalk, install_command
from tahq_launch.start.local_checks import is_end
from tahq_launch.start.machine_checks import Finding, fault, warning
from tahq_launch.start.prepared_run import StartRequest
from tahq_launch.start.resolution import resolve_for_run

AT_ONCE: Final = 8
"""Connections at a time; sshd refuses some of more than ten that have not logged in yet."""
WRONG_CLOCK_S: Final = 60.0
"""Clocks that differ more would mix up the order of logs and of checkpoints, and the age of measurements."""
OFF_CLOCK_S: Final = 1.0


def reachable_start(start: StartRequest) -> tuple[StartRequest, tuple[Finding, ...]]:
    """The start, with `run.bind` as the hosts reach this machine if it is open, and all faults of the hosts.

    Unchanged, with nothing found, if no worker is started over ssh.
    """
    given = load_config(start.config_path, start.all_overrides)
    if not has_ssh(given):
        return start, ()
    findings, bind = ask_hosts(given)
    found = replace(start, seen_at=bind)
    if any(finding.check == "data" and finding.level == "warning" for finding in findings):
        announce("the hosts keep their order, since some in the middle do not have the data")
        found = replace(found, keeps_order=True)
    for finding in findings:
        if finding.check == "link" and finding.level == "warning":
            announce(finding.found)
    return found, tuple(finding for finding in findings if finding.level == "fault")


def has_ssh(config: ClusterConfig) -> bool:
    """Whether any worker is started over ssh."""
    return isinstance(config.hosts, list) and any(host.ssh is not None for host in config.hosts)


def ask_hosts(given: ClusterConfig, *, is_deep: bool = False) -> tuple[list[Finding], str | None]:
    """What is found on the hosts that ssh reaches, by stage; and the address for `run.bind`, None: it stays.

    UserError: a mistake in the configuration.
    """
    preflight = _Preflight(given, is_deep=is_deep)
    bind = preflight.run()
    return sorted(preflight.findings, key=lambda finding: finding.stage or 0), bind


def refuse(faults: Sequence[Finding]) -> None:
    """Print a table of what is wrong, and raise UserError, if anything is."""
    if not faults:
        return
    announce(fault_table(faults, "Not ready"))
    names = list(dict.fromkeys(each.host for each in faults))
    raise UserError(f"not ready: {', '.join(names)}; nothing was started")


def fault_table(faults: Iterable[Finding], title: str) -> str:
    """What is wrong, and what to do about it."""
    table = Table(title=title, title_justify="left", show_lines=True)
    for column in ("host", "what is wrong", "what to do"):
        table.add_column(column, overflow="fold")
    for each in faults:
        table.add_row(each.host, each.found, each.remedy)
    return rendered(table)


class _Preflight:
    """The conversations with all hosts, and what is found in them."""

    def __init__(self, given: ClusterConfig, *, is_deep: bool) -> None:
        assert isinstance(given.hosts, list), "only listed hosts can be asked"
        self._given = self._config = given
        self._is_deep = is_deep
        self._hosts = dict(enumerate(given.hosts))
        self._talks = {stage: HostTalk(host) for stage, host in self._hosts.items() if host.is_started}
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self.findings: list[Finding] = []

    def run(self) -> str | None:
        """Ask everything; returns the address for `run.bind`."""
        with self._pool, ExitStack() as stack:
            for talk in self._talks.values():
                stack.enter_context(closing(talk))
            stack.callback(self._pool.shutdown, wait=False, cancel_futures=True)  # after an error, ask no more
            # the hosts import torch while this machine imports what the next request needs
            versions = self._pool.map(lambda talk: talk.ask("version", __version__), self._talks.values())
            self._config = resolve_for_run(self._given)
            answered = dict(zip(self._talks, versions, strict=True))
            seen = {stage: reply["seen_from"] for stage, reply in answered.items() if self._is_known(stage, reply)}
            bind = self._bind({stage: address for stage, address in seen.items() if not self._hosts[stage].local})
            if bind is not None:
                self._config = _with_local_address(self._config, parse_address(bind, "run.bind")[0])
            replies = self._checked_stages(list(seen))
            targets = stack.enter_context(closing(_Targets(self._config, bind)))
            if targets.trouble:
                self._add(None, fault("coordinator", targets.trouble, _TAKEN_BIND))
            dialled = {stage: str(reply["dialled"]) for stage, reply in replies.items()}
            ends = self._dial(dialled, targets)
            if self._is_deep:
                self._compare_clocks(list(replies))
                self._measure(ends, dialled)
        return bind

    def _add(self, stage: int | None, finding: Finding) -> None:
        host = "this machine"
        if stage is not None:
            host = f"{host if self._hosts[stage].local else self._hosts[stage].address} (stage {stage})"
        self.findings.append(replace(finding, host=host, stage=stage))

    def _ask(self, kind: str, requests: Mapping[int, Any]) -> dict[int, Mapping[str, Any]]:
        """The replies of the hosts that gave one; a fault for each other."""
        replies = self._pool.map(lambda stage: self._talks[stage].ask(kind, requests[stage]), requests)
        answered = dict(zip(requests, replies, strict=True))
        for stage in [stage for stage, reply in answered.items() if reply is None]:
            self._add(stage, self._talks[stage].failure(stage))
        return {stage: reply for stage, reply in answered.items() if reply is not None}

    def _is_known(self, stage: int, reply: Mapping[str, Any] | None) -> bool:
        """Whether a host runs this version of tahq, and can be asked more."""
        if reply is None:
            self._add(stage, self._talks[stage].failure(stage))
            return False
        version = reply.get("version")
        if version is not None and is_same_source(version, __version__):
            return True
        found = f"tahq {version or 'of another version'} is installed there, {__version__} here"
        self._add(stage, fault("tahq", found, install_command(self._hosts[stage]), wanted=__version__, fix="install"))
        return False

    def _checked_stages(self, stages: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        config, run = self._config, random.getrandbits(63)
        spec = resolved_spec(config, None)
        kept = config.run.keep_checkpoints + 1  # the next is written before the oldest is removed
        may_reorder = self._given.pipeline.is_open and config.pipeline.replicas == 1 and len(self._talks) > 2
        common = {"config": config_json(config), "run": run, "is_deep": self._is_deep, "any_is_end": may_reorder}
        sizes = {stage: stage_estimate(config, spec, stage, device="cpu").snapshot for stage in stages}
        replies = self._ask(
            "stage", {n: {**common, "stage": n, "checkpoint_nbytes": kept * size} for n, size in sizes.items()}
        )
        for stage, reply in replies.items():
            for values in reply["findings"]:
                self._add(stage, self._judged(stage, Finding(**values)))
            if reply["device"]:
                self._add(stage, memory_finding(config, [stage], reply["device"], reply["free_nbytes"]))
        return replies

    def _judged(self, stage: int, finding: Finding) -> Finding:
        """Data that is missing where the plan alone could put an end of the pipeline is no fault: the order stays."""
        if finding.check == "data" and finding.level == "fault" and not is_end(self._config, stage):
            return replace(finding, level="warning", wanted="only if the plan may reorder the hosts")
        return finding

    def _bind(self, seen: Mapping[int, str]) -> str | None:
        """Where the coordinator listens, by how the hosts see this machine; a fault where that is not one address."""
        run = self._config.run
        others = {stage: address for stage, address in seen.items() if address and not address.startswith(LOOPBACK)}
        if "bind" in self._given.run.model_fields_set or run.advertise is not None or not others:
            return None
        address = next(iter(others.values()))
        for stage, other in others.items():
            if other != address:
                what = f"sees this machine as {other}, another host as {address}"
                self._add(stage, fault("coordinator", what, _SET_BIND))
                return None
        if not is_local_address(address):
            stage = next(iter(others))
            what = f"sees this machine as {address}, which is its router's address"
            self._add(stage, fault("coordinator", what, _BEHIND_NAT))
            return None
        return unless_taken(format_address(address, run.base_port))

    def _dial(self, dialled: Mapping[int, str], targets: "_Targets") -> list[tuple[int, int]]:
        """Who can dial whom; returns the ends of each direct link, the one that dials first."""
        coordinator = targets.coordinator
        links = [(ends.lower, ends.upper) for ends in self._config.grid.links()]
        links = [pair for pair in dict.fromkeys(links) if pair[0] in dialled and pair[1] in dialled]
        own = {"coordinator": coordinator, _RELAY: targets.relay}
        dials = {stage: {name: address for name, address in own.items() if address} for stage in dialled}
        for stage, other in chain(links, ((upper, lower) for lower, upper in links)):
            if dialled[other]:
                dials[stage][f"stage {other}"] = dialled[other]
        replies = self._ask("dial", dials)
        failures = {stage: reply["unreachable"] for stage, reply in replies.items()}
        for stage, unreachable in failures.items():
            if "coordinator" in unreachable:
                what = f"cannot dial the coordinator at {coordinator}: {unreachable['coordinator']}"
                self._add(
                    stage,
                    fault("coordinator", what, f"{_open_port(coordinator)} on this machine (run.bind, run.base_port)"),
                )
            elif coordinator:
                self._add(stage, Finding(check="coordinator", found=f"dials {coordinator}"))
        links = [pair for pair in links if pair[0] in failures and pair[1] in failures]
        return [ends for pair in links if (ends := self._joined(pair, dialled, dials, failures, targets)) is not None]

    def _joined(
        self,
        pair: tuple[int, int],
        dialled: Mapping[int, str],
        dials: Mapping[int, Mapping[str, str]],
        failures: Mapping[int, Mapping[str, str]],
        targets: "_Targets",
    ) -> tuple[int, int] | None:
        """The end of a link that dials, and the other; None: it is relayed, or cannot be made.

        The upper end dials, or else the lower one.
        """
        lower, upper = pair
        for near, far in ((upper, lower), (lower, upper)):
            if f"stage {far}" in dials[near] and f"stage {far}" not in failures[near]:
                self._add(near, Finding(check="link", found=f"dials stage {far} at {dialled[far]}"))
                return near, far
        why = "; ".join(_why_not(near, far, dials[near], failures[near]) for near, far in ((upper, lower), pair))
        far = lower if dialled[lower] else upper
        remedy = "open a port of one"
        if dialled[far]:
            remedy = f"{_open_port(dialled[far])} on {self._hosts[far].address}, or correct hosts.{far}.address"
        remedy += ", or forward a port to it (hosts.N.advertise)"
        if self._config.run.relay == "never":
            self._add(upper, fault("link", why, remedy))
        elif targets.relay_trouble:
            self._add(upper, fault("link", f"{why}; and {targets.relay_trouble}", "set run.relay to another port"))
        elif blocked := [stage for stage in pair if _RELAY in failures[stage]]:
            for stage in blocked:
                what = f"{why}; and it cannot dial the relay at {targets.relay}: {failures[stage][_RELAY]}"
                open_relay = f"{_open_port(targets.relay)} on this machine (run.relay); or {remedy}"
                self._add(stage, fault("link", what, open_relay))
        elif targets.relay:
            flows = step_flows(self._config, resolved_spec(self._config, None))
            relayed = (
                f"this machine relays the link between stage {lower} and stage {upper}, "
                f"{format_size(relayed_nbytes(flows, [pair]))} per step, which it receives and sends: {why}"
            )
            self._add(upper, warning("link", relayed, remedy))
        return None

    def _compare_clocks(self, stages: Sequence[int]) -> None:
        before_s: dict[int, tuple[float, float]] = {}

        def ask(stage: int) -> Mapping[str, Any] | None:
            sent_s = time.time()
            reply = self._talks[stage].ask("clock", None)
            before_s[stage] = sent_s, time.time()
            return reply

        for stage, reply in zip(stages, self._pool.map(ask, stages), strict=True):
            if reply is None:
                self._add(stage, self._talks[stage].failure(stage))
                continue
            sent_s, back_s = before_s[stage]
            self._add(
                stage, _clock_finding(reply["now_s"] - (sent_s + back_s) / 2, (back_s - sent_s) / 2, self._hosts[stage])
            )

    def _measure(self, links: Sequence[tuple[int, int]], dialled: Mapping[int, str]) -> None:
        """Rate and round trip of each link, at the same time only of links without a common machine."""
        left = list(links)
        while left:
            busy, now = set[str](), list[tuple[int, int]]()
            for pair in left:
                machines = {self._hosts[stage].address for stage in pair}
                if busy.isdisjoint(machines):
                    busy |= machines
                    now.append(pair)
            left = [pair for pair in left if pair not in now]
            replies = self._ask("measure", {near: (far, dialled[far]) for near, far in now})
            for near, far in now:
                if near in replies:
                    self._add(near, _path_finding(far, replies[near]))


def _with_local_address(config: ClusterConfig, address: str) -> ClusterConfig:
    """The configuration with the address at which the others see this machine, where an entry leaves it open."""
    assert isinstance(config.hosts, list), "only listed hosts have addresses"
    hosts = [
        host.model_copy(update={"address": address}) if host.local and "address" not in host.model_fields_set else host
        for host in config.hosts
    ]
    return config.model_copy(update={"hosts": hosts})


def memory_finding(config: ClusterConfig, stages: Sequence[int], device: str, free_nbytes: int) -> Finding:
    """Free memory of a device, cpu or cuda, against the estimate of --dry-run for the stages on it.

    On a CPU what is offloaded is in the same memory.
    """
    spec, needed = resolved_spec(config, None), 0
    for stage in stages:
        memory = stage_estimate(config, spec, stage, device=device)
        needed += memory.total + (device == "cpu") * memory.host_total
    found, wanted = f"{format_size(free_nbytes)} free on {device}", f"{format_size(needed)} (--dry-run)"
    if not free_nbytes or needed <= free_nbytes:
        return Finding(check="memory", found=found, wanted=wanted)
    savings = memory_savings(config, spec, stages[0], device=device)
    remedy = f"set {savings[0][0]}" if savings else "add a host"
    found = f"the estimate is {format_size(needed)} of {device} memory, {format_size(free_nbytes)} are free"
    return fault("memory", found, f"ps aux --sort=-rss | head, and end what is not needed; or {remedy}", wanted=wanted)


def _clock_finding(off_s: float, uncertain_s: float, host: MachineConfig) -> Finding:
    size_s = abs(off_s) - uncertain_s
    wanted = f"within {OFF_CLOCK_S:g} s of this machine"
    if size_s <= OFF_CLOCK_S:
        return Finding(check="clock difference", found=f"{off_s:+.3f} s, ± {uncertain_s:.3f} s", wanted=wanted)
    what = f"the clock is {duration(round(size_s))} {'ahead' if off_s > 0 else 'behind'}"
    remedy = f"{ssh_words(host)} sudo timedatectl set-ntp true"
    return (fault if size_s > WRONG_CLOCK_S else warning)("clock difference", what, remedy, wanted=wanted)


def _path_finding(far: int, reply: Mapping[str, Any]) -> Finding:
    if "failure" in reply:
        what = f"no stream to stage {far} gets through: {reply['failure']}"
        return fault("rate", what, "ping -M do -s 1372 there: if that fails, lower the MTU (ip link set DEV mtu 1280)")
    sent, received = format_rate(reply["sent"]), format_rate(reply["received"])
    trip = f"{1000 * reply['round_trip_s']:.3g} ms"
    return Finding(check="rate", found=f"{sent} to stage {far}, {received} back, round trip {trip}")


def _open_port(address: str) -> str:
    return f"sudo ufw allow {address.rpartition(':')[2]}/tcp"


_SET_BIND: Final = "set run.bind to 0.0.0.0:PORT, and run.advertise to an address that all reach"
_BEHIND_NAT: Final = "forward a port to this machine and set run.bind and run.advertise to it, or join all by a VPN"
_TAKEN_BIND: Final = "end what listens there (ss -ltnp), or set run.bind or run.base_port to another port"


_RELAY: Final = "relay"


def _why_not(stage: int, other: int, dials: Mapping[str, str], failures: Mapping[str, str]) -> str:
    name = f"stage {other}"
    if name not in dials:
        return f"{name} only dials out"
    return f"stage {stage} cannot dial {name} at {dials[name]}: {failures[name]}"


class _Targets:
    """This machine listens as its coordinator and its relay will; what hosts dial, "" if it could not listen."""

    def __init__(self, config: ClusterConfig, bind: str | None) -> None:
        self.coordinator = self.trouble = self.relay = self.relay_trouble = ""
        self._servers: list[socket.socket] = []
        text = bind or config.run.bind
        host, port = parse_address(text, "run.bind")
        try:
            port = self._listen(host, port)
        except OSError as error:
            self.trouble = f"this machine cannot listen on run.bind {text}: {os.strerror(error.errno or 0)}"
            return
        self.coordinator = advertised_address(text, port, config.run.advertise)
        if config.run.relay == "never":
            return
        wanted = port - 1 if config.run.relay == "auto" else config.run.relay
        try:
            relay_port = self._listen(host, wanted)
        except OSError as error:
            self.relay_trouble = (
                f"this machine cannot listen on the relay's port {wanted}: {os.strerror(error.errno or 0)}"
            )
            return
        self.relay = format_address(parse_address(self.coordinator, "run.advertise")[0], relay_port)

    def _listen(self, host: str, port: int) -> int:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._servers.append(socket.create_server((host, port), family=family))
        return int(self._servers[-1].getsockname()[1])

    def close(self) -> None:
        for server in self._servers:
            server.close()
