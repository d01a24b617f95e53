"""`hosts: {invited: 3}`: wait until so many machines are there, then continue as with a list of hosts.

Machines that have joined wait, as spares do, in one connection each. Once enough are there, the configuration gets a
`hosts` entry for each of them, with the key that it has proved to have; then all of them are told to join again, for
the measurement or the run.
"""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tahq import __version__
from tahq.comm.control.members import Admission, Member, Members, other_version
from tahq.comm.control.messages import Abort, Failed, Heartbeat, Join, Message, Refuse, StandBy, StartOver, Welcome
from tahq.comm.control.server import ControlServer
from tahq.comm.zmq.addresses import format_address
from tahq.comm.zmq.sockets import raise_descriptor_limit
from tahq.config.cluster import ClusterConfig
from tahq.config.file import invited_hosts, load_config
from tahq.errors import InterruptedRunError, UserError
from tahq.units import WRITTEN_BY_HAND
from tahq_launch.command_line import announce
from tahq_launch.joining.invitation import Invitation, address_of, make_invites, reach_warning
from tahq_launch.start.local_checks import files_needed
from tahq_launch.start.prepared_run import StartRequest
from tahq_launch.start.run_folder import RunFolder, members_of
from tahq_launch.start.run_keys import make_run_keys

LIFETIME_S: Final = 24 * 3600.0
"""How long an invite can be used, unless the inviter says otherwise."""
_POLL_S: Final = 0.1


def with_joined(start: StartRequest) -> StartRequest:
    """The start with the machines that have joined in place of `hosts: {invited: N}`, once N are there.

    Unchanged if the file names its hosts. A resumed run has the machines that it had.
    """
    count = invited_hosts(start.config_path, start.all_overrides)
    if not count:
        return start
    config = configured_for_invites(start.config_path, start.all_overrides)
    start = replace(start, joined=(f"run.bind={config.run.bind}",))
    folder = RunFolder(Path(config.run.dir) / config.run.name)
    folder.check_startable(resume=start.resume)
    if start.resume:
        return replace(start, joined=(*start.joined, f"hosts={json.dumps(_kept_entries(folder.config))}"))
    there = _gathered(config, members_of(start.config_path), count)
    entries = [{"address": member.address, "public_key": member.key} for member in there]
    return replace(start, joined=(*start.joined, f"hosts={json.dumps(entries)}"))


def configured_for_invites(path: Path, overrides: Sequence[str]) -> ClusterConfig:
    """The configuration; its coordinator listens on all addresses if it leaves that open and has invited hosts."""
    config = load_config(path, overrides)
    if "bind" in config.run.model_fields_set or not invited_hosts(path, overrides):
        return config
    return load_config(path, (*overrides, f"run.bind=0.0.0.0:{config.run.base_port}"))


def _kept_entries(path: Path) -> list[dict[str, object]]:
    hosts = load_config(path).hosts
    if isinstance(hosts, str):
        raise UserError(f"--resume: the hosts of {path} are {hosts}, but this file waits for invited machines")
    return [host.model_dump(mode="json", context=WRITTEN_BY_HAND, exclude_defaults=True) for host in hosts]


def print_invites(invites: list[Invitation], lifetime_s: float) -> None:
    """The commands to hand out, and notes on their address."""
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time.time() + lifetime_s))
    several = len(invites) > 1
    announce(
        f"{len(invites)} invite{'s' * several} to {invites[0].address}, usable until {until}; give each to one machine "
        "only, over a channel that others cannot read:"
    )
    for invite in invites:
        announce(f"  tahq join {invite.text}")
    if note := reach_warning(invites[0].address):
        announce(note)


def _gathered(config: ClusterConfig, members: Members, count: int) -> list[Member]:
    """Print the invites that are lacking, and wait for the machines; the members of which each is there."""
    keys = make_run_keys(config, starts_workers=False)
    lacking = count - len(members.all) - members.num_open
    if lacking > 0:
        print_invites(make_invites(config, members, lacking, LIFETIME_S), LIFETIME_S)
    else:
        known = f"{len(members.all)} machines are members, and {members.num_open} invites made earlier are open"
        announce(f"{known}; `tahq invite` makes more")
    raise_descriptor_limit()
    run = config.run
    server = ControlServer(
        run.bind, heartbeat_s=run.peer_timeout / 5, keys=keys.coordinator if keys is not None else None
    )
    waiting = _Waiting(config, members, server, count)
    with closing(server):
        announce(f"waiting for {count} invited machines at {address_of(config)}; Ctrl-C ends it")
        try:
            while len(waiting.there) < count:
                waiting.turn()
        except BaseException:
            waiting.tell_all(Abort("the inviter has stopped before the run began", InterruptedRunError.exit_status))
            raise
        waiting.tell_all(StartOver("all invited machines are there"))
    return list(waiting.there)[:count]


@dataclass(slots=True)
class _Present:
    """A machine that waits: its connection, and when it was last heard."""

    identity: bytes
    last_seen_s: float


class _Waiting:
    """The machines that are there, in the order in which they came."""

    def __init__(self, config: ClusterConfig, members: Members, server: ControlServer, count: int) -> None:
        self.there: dict[Member, _Present] = {}
        self._run, self._members, self._server, self._count = config.run, members, server, count
        self._admission = Admission(members, server, Welcome(files_needed(config)), announce)

    def turn(self) -> None:
        """Handle what has come; waits a moment for it."""
        self._admission.look()
        for identity, message in self._server.poll(_POLL_S):
            if not self._admission.takes(identity, message):
                self._take(identity, message)
        for line in self._server.take_refused():
            announce(line)
        silent_since_s = time.monotonic() - self._run.peer_timeout
        for member in [each for each, present in self.there.items() if present.last_seen_s < silent_since_s]:
            self._forget(member, "is silent")

    def tell_all(self, message: Message) -> None:
        """Send a message to all that are there; they go away after it."""
        for present in self.there.values():
            self._server.send(present.identity, message)

    def _take(self, identity: bytes, message: Message) -> None:
        key = self._server.public_key(identity)
        member = self._members.all.get(key) if isinstance(message, Join) else None
        found = next((each for each, present in self.there.items() if present.identity == identity), None)
        if isinstance(message, Join):
            self._join(identity, message, member)
        elif found is not None and isinstance(message, Failed):
            self._forget(found, f"has left: {message.message}")
        elif found is not None and isinstance(message, Heartbeat):
            self.there[found].last_seen_s = time.monotonic()

    def _join(self, identity: bytes, join: Join, member: Member | None) -> None:
        if member is None or not member.address:
            self._server.send(identity, Refuse("this run waits for invited machines; use `tahq join INVITE`"))
            return
        if refusal := other_version(__version__, join):
            self._server.send(identity, refusal)
            return
        self._server.send(identity, StandBy(self._run.peer_timeout, self._run.give_up))
        is_new = member not in self.there
        self.there[member] = _Present(identity, time.monotonic())
        if is_new:
            announce(f"{self._name(member)} is there: {len(self.there)} of {self._count}")

    def _forget(self, member: Member, why: str) -> None:
        del self.there[member]
        announce(f"{self._name(member)} {why}: {len(self.there)} of {self._count}")

    def _name(self, member: Member) -> str:
        return f"{member.host} ({format_address(member.address, 0).removesuffix(':0')})"
