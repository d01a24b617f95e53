"""The keys of a run: the coordinator's, those of workers started from here, and public keys of other members.

A worker that is started from here gets a new key pair, for this start of the run only, as the first line on its
stdin: it is in no file, no environment and no list of processes, and gone with the processes. The coordinator has the
key of this account, by which a worker of the same account knows it without being told, also when it was started again.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tahq.comm.keys import (
    Credentials,
    KeyPair,
    SecurityConfig,
    default_key_path,
    key_pair_of,
    new_key_pair,
    parse_public_key,
    read_key_file,
    read_or_make_key_file,
    write_key_file,
)
from tahq.config.cluster import ClusterConfig
from tahq.errors import UserError

log = logging.getLogger(__name__)

_LINE_NBYTES: Final = 2 * 64 + 2
_STDIN: Final = 0


@dataclass(frozen=True, slots=True)
class WorkerSecret:
    """How a worker that is started from here learns its key: a flag in its command line, and its stdin's first line."""

    flag: str
    line: bytes = field(default=b"", repr=False)


PLAIN: Final = WorkerSecret("--no-curve")
"""There is no CURVE."""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """What the parties of a run are known by.

    Attributes:
        coordinator: its pair.
        stages: of the workers that are started from here, by stage.
        allowed: public keys of all members that may join.
    """

    coordinator: KeyPair
    stages: Mapping[int, KeyPair]
    allowed: frozenset[str]

    def secret_of(self, stage: int) -> WorkerSecret:
        """How the worker of a stage started from here receives its key."""
        line = f"{self.stages[stage].secret} {self.coordinator.public}\n"
        return WorkerSecret("--keys-from-stdin", line.encode("ascii"))


def make_run_keys(config: ClusterConfig, *, starts_workers: bool) -> RunKeys | None:
    """The keys of a run; None without CURVE.

    Args:
        config: the run.
        starts_workers: whether those that can be are started from here.

    Raises:
        UserError: a file of keys cannot be read, or made where a worker that is started by hand needs it.
    """
    if not config.security.curve:
        return None
    started = _started_here(config) if starts_workers else []
    coordinator = _coordinator_keys(config.security, must_be_known=len(started) < config.pipeline.stages)
    stages = {stage: new_key_pair() for stage in started}
    hosts = [] if isinstance(config.hosts, str) else config.hosts
    named = {host.public_key for host in hosts if host.public_key is not None}
    members = {keys.public for keys in stages.values()} | named | {coordinator.public}
    return RunKeys(coordinator, stages, config.security.allowed_keys() | members)


def _started_here(config: ClusterConfig) -> list[int]:
    """Stages whose workers need no hand."""
    hosts = config.hosts
    return [stage for stage in range(config.pipeline.stages) if isinstance(hosts, str) or hosts[stage].ssh is not None]


def _coordinator_keys(security: SecurityConfig, *, must_be_known: bool) -> KeyPair:
    """The configured key, else this account's, else (if no worker needs to know it beforehand) a new one."""
    if security.key is not None:
        return read_key_file(Path(security.key).expanduser())
    try:
        return read_or_make_key_file(default_key_path())
    except UserError as error:
        if must_be_known:
            raise
        log.warning("%s; this run uses a new key", error)
        return new_key_pair()


# -- a worker's side -----------------------------------------------------------------------------


def keys_from_stdin() -> Credentials:
    """What a launcher wrote on this worker's stdin; of what follows nothing is read.

    Raises:
        UserError: it wrote something else, or nothing.
    """
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_NBYTES and (byte := os.read(_STDIN, 1)):
        line += byte
    secret, _, coordinator = line.decode("ascii", "replace").strip().partition(" ")
    try:
        return Credentials(key_pair_of(secret), parse_public_key(coordinator))
    except ValueError:
        raise UserError("no keys came on stdin; --keys-from-stdin is for launchers, which write them there") from None


def keys_by_hand(key_file: Path | None, coordinator_key: str | None) -> Credentials:
    """The keys of a worker that a person starts.

    Args:
        key_file: of its secret key; None: this account's, which is made if there is none.
        coordinator_key: the coordinator's public key; None: it is taken to run under the same key.

    Raises:
        UserError: the file cannot be read or made, or the key is none.
    """
    own = read_key_file(key_file) if key_file is not None else read_or_make_key_file(default_key_path())
    try:
        return Credentials(own, own.public if coordinator_key is None else parse_public_key(coordinator_key))
    except ValueError as error:
        raise UserError(f"--coordinator-key: {error}") from None


def keygen(out: Path | None, *, show: bool) -> KeyPair:
    """Make a key and write the secret half of it, or read the one that there is.

    Args:
        out: file of the secret key; None: this account's.
        show: make none.

    Raises:
        UserError: there is one already, or there is none to show, or the file cannot be written or read.
    """
    path = out or default_key_path()
    if show:
        return read_key_file(path)
    keys = new_key_pair()
    try:
        write_key_file(path, keys)
    except FileExistsError:
        raise UserError(
            f"{path} is there already, and may be what others know this machine by; `tahq keygen --show` prints "
            f"its public key, --out names another file"
        ) from None
    return keys
