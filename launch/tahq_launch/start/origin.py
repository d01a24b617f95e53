"""Where a run begins: at its first step, at a checkpoint, or where its killed coordinator was."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_hash, load_config, resolve
from tahq.coordinator.journal import Journal, JournalFacts
from tahq.errors import ConfigError, NothingToDoError, SnapshotError, UserError
from tahq.pipeline.checkpoint.resume import compare_configs, keep_model_sizes
from tahq.pipeline.checkpoint.snapshot import choose_snapshot
from tahq.typed_yaml.mistakes import Origins, one_line
from tahq_launch.start.resolution import resolve_for_run
from tahq_launch.start.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run begins.

    `notes` list differences from the run before, `warnings` why it does not resume from the newest checkpoint; `codecs`
    are the links' codecs then. `next_sample` (the first of `start_step`) and the smallest `epoch` are known if a
    coordinator succeeds a killed one.
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


def resumed(folder: RunFolder, given: ClusterConfig, journal: Journal) -> tuple[ClusterConfig, Origin]:
    """The resolved configuration, and where the run continues: where it was, or else at a checkpoint."""
    kept = _kept_config(folder) if journal.has_run else None
    if kept is not None:
        config = resolve_for_run(continued_config(kept.model_dump(mode="json"), given))
        facts = _facts_to_continue(journal, kept, folder) if _is_same(kept, config) else None
        if facts is not None:
            return kept, _where_it_was(facts)
    return _continued(folder, given)


def _where_it_was(facts: JournalFacts) -> Origin:
    """Continue where the coordinator was killed; stages without a worker begin at the checkpoint."""
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


def _continued(folder: RunFolder, given: ClusterConfig) -> tuple[ClusterConfig, Origin]:
    """Resume from a checkpoint.

    Raises:
        SnapshotError: a change of the configuration that a resumed run cannot have.
        NothingToDoError: all steps are done.
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
    """Raise NothingToDoError if all steps are done; the length of epochs is known to workers only."""
    steps = config.training.steps
    if steps is not None and steps <= num_done:
        raise NothingToDoError(
            f"nothing to do: training.steps is {steps}, and the run is already after step {num_done}; to train on, set "
            "it to more"
        )


def continued_config(old: Mapping[str, Any], given: ClusterConfig) -> ClusterConfig:
    """The given configuration, with what it leaves open taken from the checkpoint's.

    The model keeps its sizes. If stages, chunks and balance are unchanged, each chunk keeps its layers: costs measured
    again would move the cuts.

    Args:
        old: the checkpoint's resolved configuration, as plain values.
        given: the new configuration, not resolved yet.

    Raises:
        ConfigError: it contradicts what is kept, such as samples longer than the model's positions.
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
        source = "cannot resume with the checkpoint's model"
        raise ConfigError(one_line(error, values, ClusterConfig, Origins(source, {}, {}))) from error


def _facts_to_continue(journal: Journal, kept: ClusterConfig, folder: RunFolder) -> JournalFacts | None:
    """The journal's facts about a run whose coordinator was killed, if it is still the run in this folder.

    Args:
        journal: the run's.
        kept: the configuration that the run has kept.
        folder: the run's.
    """
    if not journal.has_run or journal.facts.config_hash != config_hash(kept):
        return None
    facts = journal.facts
    return facts if not facts.snapshot or _is_whole(folder, facts, kept) else None


def _is_same(kept: ClusterConfig, config: ClusterConfig) -> bool:
    """Whether two resolved configurations are equivalent."""
    report = compare_configs(kept.model_dump(mode="json"), config.model_dump(mode="json"))
    return not report.changed and not report.refused


def _is_whole(folder: RunFolder, facts: JournalFacts, config: ClusterConfig) -> bool:
    """Whether lost stages can begin at the journal's checkpoint: neither it nor a newer one is damaged."""
    try:
        chosen = choose_snapshot(folder.snapshots, all_files_here=isinstance(config.hosts, str))
    except SnapshotError:
        return False
    return chosen.manifest.step >= facts.step and (folder.path / facts.snapshot).is_dir()


def _kept_config(folder: RunFolder) -> ClusterConfig | None:
    """The run's config.yaml, if it can be read."""
    try:
        return load_config(folder.config, ())
    except UserError:
        return None
