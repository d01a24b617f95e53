"""Which snapshot a run continues from: the newest that is whole.

`latest` says which one is meant. If its manifest cannot be read or one of its files is damaged, the one before it is
taken, and so on, with a warning for each that is passed over; never silently, and never one newer than what `latest`
names, which may be of a history that somebody has turned back from. Only where `latest` names nothing that is there
does the newest complete one stand for it.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tahq.errors import SnapshotError
from tahq.pipeline.checkpoint.durable_file import write_text_durably
from tahq.pipeline.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    Manifest,
    StageFile,
    latest_folder,
    read_manifest,
    snapshot_folders,
)
from tahq.pipeline.checkpoint.reader import check_sha256

SET_ASIDE = MANIFEST + ".left"
"""What a manifest is called whose snapshot the run has turned back from."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenSnapshot:
    """Folder and manifest of a snapshot, and why it is not the newest (empty: it is)."""

    folder: Path
    manifest: Manifest
    warnings: tuple[str, ...] = ()


def choose_snapshot(snapshots: Path, *, all_files_here: bool) -> ChosenSnapshot:
    """The newest snapshot that is whole; every file that lies here is read, and its hash compared.

    Args:
        snapshots: the run's folder of snapshots.
        all_files_here: whether a file that is not here is missing, or may lie on its stage's host.

    Raises:
        SnapshotError: there is none; the message names what is wrong with each.
    """
    reasons = []
    for candidate in _candidates(snapshots):
        if isinstance(candidate, str):
            reasons.append(candidate)
            continue
        try:
            manifest = _whole(candidate, all_files_here=all_files_here)
        except SnapshotError as error:
            reasons.append(str(error).removesuffix("; resume from another snapshot"))
        else:
            warnings = tuple(f"{reason}; resuming from {candidate.name} instead" for reason in reasons)
            return ChosenSnapshot(candidate, manifest, warnings)
    raise SnapshotError("; ".join([*reasons, "there is no other snapshot that is whole"]))


def turn_back(snapshots: Path, chosen: Path) -> None:
    """Make this snapshot the latest, and those that are newer none: the run goes on from here, and writes others.

    The files of newer ones stay until they are in the way. Called by who holds the run's folder.

    Raises:
        SnapshotError: the disk would not take it.
    """
    folders = snapshot_folders(snapshots)
    newer = list(folders.values())[list(folders.values()).index(chosen) + 1 :]
    for manifest in (folder / MANIFEST for folder in newer):
        if manifest.is_file():
            try:
                manifest.replace(manifest.with_name(SET_ASIDE))
            except OSError as error:
                raise SnapshotError(f"cannot rename {manifest}: {error.strerror}; remove {manifest.parent}") from error
            log.warning("the run turns back from %s; its manifest is now called %s", manifest.parent.name, SET_ASIDE)
    if _named(snapshots) != chosen:
        write_text_durably(snapshots / LATEST, chosen.name + "\n")


def _candidates(snapshots: Path) -> Iterator[Path | str]:
    """Folders with a manifest, the one to prefer first; or what is wrong with `latest`."""
    complete = [folder for folder in snapshot_folders(snapshots).values() if (folder / MANIFEST).is_file()]
    if not complete:
        latest_folder(snapshots)  # raises, and says what there is in place of a snapshot
    try:
        latest = latest_folder(snapshots)
    except SnapshotError as error:
        yield str(error)
        yield from reversed(complete)
    else:
        yield from reversed(complete[: complete.index(latest) + 1])


def _named(snapshots: Path) -> Path | None:
    try:
        return latest_folder(snapshots)
    except SnapshotError:
        return None


def _whole(folder: Path, *, all_files_here: bool) -> Manifest:
    manifest = read_manifest(folder)
    if snapshot_folders(folder.parent).get(manifest.step) != folder:
        raise SnapshotError(f"{folder / MANIFEST} is of the snapshot after step {manifest.step}")
    for entry in manifest.files:
        path = folder / entry.file
        if path.is_file():
            _check(path, entry)
        elif all_files_here:
            raise SnapshotError(f"{path} is missing")
    return manifest


def _check(path: Path, entry: StageFile) -> None:
    nbytes = path.stat().st_size
    if nbytes != entry.nbytes:
        raise SnapshotError(f"{path} is damaged: it has {nbytes:,} bytes, expected {entry.nbytes:,}")
    check_sha256(path, entry.sha256)
