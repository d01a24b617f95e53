"""A run whose coordinator was killed, as the journal has it: does the one that is started now go on with it?"""

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_hash, load_config
from tahq.coordinator.journal import Journal, JournalFacts
from tahq.errors import SnapshotError, UserError
from tahq.pipeline.checkpoint.resume import compare_configs
from tahq.pipeline.checkpoint.snapshot import choose_snapshot
from tahq_launch.start.run_folder import RunFolder


def facts_to_go_on_with(journal: Journal, kept: ClusterConfig, folder: RunFolder) -> JournalFacts | None:
    """What the journal says of a run that ended out of order, if that is still the run in this folder; else None.

    Args:
        journal: the run's.
        kept: the configuration that the run has kept.
        folder: the run's.
    """
    if not journal.has_run or journal.facts.config_hash != config_hash(kept):
        return None
    facts = journal.facts
    return facts if not facts.snapshot or _is_whole(folder, facts, kept) else None


def is_same(kept: ClusterConfig, config: ClusterConfig) -> bool:
    """Whether two resolved configurations say the same, in other words perhaps."""
    report = compare_configs(kept.model_dump(mode="json"), config.model_dump(mode="json"))
    return not report.changed and not report.refused


def _is_whole(folder: RunFolder, facts: JournalFacts, config: ClusterConfig) -> bool:
    """Whether lost stages can begin at the journal's snapshot: nothing newer than it is damaged."""
    try:
        chosen = choose_snapshot(folder.snapshots, all_files_here=isinstance(config.hosts, str))
    except SnapshotError:
        return False
    return chosen.manifest.step >= facts.step and (folder.path / facts.snapshot).is_dir()


def configuration_of(folder: RunFolder) -> ClusterConfig | None:
    """The configuration that the run has kept, if it can still be read."""
    try:
        return load_config(folder.config, ())
    except UserError:
        return None
