"""`tahq doctor`: checks this machine, and with a cluster.yaml all its hosts at once, in depth."""

import json
import os
import shutil
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.table import Table

from tahq import __version__
from tahq.comm.config import MachineConfig
from tahq.comm.keys import default_key_path
from tahq.comm.zmq.addresses import LOOPBACK
from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config, placed_errors
from tahq.config.stage_estimate import stage_estimate
from tahq.errors import UserError
from tahq.memory.free_memory import free_bytes
from tahq.worker.assembly import resolved_spec
from tahq_launch.command_line import announce, rendered
from tahq_launch.doctor.fix import Fixer
from tahq_launch.plan.numbers import stage_device
from tahq_launch.start.host_check import stage_checks
from tahq_launch.start.local_checks import check_reachable
from tahq_launch.start.machine_checks import ANYWHERE, Finding, fault, key_file, machine_checks, room, warning
from tahq_launch.start.preflight import ask_hosts, fault_table, has_ssh, memory_finding
from tahq_launch.start.resolution import resolve_for_run


def doctor(config_path: Path | None, overrides: Sequence[str], *, fixes: bool, copies: bool, prints_json: bool) -> int:
    """Check, with `fixes` repair what can be repaired and check again, and print all that was found.

    Args:
        config_path: the cluster.yaml; None: only this machine.
        overrides: changes of its keys.
        fixes: whether to repair.
        copies: whether repairing includes copying a missing model or missing data.
        prints_json: whether to print one JSON object in place of tables.

    Returns:
        The exit status: 2 if anything keeps a run from starting, else 0.
    """
    findings = _findings(config_path, overrides)
    if fixes:
        say = announce if not prints_json else lambda line: None
        fixer = Fixer(None if config_path is None else load_config(config_path, overrides), copies=copies, say=say)
        while fixer.fix(findings):
            say("checking again")
            findings = [*_findings(config_path, [*overrides, *fixer.overrides]), *fixer.left]
    if prints_json:
        print(json.dumps({"version": __version__, "findings": [asdict(finding) for finding in findings]}))
    else:
        _print(findings)
    return 2 if any(finding.level == "fault" for finding in findings) else 0


def _print(findings: Sequence[Finding]) -> None:
    table = Table(title="Checked", title_justify="left")
    for column in ("host", "check", "found", "wanted", ""):
        table.add_column(column, overflow="fold")
    names = [finding.host for finding in findings]
    for index, each in enumerate(findings):
        is_first = index == 0 or names[index - 1] != each.host
        mark = {"fine": "ok", "warning": "warning", "fault": "FAULT"}[each.level]
        found = each.found if each.level == "fine" else "see below"
        table.add_row(each.host if is_first else "", each.check, found, each.wanted, mark)
    announce(rendered(table))
    counts = []
    for level, title in (("fault", "Faults"), ("warning", "Warnings")):
        listed = [each for each in findings if each.level == level]
        counts.append(f"{len(listed)} {level}{'s' * (len(listed) != 1)}")
        if listed:
            announce(fault_table(listed, title))
    announce(", ".join(counts))


def _findings(config_path: Path | None, overrides: Sequence[str]) -> list[Finding]:
    if config_path is None:
        key = default_key_path()
        keys = [key_file(key, is_needed=True)] if key.exists() else []
        return [*machine_checks(), *room(), _ssh(is_needed=False), *keys]
    with placed_errors(config_path, overrides):
        given = load_config(config_path, overrides)
        found = [] if not has_ssh(given) else ask_hosts(given, is_deep=True)[0]
        return [*_of_this_machine(given), *found]


def _of_this_machine(given: ClusterConfig) -> Iterator[Finding]:
    """The machine that coordinates, and the stages that run on it."""
    config = resolve_for_run(given)
    yield from machine_checks(config.run.device if isinstance(config.hosts, str) else "cpu", _first_host(config))
    if has_ssh(given):
        yield _ssh(is_needed=True)
    yield from _keys(config)
    yield from _local_stages(config)
    if not has_ssh(given):  # else it follows from how the hosts see this machine
        try:
            check_reachable(config)
        except UserError as error:
            yield fault("coordinator", str(error), "set run.bind as it says")
    if isinstance(config.hosts, list):
        for stage, host in enumerate(config.hosts):
            if not host.is_started and not host.address.startswith(LOOPBACK):
                what, remedy = "started by hand, so it was not asked", "tahq doctor, on that host"
                label = f"{host.address} (stage {stage})"
                yield replace(warning("ssh", what, remedy), host=label, stage=stage)


def _first_host(config: ClusterConfig) -> str:
    """The IP address of a host on another machine, as this machine knows it; without one, any."""
    hosts = [] if isinstance(config.hosts, str) else config.hosts
    for host in hosts:
        with suppress(OSError):  # its name is unknown here; ssh says so, too
            return str(socket.getaddrinfo(host.address, None)[0][4][0])
    return ANYWHERE


def _local_stages(config: ClusterConfig) -> Iterator[Finding]:
    """What the stages on this machine need; those that miss the same are named once."""
    hosts = config.hosts
    here = [
        stage
        for stage in range(config.pipeline.num_workers)
        if isinstance(hosts, str) or _is_here(hosts[stage], was_asked=has_ssh(config))
    ]
    if not here:
        return
    spec, kept = resolved_spec(config, None), config.run.keep_checkpoints + 1 + config.keeps_best
    nbytes = kept * sum(stage_estimate(config, spec, stage, device="cpu").snapshot for stage in here)
    found = [finding for stage in here for finding in stage_checks(config, stage, nbytes)]
    yield from dict.fromkeys(found)
    if any(finding.check == "device" for finding in found):
        return
    on_devices = defaultdict[torch.device, list[int]](list)
    for stage in here:
        on_devices[stage_device(config, stage)].append(stage)
    for device, stages in on_devices.items():
        yield memory_finding(config, stages, device.type, free_bytes(device))


def _is_here(host: MachineConfig, *, was_asked: bool) -> bool:
    """Whether a stage is on this machine, and was not asked with the hosts that ssh reaches."""
    return not was_asked if host.local else host.ssh is None and host.address.startswith(LOOPBACK)


def _keys(config: ClusterConfig) -> Iterator[Finding]:
    security = config.security
    if not security.curve:
        return
    own = security.key is not None
    path = Path(security.key).expanduser() if security.key is not None else default_key_path()
    if own or path.exists():
        yield key_file(path, is_needed=True)
    try:
        security.allowed_keys()
    except UserError as error:
        yield fault("key", str(error), "tahq keygen --show, on the worker's machine, prints its public key")


def _ssh(*, is_needed: bool) -> Finding:
    path = shutil.which("ssh")
    if path is not None:
        agent = "with an agent" if os.environ.get("SSH_AUTH_SOCK") else "no agent"
        return Finding(check="ssh", found=f"{path}, {agent}")
    make = fault if is_needed else warning
    return make("ssh", "there is no ssh client", "sudo apt-get install openssh-client", wanted="OpenSSH")
