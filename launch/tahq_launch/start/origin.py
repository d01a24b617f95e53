"""Where a run begins: at its first step, at a checkpoint, or where its killed coordinator was."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_hash, load_config, resolve
from tahq.coordinator.journal import Journal
from tahq.errors import NothingToDoError, SnapshotError, UserError
from tahq.pipeline.checkpoint.resume import compare_configs, keep_model_sizes
from tahq.pipeline.checkpoint.snapshot import choose_snapshot
from tahq.typed_yaml.mistakes import Origins, validated
from tahq_launch.start.resolution import resolve_for_run
from tahq_launch.start.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run begins.

    `notes` list differences from the run before, `warnings` why it does not resume from the newest checkpoint; `codecs`
    are the links' codecs then. `next_sample` (the first of `start_step`) and the smallest `epoch` are known if this
    coordinator replaces a killed one.
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
    """The resolved configuration, and where the run continues: at the killed coordinator's step, or at a checkpoint.

    SnapshotError if the configuration was changed as no resumed run can be, NothingToDoError if all steps are done.
    """
    kept, problem = None, ""
    try:
        kept = load_config(folder.config)
    except UserError as error:
        problem = str(error) if folder.config.exists() else f"{folder.config} is missing"
    if kept is not None and journal.has_run:
        config = resolve_for_run(continued_config(kept.model_dump(mode="json"), given))
        origin = _from_journal(journal, folder, kept) if _are_equivalent(kept, config) else None
        if origin is not None:
            return kept, origin
    return _from_checkpoint(folder, given, problem)


def _are_equivalent(one: ClusterConfig, other: ClusterConfig) -> bool:
    report = compare_configs(one.model_dump(mode="json"), other.model_dump(mode="json"))
    return not report.changes


def _from_journal(journal: Journal, folder: RunFolder, kept: ClusterConfig) -> Origin | None:
    """Continue where the coordinator was killed, if the journal's checkpoint is whole, from which lost stages begin."""
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
    config = resolve_for_run(continued_config(manifest.config, given))
    report = compare_configs(manifest.config, config.model_dump(mode="json"))
    report.check()
    steps = config.training.steps  # the length of epochs is known to workers only
    if steps is not None and steps <= manifest.step:
        raise NothingToDoError(
            f"nothing to do: training.steps is {steps}, and the run is already after step {manifest.step}; to train "
            "on, set it to more"
        )
    warning = (f"{problem}; using the configuration of the checkpoint after step {manifest.step}",) if problem else ()
    return config, Origin(
        run_id=manifest.run_id,
        start_step=manifest.step,
        snapshot=str(chosen.folder.relative_to(folder.path)),
        files=manifest.sha256,
        notes=tuple(report.lines()),
        warnings=(*chosen.warnings, *warning),
        codecs=dict(manifest.meta.get("codecs") or {}),
    )


def continued_config(old: Mapping[str, Any], given: ClusterConfig) -> ClusterConfig:
    """The given configuration; keys that it leaves open are taken from the checkpoint's.

    The model keeps its sizes. If stages, chunks and balance are unchanged, each chunk keeps its layers: costs measured
    again would move the cuts.

    Raises:
        ConfigError: it contradicts a kept value, such as samples longer than the model's positions.
    """
    values = keep_model_sizes(old, resolve(given).model_dump(mode="json"))
    kept, pipeline = old.get("pipeline", {}), values["pipeline"]
    # a checkpoint of an older version has no chunks
    same_division = all(pipeline[key] == kept.get(key, 1) for key in ("stages", "chunks", "balance"))
    if pipeline["layers"] is None and same_division:
        values["pipeline"] = {**pipeline, "layers": kept.get("layers")}
    return validated(ClusterConfig, values, Origins("cannot resume with the checkpoint's model"))
