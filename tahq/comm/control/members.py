"""Members: machines whose own keys may join, and invites with which more of them become members.

An invite is a one-time key pair. Its secret half goes to the invited person and is stored nowhere; the file has the
public half, by which the gate admits the connection. Over that connection the machine may only have its own key
admitted (`Redeem`), once. Everything is in one SQLite file, so several programs may change it, and each change is
atomic and survives them.
"""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path

from pydantic import ValidationError

from tahq import __version__
from tahq.comm.config import MachineConfig
from tahq.comm.control.messages import Heartbeat, Join, Message, Redeem, Refuse, Welcome
from tahq.comm.control.server import ControlServer
from tahq.comm.keys import parse_public_key
from tahq.comm.zmq.monitor import RateLimitedLog
from tahq.errors import UserError, brief
from tahq.version import git_revision, is_same_source

LOOK_EVERY_S = 0.5
"""How often a coordinator looks whether the file has changed."""
_BUSY_S = 1.0
"""How long a change waits for another program's; a coordinator's heartbeats wait as well."""
MAX_NAME_LENGTH = 255
"""Of a host, as POSIX bounds it."""
_SHORT = 12
"""Digits of a key in messages."""
_TABLES = """
CREATE TABLE IF NOT EXISTS invites (key TEXT PRIMARY KEY, expires_s REAL NOT NULL, used_by TEXT) STRICT;
CREATE TABLE IF NOT EXISTS members (key TEXT PRIMARY KEY, host TEXT NOT NULL, address TEXT NOT NULL) STRICT;
"""
_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """A machine that may join: its public key, its name, and where neighbours reach it ("" if admitted by hand)."""

    key: str
    host: str = ""
    address: str = ""


class Members:
    """The invites and members in one file, which is made by the first change; any thread and process may use it."""

    def __init__(self, path: Path, wall_clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._wall_clock = wall_clock

    @property
    def stamp(self) -> tuple[int, ...]:
        """Differs after every change; empty: there is no file."""
        try:
            found = self.path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def invite(self, key: str, lifetime_s: float) -> None:
        """Note an invite by its public key."""
        with self._changing() as database:
            database.execute("INSERT INTO invites VALUES (?, ?, NULL)", (key, self._wall_clock() + lifetime_s))

    def allow(self, key: str) -> bool:
        """Make the owner of a public key a member; whether it was none."""
        with self._changing() as database:
            return database.execute("INSERT OR IGNORE INTO members VALUES (?, '', '')", (key,)).rowcount > 0

    @property
    def invites(self) -> frozenset[str]:
        """The keys of all invites, used and expired ones too."""
        return frozenset(row[0] for row in self._rows("SELECT key FROM invites"))

    @property
    def num_open(self) -> int:
        """Invites that can still be used."""
        query = "SELECT count(*) FROM invites WHERE used_by IS NULL AND expires_s > ?"
        return next((int(row[0]) for row in self._rows(query, self._wall_clock())), 0)

    @property
    def all(self) -> dict[str, Member]:
        """The members, by key, in the order in which they were admitted."""
        return {row[0]: Member(*row) for row in self._rows("SELECT key, host, address FROM members ORDER BY rowid")}

    def redeem(self, invite: str, member: Member) -> str:
        """Use an invite to make this machine a member; returns why that is refused, or "".

        The same machine may repeat it, also after the invite has expired: the answer may have been lost.
        """
        with self._changing() as database:
            row = database.execute("SELECT expires_s, used_by FROM invites WHERE key = ?", (invite,)).fetchone()
            if row is None:
                return "the coordinator does not know this invite"
            expires_s, used_by = row
            if used_by is None and expires_s <= self._wall_clock():
                when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires_s))
                return f"this invite expired on {when}; ask for another"
            if used_by not in (None, member.key):
                return f"this invite was used by another machine, with the key {used_by[:_SHORT]}…; ask for another"
            known = database.execute("SELECT used_by FROM invites WHERE used_by = ?", (member.key,)).fetchone()
            if used_by is None and known is not None:
                return (
                    f"the key {member.key[:_SHORT]}… has joined with another invite; several workers on one machine "
                    "need a key each (--key)"
                )
            database.execute("UPDATE invites SET used_by = ? WHERE key = ?", (member.key, invite))
            database.execute(
                "INSERT OR REPLACE INTO members VALUES (?, ?, ?)", (member.key, member.host, member.address)
            )
        return ""

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, in which no other process changes the file; UserError if it cannot be written."""
        try:
            with contextlib.suppress(FileExistsError):
                self.path.touch(mode=0o600, exist_ok=False)
            with contextlib.closing(sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)) as database:
                database.executescript(f"BEGIN IMMEDIATE; {_TABLES}")
                yield database
                database.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise UserError(f"cannot write the members in {self.path}: {error}") from error

    def _rows(self, query: str, *values: float) -> list[tuple[str, ...]]:
        if not self.stamp:
            return []
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=_BUSY_S)) as database:
                database.executescript(_TABLES)
                return database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise UserError(f"cannot read the members in {self.path}: {error}") from error


class Admission:
    """Admits members to a coordinator's socket as their file changes, and answers those who redeem invites.

    Used by the thread that polls the server.

    Args:
        members: their file.
        server: the socket.
        welcome: what an invited machine is told.
        tell: prints a line for the person at the coordinator, and keeps it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        members: Members,
        server: ControlServer,
        welcome: Welcome,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members, self._server, self._welcome, self._tell = members, server, welcome, tell
        self._clock = clock
        self._look_s = clock()
        self._stamp: tuple[int, ...] = ()
        self._invites: frozenset[str] = frozenset()
        self._admitted: set[str] = set()
        self._refusals = RateLimitedLog(_log, clock=clock)
        self.look()  # before the server answers the first connection

    def look(self) -> None:
        """Admit keys that were added to the file; call it often."""
        if self._clock() < self._look_s:
            return
        self._look_s = self._clock() + LOOK_EVERY_S
        if (stamp := self._members.stamp) == self._stamp:
            return
        try:
            invites, keys = self._members.invites, self._members.all.keys()
        except UserError as error:  # the run goes on with the members that it knows
            self._tell_sometimes(str(error))
            return
        self._stamp, self._invites = stamp, invites
        if new := (invites | keys) - self._admitted:
            self._server.allow(*new)
            self._admitted |= new

    def takes(self, identity: bytes, message: Message) -> bool:
        """Handle a message that came over a connection with an invite's key; False: it came over another."""
        invite = self._server.public_key(identity)
        if invite not in self._invites:
            return False
        if isinstance(message, Redeem):
            refusal = self._redeem(invite, message)
            self._server.send(identity, self._welcome if refusal is None else refusal)
        elif not isinstance(message, Heartbeat):
            self._server.send(identity, Refuse("an invite's key cannot be a worker's; use `tahq join INVITE`"))
        return True

    def _redeem(self, invite: str, asking: Redeem) -> Refuse | None:
        """Make the asking machine a member; the refusal if it may not be, None: it is."""
        host = asking.host if asking.host.isprintable() and len(asking.host) <= MAX_NAME_LENGTH else ""
        host = host or "a machine without a name"
        refusal = other_version(__version__, asking)
        if refusal is None:
            try:
                self._admit(invite, asking, host)
            except (UserError, ValueError) as error:
                refusal = Refuse(str(error))
        if refusal is not None:
            self._tell_sometimes(f"refused the invite of {host}: {refusal.reason}")
        return refusal

    def _admit(self, invite: str, asking: Redeem, host: str) -> None:
        """UserError, ValueError: why the machine is refused."""
        try:
            MachineConfig(address=asking.address)
        except ValidationError:
            raise ValueError(f"got the address {brief(repr(asking.address))}; expected a name or IP address") from None
        member = Member(parse_public_key(asking.public_key), host, asking.address)
        is_new = member.key not in self._members.all
        if reason := self._members.redeem(invite, member):
            raise UserError(reason)
        self._look_s = 0.0
        self.look()
        if is_new:
            self._tell(f"{host} ({member.address}) was admitted by an invite; its key is {member.key}")

    def _tell_sometimes(self, line: str) -> None:
        """A stranger may cause any number of these."""
        if self._refusals.warning(line):
            self._tell(line)


def other_version(version: str, asking: Join | Redeem) -> Refuse | None:
    """Why a worker of another version than the coordinator's `version` is refused; None: their versions agree."""
    if is_same_source(asking.version, version):
        return None
    revision = git_revision(version)
    return Refuse(
        f"this worker runs another version of tahq; on {brief(asking.host)}, install the coordinator's: pip install "
        f"'git+https://…@{revision}', or in a clone git checkout {revision} (docs/how-to/install.md)",
        [["version", brief(asking.version), f"{version} (coordinator)"]],
    )
