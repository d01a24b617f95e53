"""From a configuration file to everything that the coordinator is told, before any worker exists.

Order matters here: what can be wrong with what the user gave is found before the run folder is
touched, and all else happens while the folder's lock is held.
"""

import contextlib
import logging
import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tahq import __version__
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_hash, config_json, dump_yaml, load_config, resolve
from tahq.coordinator.journal import Journal, JournalFacts
from tahq.coordinator.link_codecs import CodecOptions
from tahq.coordinator.options import CoordinatorOptions
from tahq.errors import ConfigError, NothingToDoError, UserError
from tahq.pipeline.checkpoint.resume import compare_configs, keep_model_sizes
from tahq.pipeline.checkpoint.snapshot import choose_snapshot, turn_back
from tahq.typed_yaml.mistakes import Origins, one_line
from tahq_launch.export import keep_source
from tahq_launch.start.codec_choice import codec_options
from tahq_launch.start.resolution import resolve_for_run
from tahq_launch.start.run_folder import RunFolder
from tahq_launch.start.run_keys import RunKeys, make_run_keys
from tahq_launch.taken_over import configuration_of, facts_to_go_on_with, is_same

log = logging.getLogger("tahq")

_LOOPBACK = ("127.", "localhost", "::1", "[::1]")


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What a person asked for on the command line of `tahq launch` or `tahq coordinator`.

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
        """What continues this run later."""
        bound = ["--bind", self.bind] if self.bind is not None else []
        told = ["--advertise", self.advertise] if self.advertise is not None else []
        changes = [word for override in self.overrides for word in ("--set", override)]
        return f"{self.program} {shlex.join([str(self.config_path), *bound, *told, '--resume', *changes])}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run begins: at nothing, or at a snapshot of itself.

    `notes` say what is different from the run that is continued, and `warnings` why it is not its newest snapshot;
    `codecs` is what its links were packed with. `next_sample` (which `start_step` begins with) and the least `epoch`
    are known where a coordinator goes on after another.
    """

    run_id: int
    start_step: int = 0
    snapshot: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    codecs: Mapping[str, Any] = field(default_factory=dict)
    next_sample: int | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that is ready to start; its folder is locked for as long as this is used."""

    config: ClusterConfig
    folder: RunFolder
    options: CoordinatorOptions
    notes: tuple[str, ...]
    journal: Journal
    keys: RunKeys | None = None
    """What its parties are known by; None: no CURVE."""


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
        config, origin, codecs = fresh or _with_codecs(*_resumed(folder, given, journal))
        with _log_file(folder.launcher_log, "debug" if request.debug else config.run.log_level):
            _begin_at(folder, origin)
            _keep_config(folder, config, origin)
            source_notes = keep_source(folder, config)
            options = _coordinator_options(config, folder, origin, codecs, epoch, request.resume_command)
            damaged = [f"warning: {warning}" for warning in origin.warnings]
            notes = (*damaged, *origin.notes, *source_notes, *_warnings(config))
            yield PreparedRun(config, folder, options, notes, journal, keys)


def _warnings(config: ClusterConfig) -> list[str]:
    """What is allowed and dangerous about a configuration."""
    if config.security.curve or config.hosts == "namespaces" or config.run.bind.startswith(_LOOPBACK):
        return []
    return [
        f"warning: security.curve is off, and run.bind is {config.run.bind}: whoever reaches that, or a worker's port, "
        "can take part in the run, and whoever is on the way can read and change what is sent"
    ]


def _resumed(folder: RunFolder, given: ClusterConfig, journal: Journal) -> tuple[ClusterConfig, Origin]:
    """The resolved configuration, and where the run goes on: where it was, or else at a snapshot."""
    kept = configuration_of(folder) if journal.has_run else None
    if kept is not None:
        config = resolve_for_run(continued_config(kept.model_dump(mode="json"), given))
        facts = facts_to_go_on_with(journal, kept, folder) if is_same(kept, config) else None
        if facts is not None:
            return kept, _where_it_was(facts)
    return _continued(folder, given)


def _where_it_was(facts: JournalFacts) -> Origin:
    """The run goes on where its coordinator was killed; stages that have lost their workers begin at the snapshot."""
    return Origin(
        run_id=facts.run_id,
        start_step=facts.step,
        snapshot=facts.snapshot,
        files=facts.files,
        notes=("the coordinator was killed: going on where the run was",),
        codecs=facts.codecs,
        next_sample=facts.next_sample + (facts.step - facts.start_step) * facts.global_batch,
        epoch=facts.epoch + 1,
    )


def _continued(folder: RunFolder, given: ClusterConfig) -> tuple[ClusterConfig, Origin]:
    """The configuration to go on with, and where; SnapshotError for changes that cannot be.

    NothingToDoError if there is nothing to go on with.
    """
    chosen = choose_snapshot(folder.snapshots, all_files_here=isinstance(given.hosts, str))
    manifest = chosen.manifest
    config = resolve_for_run(continued_config(manifest.config, given))
    report = compare_configs(manifest.config, config.model_dump(mode="json"))
    report.check()
    _check_is_left(config, manifest.step)
    lost = _unreadable_config(folder)
    warning = (f"{lost}; the configuration is that of the checkpoint after step {manifest.step}",) if lost else ()
    return config, Origin(
        run_id=manifest.run_id,
        start_step=manifest.step,
        snapshot=str(chosen.folder.relative_to(folder.path)),
        files=manifest.sha256,
        notes=tuple(report.lines()),
        warnings=(*chosen.warnings, *warning),
        codecs=dict(manifest.meta.get("codecs") or {}),
    )


def _unreadable_config(folder: RunFolder) -> str:
    """What is wrong with the run's config.yaml; empty: nothing."""
    try:
        load_config(folder.config)
    except UserError as error:
        return str(error) if folder.config.exists() else f"{folder.config} is missing"
    return ""


def _check_is_left(config: ClusterConfig, num_done: int) -> None:
    """NothingToDoError where no step is left; how many an epoch has only a worker knows, which reads the data."""
    steps = config.training.steps
    if steps is not None and steps <= num_done:
        raise NothingToDoError(
            f"nothing to do: training.steps is {steps}, and the run is already after step {num_done}; to train on, set "
            "it to more"
        )


def _begin_at(folder: RunFolder, origin: Origin) -> None:
    """Leave behind what is newer than the snapshot to continue from."""
    for warning in origin.warnings:
        log.warning("%s", warning)
    if origin.snapshot and origin.next_sample is None:
        turn_back(folder.snapshots, folder.path / origin.snapshot)


def continued_config(old: Mapping[str, Any], given: ClusterConfig) -> ClusterConfig:
    """What is given now, with what it leaves open as the snapshot has it.

    The model keeps its sizes, and where neither the number of chunks on as many stages nor the way of dividing is
    another, each chunk keeps its layers: costs measured again would move the cuts.

    Args:
        old: the resolved configuration of the snapshot, as plain values.
        given: the configuration to go on with, not resolved yet.

    Raises:
        ConfigError: what is given does not go with what is kept, samples longer than the model's positions, say.
    """
    values = keep_model_sizes(old, resolve(given).model_dump(mode="json"))
    kept, pipeline = old.get("pipeline", {}), values["pipeline"]
    # a snapshot of an older version has no chunks
    same_division = all(pipeline[key] == kept.get(key, 1) for key in ("stages", "chunks", "balance"))
    if pipeline["layers"] is None and same_division:
        values["pipeline"] = {**pipeline, "layers": kept.get("layers")}
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        source = "cannot resume so, with the model as the snapshot has it"
        raise ConfigError(one_line(error, values, ClusterConfig, Origins(source, {}, {}))) from error


def _keep_config(folder: RunFolder, config: ClusterConfig, origin: Origin) -> None:
    """Write config.yaml; one that says something else is kept beside it when a run is continued."""
    text = dump_yaml(config).encode()
    if origin.snapshot and folder.config.exists() and folder.config.read_bytes() != text:
        folder.config.replace(folder.path / f"config-until-step-{origin.start_step}.yaml")
    folder.config.write_bytes(text)


def _with_codecs(config: ClusterConfig, origin: Origin) -> tuple[ClusterConfig, Origin, CodecOptions]:
    """With what the coordinator is told of codecs; ConfigError for a `wire.replay` that is of no use."""
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
    """Keep in a file what this process logs, the traceback that ends it included."""
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
