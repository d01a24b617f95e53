"""From a configuration file to the coordinator's options, before any worker exists.

The user's mistakes are found before the run folder is touched; the rest happens under the folder's lock.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tahq import __version__
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_hash, config_json, dump_yaml, load_config, resolve
from tahq.config.stage_estimate import with_memory_choices
from tahq.coordinator.best_loss import BestLoss
from tahq.coordinator.context import CoordinatorOptions
from tahq.coordinator.journal import Journal
from tahq.coordinator.observer import StepRecord
from tahq.coordinator.schedule_choice import Choose, Proposal, ScheduleChoice
from tahq.errors import NothingToDoError, SnapshotError, UserError
from tahq.pipeline.checkpoint.renamed_keys import with_present_names
from tahq.pipeline.checkpoint.resume import compare_configs, keep_model_sizes
from tahq.pipeline.checkpoint.snapshot import choose_snapshot, turn_back
from tahq.plan.cluster_numbers import ClusterNumbers
from tahq.quant import CodecSpec
from tahq.quant.quality import expected_gap
from tahq.quant.spec import AqsgdSpec
from tahq.typed_yaml.mistakes import Origins, validated
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan.schedule_search import schedule_search
from tahq_launch.run_source import keep_source
from tahq_launch.start.codec_choice import codec_options, recorded_replicas
from tahq_launch.start.local_checks import check_reachable, warnings_about
from tahq_launch.start.resolution import resolve_for_run, with_profile
from tahq_launch.start.run_folder import RunFolder, members_of
from tahq_launch.start.run_keys import RunKeys, make_run_keys
from tahq_launch.trackers import check_trackers

if TYPE_CHECKING:
    from tahq_launch.start.worker_processes import ForkServer

log = logging.getLogger("tahq")


@dataclass(frozen=True, slots=True)
class StartRequest:
    """The command line of a program that starts a coordinator.

    `bind` and `advertise` replace those of `run:` in the file. `planned` replaces the whole configuration of a new run,
    `figures` are what it was planned with, `watch` is given the steps of each search for a schedule. `joins_again`:
    workers that were started by hand have measured, and join by themselves. `dashboard`: a page shows the run.
    `keeps_order`: no plan may reorder the hosts. A later start finds again by itself: `joined`, overrides with the
    machines that have joined by invite, and `seen_at`, where the hosts reach this machine, for `run.bind`. Without
    `starts_workers` all workers are started by hand. `forks`: what local workers are forked from; None: not made yet.
    """

    config_path: Path
    overrides: tuple[str, ...] = ()
    resume: bool = False
    debug: bool = False
    bind: str | None = None
    advertise: str | None = None
    program: str = "tahq-launch"
    planned: ClusterConfig | None = None
    figures: ClusterNumbers | None = None
    watch: Callable[[Sequence[StepRecord]], None] | None = None
    joins_again: bool = False
    dashboard: bool = False
    keeps_order: bool = False
    joined: tuple[str, ...] = ()
    seen_at: str | None = None
    starts_workers: bool = True
    forks: "ForkServer | None" = None

    @property
    def all_overrides(self) -> tuple[str, ...]:
        """`overrides`, those that `bind`, `seen_at` and `advertise` stand for, and `joined`."""
        given = {"run.bind": self.bind or self.seen_at, "run.advertise": self.advertise}
        # quoted, since YAML takes the brackets of an IPv6 address for a list
        own = (f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None)
        return (*self.overrides, *own, *self.joined)

    @property
    def resume_command(self) -> str:
        """The command that resumes this run."""
        options = {"--bind": self.bind, "--advertise": self.advertise}
        given = [word for option, value in options.items() if value is not None for word in (option, value)]
        changes = [word for override in self.overrides for word in ("--set", override)]
        return f"{self.program} {shlex.join([str(self.config_path), *given, '--resume', *changes])}"


def with_run_name(config_path: Path, overrides: Sequence[str], *, resume: bool) -> tuple[str, ...]:
    """The overrides, with a `run.name` for a file that has none: the file's name and the time of the run's start.

    Resumed is the run of this file that was started last.
    """
    run = load_config(config_path, overrides).run
    if "name" in run.model_fields_set:
        return tuple(overrides)
    name = re.sub(r"[^A-Za-z0-9]+", "-", config_path.stem).strip("-")[:80] or run.name
    if resume:
        started = sorted(path.name for path in Path(run.dir).glob(f"{name}-{'[0-9]' * 8}-{'[0-9]' * 6}"))
        name = started[-1] if started else run.name
    else:
        name = time.strftime(f"{name}-%Y%m%d-%H%M%S")
    return (*overrides, f"run.name={name}")


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that is ready to start; its folder is locked as long as this is used. Without CURVE it has no `keys`."""

    config: ClusterConfig
    folder: RunFolder
    options: CoordinatorOptions
    notes: tuple[str, ...]
    journal: Journal
    keys: RunKeys | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run begins: at its first step, at a checkpoint, or where its killed coordinator was.

    `notes` list changes to the configuration, `warnings` why it does not resume from the newest checkpoint; `codecs`
    are the links' codecs at that point. `next_sample` (the first of `start_step`) and the smallest `epoch` are known if
    this coordinator replaces a killed one.
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


def startable_config(request: StartRequest) -> ClusterConfig:
    """The configuration, as planned or as read; UserError if it is known at once that this run cannot start."""
    given = request.planned or load_config(request.config_path, request.all_overrides)
    if given.hosts == "namespaces" and not request.starts_workers:
        raise UserError(
            "hosts: namespaces is for tahq-launch, which makes the network and starts the workers in it; "
            "workers that are started by hand need hosts: local or a list"
        )
    check_reachable(given)
    check_trackers(given)
    RunFolder(Path(given.run.dir) / given.run.name).check_startable(resume=request.resume)
    return given


@contextlib.contextmanager
def prepared_run(request: StartRequest) -> Iterator[PreparedRun]:
    """Read, check and resolve a configuration, and hold its run folder until the run ends.

    Raises:
        UserError: the configuration is invalid, or the folder holds another run.
        NothingToDoError: the run to resume has done all its steps.
    """
    given = startable_config(request)
    folder = RunFolder(Path(given.run.dir) / given.run.name)
    keys = make_run_keys(given, starts_workers=request.starts_workers)
    if not request.resume:
        config, origin = resolved_run(given), Origin(secrets.randbits(63))
        codec_options(config, origin.codecs)  # finds a wrong `wire.replay` before the folder is touched
        recorded_replicas(config)
    with folder.locked() as epoch, Journal(folder.journal) as journal:
        folder.check_startable(resume=request.resume)
        if request.resume:
            config, origin = resumed(folder, given, journal)
        options = _coordinator_options(config, folder, origin, epoch, request.resume_command)
        by_hand = stages_by_hand(config, starts_workers=request.starts_workers)
        options = replace(options, by_hand=by_hand, by_invite=bool(request.joined))
        if request.watch is not None and options.choose_schedule is not None:
            options = replace(options, choose_schedule=_watched(options.choose_schedule, request.watch))
        with _log_file(folder.launcher_log, "debug" if request.debug else config.run.log_level):
            for warning in origin.warnings:
                log.warning("%s", warning)
            if origin.snapshot and origin.next_sample is None:  # set aside newer checkpoints
                turn_back(folder.snapshots, folder.path / origin.snapshot)
            _keep_config(folder, config, origin)
            if request.joined and not folder.members.exists():
                folder.members.symlink_to(members_of(request.config_path).path.absolute())
            damaged = [f"warning: {warning}" for warning in origin.warnings]
            gap = () if request.planned else expected_gap_lines(config)  # the lines of a plan include it
            notes = (*damaged, *origin.notes, *gap, *keep_source(folder, config), *warnings_about(config))
            yield PreparedRun(config, folder, options, notes, journal, keys)


def stages_by_hand(config: ClusterConfig, *, starts_workers: bool) -> frozenset[int]:
    """The stages whose workers a person starts: all, or those of listed hosts without ssh."""
    hosts = config.hosts
    return frozenset(
        stage
        for stage in range(config.pipeline.num_workers)
        if not starts_workers or (isinstance(hosts, list) and not hosts[stage].is_started)
    )


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
        num_stages=config.pipeline.num_workers,
        replicas=config.pipeline.replicas,
        replicas_wait_s=config.pipeline.replicas_wait,
        shares_updates=config.optimizer_shares > 1,
        shares_weights="weights" in config.shards,
        recorded_replicas=recorded_replicas(config),
        run_id=origin.run_id,
        run_folder=folder.path,
        config_json=config_json(config),
        config_hash=config_hash(config),
        version=__version__,
        training=config.training,
        validation_sets=tuple(config.data.validation_sets),
        tokens_per_step=config.training.global_batch * config.training.rows_per_sample * config.data.seq_len,
        checkpoint_every=run.checkpoint_every,
        keep_checkpoints=run.keep_checkpoints,
        best=_best(config),
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
        tries_links=config.hosts != "namespaces",
        hosts=tuple(host.address for host in hosts),
        host_keys=tuple(host.public_key or "" for host in hosts),
        name=run.name,
        epoch=max(epoch, origin.epoch),
        next_sample=origin.next_sample,
        resume_command=resume_command,
        codecs=codec_options(config, origin.codecs),
        schedule=ScheduleChoice(config.pipeline.first_schedule, tuple(config.pipeline.first_depths or ())),
        are_depths_set=config.pipeline.depths is not None,
        choose_schedule=schedule_search(config),
    )


def _best(config: ClusterConfig) -> Literal["", "after", "at once"]:
    """See `CoordinatorOptions.best`."""
    if not config.keeps_best:
        return ""
    # samples that AQ-SGD remembers, and subspaces, change within a step
    remembers = any(isinstance(CodecSpec.parse(each), AqsgdSpec) for each in config.wire.specs().values())
    return "at once" if remembers or config.training.is_low_rank else "after"


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


def _watched(choose: Choose, watch: Callable[[Sequence[StepRecord]], None]) -> Choose:
    def choose_and_tell(steps: Sequence[StepRecord], present: ScheduleChoice, memory: Sequence[int]) -> Proposal:
        watch(steps)
        return choose(steps, present, memory)

    return choose_and_tell


def expected_gap_lines(config: ClusterConfig) -> tuple[str, ...]:
    """A line on what the codecs are known to cost; none without cuts."""
    gap = expected_gap(config.wire.activations, config.wire.gradients) if config.pipeline.stages > 1 else ""
    names = " and ".join(CodecSpec.parse(spec).brief() for spec in config.wire.specs().values())
    return (f"codecs {names}: {gap}",) if gap else ()


def resumed(folder: RunFolder, given: ClusterConfig, journal: Journal) -> tuple[ClusterConfig, Origin]:
    """The resolved configuration, and where the run continues: at the killed coordinator's step, or at a checkpoint.

    SnapshotError for a change that a resumed run cannot take, NothingToDoError if all steps are done.
    """
    kept, problem = None, ""
    try:
        kept = load_config(folder.config)
    except UserError as error:
        problem = str(error) if folder.config.exists() else f"{folder.config} is missing"
    if kept is not None and journal.has_run:
        values = kept.model_dump(mode="json")
        config = resolved_run(continued_config(values, given))
        has_changes = compare_configs(values, config.model_dump(mode="json")).changes
        origin = None if has_changes else _from_journal(journal, folder, kept)
        if origin is not None:
            return kept, origin
    return _from_checkpoint(folder, given, problem)


def _from_journal(journal: Journal, folder: RunFolder, kept: ClusterConfig) -> Origin | None:
    """Continue where the coordinator was killed; None unless the checkpoint that lost stages load is whole."""
    facts = journal.facts
    if facts.config_hash != config_hash(kept):
        return None
    if facts.snapshot:
        try:
            newest = choose_snapshot(folder.snapshots, all_files_here=isinstance(kept.hosts, str)).manifest.step
        except SnapshotError:
            return None
        if newest < facts.step or not (folder.path / facts.snapshot).is_dir():
            return None
    return Origin(
        run_id=facts.run_id,
        start_step=facts.step,
        snapshot=facts.snapshot,
        files=facts.files,
        notes=("the coordinator was killed: continuing where the run was",),
        codecs=facts.codecs,
        next_sample=facts.next_sample + (facts.step - facts.start_step) * facts.global_batch,
        epoch=facts.epoch + 1,
    )


def _from_checkpoint(folder: RunFolder, given: ClusterConfig, problem: str) -> tuple[ClusterConfig, Origin]:
    """Resume from a checkpoint; `problem` says what is wrong with the run's config.yaml, empty: nothing."""
    chosen = choose_snapshot(folder.snapshots, all_files_here=isinstance(given.hosts, str))
    manifest = chosen.manifest
    config = resolved_run(continued_config(manifest.config, given))
    report = compare_configs(manifest.config, config.model_dump(mode="json"))
    report.check()
    steps = config.training.steps  # the length of epochs is known to workers only
    if steps is not None and steps <= manifest.step:
        raise NothingToDoError(
            f"nothing to do: training.steps is {steps}, and the run is already after step {manifest.step}; to train "
            "on, set it to more"
        )
    warning = (f"{problem}; using the configuration of the checkpoint after step {manifest.step}",) if problem else ()
    saved = dict(manifest.meta.get("codecs") or {})
    best, notes = BestLoss.restored(saved), report.lines()
    if why := best.why_over(config.training.early_stopping):
        saved |= replace(best, num_worse=0).saved()
        notes.append(f"the run had stopped early: {why}; it goes on, and counts evaluations anew")
    return config, Origin(
        run_id=manifest.run_id,
        start_step=manifest.step,
        snapshot=str(chosen.folder.relative_to(folder.path)),
        files=manifest.sha256,
        notes=tuple(notes),
        warnings=(*chosen.warnings, *warning),
        codecs=saved,
    )


def resolved_run(config: ClusterConfig) -> ClusterConfig:
    """As `resolve_for_run`, with what is `auto` under `memory` chosen, too."""
    config = resolve_for_run(config)
    return with_memory_choices(config, resolved_spec(config, None))


def continued_config(old: Mapping[str, Any], given: ClusterConfig) -> ClusterConfig:
    """The given configuration; keys that it leaves open are taken from the checkpoint's.

    The model keeps its sizes. Length of samples, hosts, layers, micro-batch and codecs are not chosen again where they
    are left open and the rest allows it: the old ones stay.

    Raises:
        ConfigError: it contradicts a kept value, such as samples longer than the model's positions.
    """
    old = with_present_names(old)
    values = keep_model_sizes(old, resolve(with_profile(given)).model_dump(mode="json"))
    if given.pipeline.layers is None:
        _keep_division(values, old, given)
    if given.memory.gradients == "auto":
        values["memory"]["gradients"] = old.get("memory", {}).get("gradients", "auto")
    num_stages = values["pipeline"]["stages"]
    for key in ("recompute", "offload"):
        kept = old.get("memory", {}).get(key, "auto")
        by_stage = isinstance(kept, list) and (key == "recompute" or any(isinstance(each, list) for each in kept))
        if getattr(given.memory, key) == "auto" and not (by_stage and len(kept) != num_stages):
            values["memory"][key] = kept
    if given.memory.loss_chunks is None:
        values["memory"]["loss_chunks"] = old.get("memory", {}).get("loss_chunks", 1)
    if given.memory.agoq.bits == "auto" and values["pipeline"]["stages"] == old.get("pipeline", {}).get("stages"):
        values["memory"]["agoq"] |= {"bits": old.get("memory", {}).get("agoq", {}).get("bits", "auto")}
    if "packing" not in given.data.model_fields_set:  # records of former versions were never packed
        values["data"]["packing"] = old.get("data", {}).get("packing", False)
    left_open = (("data", ("seq_len",)), ("training", ("micro_batch",)), ("wire", ("activations", "gradients")))
    for name, keys in left_open:
        for key in keys:
            if key not in getattr(given, name).model_fields_set and key in old.get(name, {}):
                values[name][key] = old[name][key]
    return validated(ClusterConfig, values, Origins("cannot resume with the checkpoint's model"))


def _keep_division(values: dict[str, Any], old: Mapping[str, Any], given: ClusterConfig) -> None:
    """Keep the plan: the old hosts in their order, and the layers of each chunk, if they are still to be had.

    With them go what the plan has put beside them: names and first frames of links, and the times of sleeping stages.
    """
    kept, pipeline, links, emulate = (
        old.get("pipeline", {}),
        *(values[name] for name in ("pipeline", "links", "emulate")),
    )
    places = [_places(each) for each in (old, values)]
    if places[0] - places[1] or ("stages" in given.pipeline.model_fields_set and places[0] != places[1]):
        return
    replicas = kept.get("replicas", 1)
    if "replicas" in given.pipeline.model_fields_set and pipeline["replicas"] != replicas:
        return
    if places[0]:
        pipeline |= {"stages": kept["stages"], "replicas": replicas}
    # a checkpoint of an older version has no chunks
    if any(pipeline[key] != kept.get(key, 1) for key in ("stages", "chunks")):
        return
    pipeline |= {key: kept.get(key) for key in ("layers", "first")}
    if isinstance(values["hosts"], list):
        values["hosts"] = old["hosts"]
    elif places[0]:
        emulate |= {key: old["emulate"][key] for key in ("hosts", "pairs")}
    if emulate["sleep"] is not None:
        emulate["sleep"] = old["emulate"].get("sleep")
    for key in ("first", "connections"):
        if key not in given.links.model_fields_set and key in old.get("links", {}):
            links[key] = old["links"][key]


def _places(config: Mapping[str, Any]) -> Counter[str]:
    """What tells listed hosts apart; of hosts in namespaces, their figures without their names."""
    hosts, places = config.get("hosts"), list[dict[str, Any]]()
    if isinstance(hosts, list):
        places = [{key: host.get(key) for key in ("address", "bind", "device", "ssh")} for host in hosts]
    elif hosts == "namespaces":
        figures, pipeline = config["emulate"]["hosts"], config["pipeline"]
        num_workers = pipeline["stages"] * pipeline.get("replicas", 1)
        places = [figures.get(f"host{stage}") or {} for stage in range(num_workers)]
    filled = ({key: value for key, value in place.items() if value is not None} for place in places)
    return Counter(json.dumps(place, sort_keys=True) for place in filled)
