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
from tahq.pipeline.checkpoint.snapshot import turn_back
from tahq_launch.export import keep_source
from tahq_launch.start.codec_choice import codec_options
from tahq_launch.start.local_checks import check_reachable, security_warnings
from tahq_launch.start.origin import Origin, resumed
from tahq_launch.start.resolution import resolve_for_run
from tahq_launch.start.run_folder import RunFolder
from tahq_launch.start.run_keys import RunKeys, make_run_keys

log = logging.getLogger("tahq")


@dataclass(frozen=True, slots=True)
class StartRequest:
    """The command line of a program that starts a coordinator.

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
        """`overrides`, with those of the other options."""
        given = {"run.bind": self.bind, "run.advertise": self.advertise}
        return (*self.overrides, *(f"{key}={value}" for key, value in given.items() if value is not None))

    @property
    def resume_command(self) -> str:
        """The command that resumes this run."""
        options = {"--bind": self.bind, "--advertise": self.advertise}
        given = [word for option, value in options.items() if value is not None for word in (option, value)]
        changes = [word for override in self.overrides for word in ("--set", override)]
        return f"{self.program} {shlex.join([str(self.config_path), *given, '--resume', *changes])}"


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that is ready to start; its folder is locked as long as this is used. Without CURVE it has no `keys`."""

    config: ClusterConfig
    folder: RunFolder
    options: CoordinatorOptions
    notes: tuple[str, ...]
    journal: Journal
    keys: RunKeys | None = None


@contextlib.contextmanager
def prepared_run(
    request: StartRequest, meanwhile: Callable[[ClusterConfig], None], *, starts_workers: bool = True
) -> Iterator[PreparedRun]:
    """Read, check and resolve a configuration, and hold its run folder until the run ends.

    `meanwhile` is called with the configuration once the run is known to be startable, to begin slow work elsewhere
    while the configuration is resolved here.

    Raises:
        UserError: the configuration is invalid, or the folder holds another run.
        NothingToDoError: the run to resume has done all its steps.
    """
    given = load_config(request.config_path, request.all_overrides)
    check_reachable(given)
    folder = RunFolder(Path(given.run.dir) / given.run.name)
    folder.check_startable(resume=request.resume)
    keys = make_run_keys(given, starts_workers=starts_workers)
    meanwhile(given)
    if not request.resume:
        config, origin = resolve_for_run(given), Origin(secrets.randbits(63))
        codec_options(config, origin.codecs)  # finds a wrong `wire.replay` before the folder is touched
    with folder.locked() as epoch, Journal(folder.journal) as journal:
        folder.check_startable(resume=request.resume)
        if request.resume:
            config, origin = resumed(folder, given, journal)
        options = _coordinator_options(config, folder, origin, epoch, request.resume_command)
        with _log_file(folder.launcher_log, "debug" if request.debug else config.run.log_level):
            for warning in origin.warnings:
                log.warning("%s", warning)
            if origin.snapshot and origin.next_sample is None:  # set aside newer checkpoints
                turn_back(folder.snapshots, folder.path / origin.snapshot)
            _keep_config(folder, config, origin)
            source_notes = keep_source(folder, config)
            damaged = [f"warning: {warning}" for warning in origin.warnings]
            notes = (*damaged, *origin.notes, *source_notes, *security_warnings(config))
            yield PreparedRun(config, folder, options, notes, journal, keys)


def _keep_config(folder: RunFolder, config: ClusterConfig, origin: Origin) -> None:
    """Write config.yaml; a different old file is kept beside it when a run is resumed."""
    text = dump_yaml(config).encode()
    if origin.snapshot and folder.config.exists() and folder.config.read_bytes() != text:
        folder.config.replace(folder.path / f"config-until-step-{origin.start_step}.yaml")
    folder.config.write_bytes(text)


def _coordinator_options(
    config: ClusterConfig, folder: RunFolder, origin: Origin, epoch: int, resume_command: str
) -> CoordinatorOptions:
    run = config.run
    hosts = () if isinstance(config.hosts, str) else tuple(config.hosts)
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
        hosts=tuple(host.address for host in hosts),
        host_keys=tuple(host.public_key or "" for host in hosts),
        name=run.name,
        epoch=max(epoch, origin.epoch),
        next_sample=origin.next_sample,
        resume_command=resume_command,
        codecs=codec_options(config, origin.codecs),
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
