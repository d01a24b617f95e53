"""From a configuration file to the coordinator's options, before any worker exists.

The user's mistakes are found before the run folder is touched; the rest happens under the folder's lock.
"""

import contextlib
import logging
import os
import secrets
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tahq import __version__
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_hash, config_json, dump_yaml, load_config
from tahq.coordinator.context import CoordinatorOptions
from tahq.coordinator.journal import Journal
from tahq.coordinator.link_codecs import CodecOptions
from tahq.errors import ConfigError
from tahq.pipeline.checkpoint.snapshot import turn_back
from tahq_launch.export import keep_source
from tahq_launch.start.codec_choice import codec_options
from tahq_launch.start.origin import Origin, resumed
from tahq_launch.start.resolution import resolve_for_run
from tahq_launch.start.run_folder import RunFolder
from tahq_launch.start.run_keys import RunKeys, make_run_keys

log = logging.getLogger("tahq")

_LOOPBACK = ("127.", "localhost", "::1", "[::1]")


@dataclass(frozen=True, slots=True)
class StartRequest:
    """The command line of `tahq launch` or `tahq coordinator`.

    `bind` and `advertise` replace those of `run:` in the file.
    """

    config_path: Path
    overrides: tuple[str, ...] = ()
    resume: bool = False
    debug: bool = False
    bind: str | None = None
    advertise: str | None = None
    program: str = "tahq-launch"

    @property
    def all_overrides(self) -> tuple[str, ...]:
        """`overrides`, and what the other options stand for."""
        given = {"run.bind": self.bind, "run.advertise": self.advertise}
        return (*self.overrides, *(f"{key}={value}" for key, value in given.items() if value is not None))

    @property
    def resume_command(self) -> str:
        """The command that resumes this run."""
        bound = ["--bind", self.bind] if self.bind is not None else []
        told = ["--advertise", self.advertise] if self.advertise is not None else []
        changes = [word for override in self.overrides for word in ("--set", override)]
        return f"{self.program} {shlex.join([str(self.config_path), *bound, *told, '--resume', *changes])}"


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that is ready to start; its folder is locked for as long as this is used."""

    config: ClusterConfig
    folder: RunFolder
    options: CoordinatorOptions
    notes: tuple[str, ...]
    journal: Journal
    keys: RunKeys | None = None
    """Keys of its members; None: no CURVE."""


@contextlib.contextmanager
def prepared_run(
    request: StartRequest, meanwhile: Callable[[ClusterConfig], None], *, starts_workers: bool = True
) -> Iterator[PreparedRun]:
    """Read, check and resolve a configuration, and hold its run folder for as long as the run lasts.

    Args:
        request: what to run.
        meanwhile: told the configuration once it is known to be startable, to begin what takes long elsewhere
            while it is resolved here.
        starts_workers: whether those that can be are started from here.

    Raises:
        UserError: whatever is wrong with the configuration, or the folder holds another run.
        NothingToDoError: the run is continued, and has all its steps behind it.
    """
    given = load_config(request.config_path, request.all_overrides)
    check_reachable(given)
    folder = RunFolder(Path(given.run.dir) / given.run.name)
    folder.check_startable(resume=request.resume)
    keys = make_run_keys(given, starts_workers=starts_workers)
    meanwhile(given)
    fresh = None if request.resume else _with_codecs(resolve_for_run(given), Origin(secrets.randbits(63)))
    with folder.locked() as epoch, Journal(folder.journal) as journal:
        folder.check_startable(resume=request.resume)
        config, origin, codecs = fresh or _with_codecs(*resumed(folder, given, journal))
        with _log_file(folder.launcher_log, "debug" if request.debug else config.run.log_level):
            _begin_at(folder, origin)
            _keep_config(folder, config, origin)
            source_notes = keep_source(folder, config)
            options = _coordinator_options(config, folder, origin, codecs, epoch, request.resume_command)
            damaged = [f"warning: {warning}" for warning in origin.warnings]
            notes = (*damaged, *origin.notes, *source_notes, *_warnings(config))
            yield PreparedRun(config, folder, options, notes, journal, keys)


def _warnings(config: ClusterConfig) -> list[str]:
    """Warnings about allowed but dangerous settings."""
    if config.security.curve or config.hosts == "namespaces" or config.run.bind.startswith(_LOOPBACK):
        return []
    return [
        f"warning: security.curve is off, and run.bind is {config.run.bind}: anyone who can reach it, or "
        "a worker's port, can join the run, and anyone on the network path can read and change the traffic"
    ]


def _begin_at(folder: RunFolder, origin: Origin) -> None:
    """Set aside what is newer than the checkpoint to resume from."""
    for warning in origin.warnings:
        log.warning("%s", warning)
    if origin.snapshot and origin.next_sample is None:
        turn_back(folder.snapshots, folder.path / origin.snapshot)


def _keep_config(folder: RunFolder, config: ClusterConfig, origin: Origin) -> None:
    """Write config.yaml; a different old one is kept beside it when a run is resumed."""
    text = dump_yaml(config).encode()
    if origin.snapshot and folder.config.exists() and folder.config.read_bytes() != text:
        folder.config.replace(folder.path / f"config-until-step-{origin.start_step}.yaml")
    folder.config.write_bytes(text)


def _with_codecs(config: ClusterConfig, origin: Origin) -> tuple[ClusterConfig, Origin, CodecOptions]:
    """Add the coordinator's codec options; ConfigError for an unusable `wire.replay`."""
    return config, origin, codec_options(config, origin.codecs)


def _coordinator_options(
    config: ClusterConfig, folder: RunFolder, origin: Origin, codecs: CodecOptions, epoch: int, resume_command: str
) -> CoordinatorOptions:
    run = config.run
    return CoordinatorOptions(
        num_stages=config.pipeline.stages,
        run_id=origin.run_id,
        run_folder=folder.path,
        config_json=config_json(config),
        config_hash=config_hash(config),
        version=__version__,
        training=config.training,
        snapshot_every=run.snapshot_every,
        keep_snapshots=run.keep_snapshots,
        copies=run.copies,
        copies_within_host=run.copies_within_host,
        peer_timeout_s=run.peer_timeout,
        give_up_s=run.give_up,
        join_timeout_s=run.join_timeout,
        grace_s=run.grace,
        start_step=origin.start_step,
        snapshot=origin.snapshot,
        snapshot_files=origin.files,
        tie_link=config.model.tie == "sync",
        chunks_per_stage=config.pipeline.chunks,
        sites=config.sites,
        inside=config.links.inside,
        hosts=() if isinstance(config.hosts, str) else tuple(host.address for host in config.hosts),
        host_keys=() if isinstance(config.hosts, str) else tuple(host.public_key or "" for host in config.hosts),
        name=run.name,
        epoch=max(epoch, origin.epoch),
        next_sample=origin.next_sample,
        resume_command=resume_command,
        codecs=codecs,
    )


def check_reachable(config: ClusterConfig) -> None:
    """Refuse hosts that could never dial the coordinator.

    Raises:
        ConfigError: a host is another machine, and the coordinator listens where only this one reaches it.
    """
    hosts = [] if isinstance(config.hosts, str) else config.hosts
    remote = [host.address for host in hosts if not host.address.startswith(_LOOPBACK)]
    if remote and config.run.bind.startswith(_LOOPBACK) and config.run.advertise is None:
        raise ConfigError(
            f"run.bind is {config.run.bind}, which {remote[0]} cannot reach; set run.bind to an address and port of "
            "this machine (--set run.bind=192.0.2.1:5555), and run.advertise if hosts reach it under another"
        )


@contextlib.contextmanager
def _log_file(path: Path, level: str) -> Iterator[None]:
    """Log this process to a file, including a final traceback."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level.upper())
    log.info("tahq %s, process %d", __version__, os.getpid())
    try:
        yield
    except Exception:
        log.exception("the run was ended by an error")
        raise
    finally:
        log.removeHandler(handler)
        handler.close()
