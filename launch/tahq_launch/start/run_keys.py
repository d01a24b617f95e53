"""The keys of a run: the coordinator's, those of workers started from here, and public keys of other members.

A worker that is started from here gets a new key pair, for this start of the run only, as the first line on its
stdin: it is in no file, no environment and no list of processes, and gone with the processes. The coordinator has the
key of this account, so workers of the same account know it, also after a restart.
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


@dataclass(frozen=True, slots=True)
class WorkerSecret:
    """How a worker started from here receives its key: a flag on its command line, and its stdin's first line."""

    flag: str
    line: bytes = field(default=b"", repr=False)


PLAIN: Final = WorkerSecret("--no-curve")
"""A run without CURVE."""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The coordinator's key pair, those of workers started from here by stage, and the public keys that may join."""

    coordinator: KeyPair
    stages: Mapping[int, KeyPair]
    allowed: frozenset[str]

    def secret_of(self, stage: int) -> WorkerSecret:
        """How the worker of a stage started from here receives its key."""
        line = f"{self.stages[stage].secret} {self.coordinator.public}\n"
        return WorkerSecret("--keys-from-stdin", line.encode("ascii"))


def make_run_keys(config: ClusterConfig, *, starts_workers: bool) -> RunKeys | None:
    """The keys of a run, whose workers are started from here where that is possible; None without CURVE.

    UserError if a key file cannot be read, or cannot be created although a worker started by hand needs it.
    """
    security, hosts = config.security, config.hosts
    if not security.curve:
        return None
    started = [
        stage
        for stage in range(config.pipeline.num_workers)
        if starts_workers and (isinstance(hosts, str) or hosts[stage].is_started)
    ]
    must_be_known = len(started) < config.pipeline.num_workers
    key_file = None if security.key is None else Path(security.key).expanduser()
    coordinator = _account_key(must_be_known=must_be_known) if key_file is None else read_key_file(key_file)
    stages = {stage: new_key_pair() for stage in started}
    named = {host.public_key for host in hosts if host.public_key is not None} if isinstance(hosts, list) else set()
    members = {keys.public for keys in stages.values()} | named | {coordinator.public}
    return RunKeys(coordinator, stages, security.allowed_keys() | members)


def _account_key(*, must_be_known: bool) -> KeyPair:
    """This account's key, created if needed; a new one if that fails and no worker needs to know it beforehand."""
    try:
        return read_or_make_key_file(default_key_path())
    except UserError as error:
        if must_be_known:
            raise
        log.warning("%s; this run uses a new key", error)
        return new_key_pair()


def keys_from_stdin() -> Credentials:
    """The keys that a launcher wrote on this worker's stdin; reads nothing beyond that line."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_NBYTES and (byte := os.read(0, 1)):
        line += byte
    secret, _, coordinator = line.decode("ascii", "replace").strip().partition(" ")
    try:
        return Credentials(key_pair_of(secret), parse_public_key(coordinator))
    except ValueError:
        raise UserError("no keys came on stdin; --keys-from-stdin is for launchers, which write them there") from None


def keys_by_hand(key_file: Path | None, coordinator_key: str | None) -> Credentials:
    """The keys of a worker that a person starts: by default this account's, and the same for the coordinator."""
    own = read_key_file(key_file) if key_file is not None else read_or_make_key_file(default_key_path())
    try:
        return Credentials(own, own.public if coordinator_key is None else parse_public_key(coordinator_key))
    except ValueError as error:
        raise UserError(f"--coordinator-key: {error}") from None


def keygen(out: Path | None, *, show: bool) -> KeyPair:
    """Create a key file, or with `show` read the existing one; by default this account's."""
    path = out or default_key_path()
    if show:
        return read_key_file(path)
    keys = new_key_pair()
    try:
        write_key_file(path, keys)
    except FileExistsError:
        raise UserError(
            f"{path} exists already, and others may know this machine by it; `tahq keygen --show` prints its public "
            "key, --output names another file"
        ) from None
    return keys
