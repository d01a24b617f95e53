"""The checkpoints of a run: publishing, pruning, and choosing the one to resume from.

A crash at any moment leaves a complete checkpoint to return to (manifest.py draws the folders):
- a file appears under its name only when it is complete and durable, and its name carries its content's hash, so no
  file ever changes under its name;
- the manifest comes after the files, `latest` after the manifest; readers start from `latest`;
- what a killed writer leaves is removed by the next write of its stage, the next `publish` or the next `prune`.

Tensors are named `model/<canonical name>` and `optimizer/<state>/<canonical name>`, never by stage, so a run can be
resumed with another number of stages. Of an INT8 weight `model/` has the codes, `model_zero/` and `model_scale/` the
rest. Weights that are not trained (`model.frozen_layers`) are read from `model.path`, or drawn, again; of each
`frozen/<canonical name>` has a sum over its bits, to compare.
"""

import logging
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tahq.errors import SnapshotError
from tahq.pipeline.checkpoint.durable_file import wait_for_room, write_text_durably
from tahq.pipeline.checkpoint.manifest import (
    BEST,
    LATEST,
    MANIFEST,
    Manifest,
    StageFile,
    best_folder,
    latest_folder,
    read_manifest,
    snapshot_folder,
    snapshot_folders,
)
from tahq.pipeline.checkpoint.stage_file import check_sha256

SET_ASIDE = MANIFEST + ".left"
"""Name of the manifest of a checkpoint that the run has turned back from."""

log = logging.getLogger(__name__)


def publish(
    snapshots: Path, step: int, files: Iterable[StageFile], meta: Mapping[str, Any], give_up_s: float = 0.0
) -> Manifest:
    """Declare a checkpoint complete: write its manifest, then point `latest` to it; wait for room on a full disk.

    Other files in its folder, left by killed writers or another division of the model, are removed.

    `files` has one per stage, each reported durable; `give_up_s` is how long to wait for room, for each of the two.

    Raises:
        SnapshotError: it cannot be written; `latest` still names the previous checkpoint.
    """
    folder = snapshot_folder(snapshots, step)
    manifest = Manifest(step, tuple(sorted(files, key=lambda entry: entry.file)), dict(meta))
    wait_for_room(lambda: write_text_durably(folder / MANIFEST, manifest.to_json()), give_up_s)
    wait_for_room(lambda: write_text_durably(snapshots / LATEST, folder.name + "\n"), give_up_s)
    _remove_unlisted(folder, manifest)
    return manifest


def mark_best(snapshots: Path, step: int) -> None:
    """Have `best` name this checkpoint, which is complete; SnapshotError: it cannot be written."""
    write_text_durably(snapshots / BEST, snapshot_folder(snapshots, step).name + "\n")


def best_step(snapshots: Path) -> int:
    """Steps behind the checkpoint that `best` names; 0: there is none."""
    best = best_folder(snapshots)
    return next((step for step, folder in snapshot_folders(snapshots).items() if folder == best), 0)


def discard(snapshots: Path, step: int) -> None:
    """Remove an incomplete checkpoint, which takes the room of the next one.

    A complete checkpoint in the same folder, of an earlier start, stays. SnapshotError: it cannot be removed.
    """
    folder = snapshot_folder(snapshots, step)
    if (folder / MANIFEST).is_file():
        _remove_unlisted(folder, read_manifest(folder))
    elif folder.is_dir():
        _remove_folder(folder)


def prune(snapshots: Path, keep: int, complete: int = 0, base: int | None = None, best: int = 0) -> list[Path]:
    """Remove all but the newest `keep` checkpoints and the best one, and what killed writers left before them.

    The checkpoint that `latest` names stays, and so do newer ones, which may be in progress. Without a `latest`, on a
    host that has only its own stage's files, `complete` replaces it, and every older folder counts as a checkpoint.

    Args:
        snapshots: the run's folder.
        keep: complete checkpoints to keep, at least 1.
        complete: steps behind the newest one that the coordinator has; 0: it has none, so nothing is removed.
        base: steps behind the oldest one that a lost stage may restart from; it and newer ones stay. None: no limit.
        best: steps behind the best one, where `best` does not name it; 0: there is none.

    Returns:
        The folders that were removed.

    Raises:
        SnapshotError: one cannot be removed.
    """
    folders = snapshot_folders(snapshots)
    if (snapshots / LATEST).is_file():
        ascending = list(folders.values())
        older = ascending[: ascending.index(latest_folder(snapshots))]
        whole = [folder for folder in older if (folder / MANIFEST).is_file()]
        stale = [folder for folder in older if folder not in whole[max(0, len(whole) - (keep - 1)) :]]
    else:
        stale = [folder for step, folder in folders.items() if step <= complete][:-keep]
    kept = {best_folder(snapshots), folders.get(best)}
    stale = [folder for folder in stale if folder not in kept]
    if base is not None:
        stale = [folder for step, folder in folders.items() if folder in stale and step < base]
    for folder in stale:
        _remove_folder(folder)
    return stale


def _remove_folder(folder: Path) -> None:
    try:
        (folder / MANIFEST).unlink(missing_ok=True)  # first, so that a half-removed folder is not a checkpoint
        with suppress(FileNotFoundError):  # another process removes it too
            shutil.rmtree(folder)
    except OSError as error:
        raise SnapshotError(f"cannot remove {folder}: {error.strerror}; remove it by hand") from error


def _remove_unlisted(folder: Path, manifest: Manifest) -> None:
    """Remove the files of a checkpoint's folder that do not belong to it."""
    listed = {MANIFEST, *(entry.file for entry in manifest.files)}
    try:
        for path in folder.iterdir():
            if path.name not in listed:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise SnapshotError(f"cannot remove {error.filename}: {error.strerror}; remove it by hand") from error


# -- choosing ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChosenSnapshot:
    """Folder and manifest of a checkpoint, and why it is not the newest (empty: it is)."""

    folder: Path
    manifest: Manifest
    warnings: tuple[str, ...] = ()


def choose_snapshot(snapshots: Path, *, all_files_here: bool, before: float = math.inf) -> ChosenSnapshot:
    """The newest checkpoint that is complete and undamaged; every file that is here is read and its hash compared.

    `latest` names the one to use. If it is damaged, the one before it is taken, and so on, with a warning for each;
    never one newer than `latest`, which may belong to a history that was turned back from. Only if `latest` names no
    complete checkpoint does the newest complete one replace it.

    `all_files_here` says whether a file that is not here is missing, or may be on its stage's host; only checkpoints
    with fewer steps than `before` are taken.

    Raises:
        SnapshotError: there is none; the message says what is wrong with each.
    """
    reasons = []
    for candidate in _candidates(snapshots):
        if isinstance(candidate, str):
            reasons.append(candidate)
            continue
        try:
            manifest = _verified(candidate, all_files_here=all_files_here, before=before)
        except SnapshotError as error:
            reasons.append(str(error).removesuffix("; resume from another checkpoint"))
        else:
            warnings = tuple(f"{reason}; resuming from {candidate.name} instead" for reason in reasons)
            return ChosenSnapshot(candidate, manifest, warnings)
    raise SnapshotError("; ".join([*reasons, "there is no other undamaged checkpoint"]))


def turn_back(snapshots: Path, chosen: Path) -> None:
    """Make this checkpoint the latest and disable newer ones, because the run continues from here.

    The files of newer ones stay until they are overwritten. Called by the process that holds the run's folder.

    Raises:
        SnapshotError: a file cannot be written or renamed.
    """
    folders = list(snapshot_folders(snapshots).values())
    for manifest in (folder / MANIFEST for folder in folders[folders.index(chosen) + 1 :]):
        if manifest.is_file():
            try:
                manifest.replace(manifest.with_name(SET_ASIDE))
            except OSError as error:
                raise SnapshotError(f"cannot rename {manifest}: {error.strerror}; remove {manifest.parent}") from error
            log.warning("the run turns back from %s; its manifest is now called %s", manifest.parent.name, SET_ASIDE)
    if best_folder(snapshots) is None:
        (snapshots / BEST).unlink(missing_ok=True)
    with suppress(SnapshotError):
        if latest_folder(snapshots) == chosen:
            return
    write_text_durably(snapshots / LATEST, chosen.name + "\n")


def _candidates(snapshots: Path) -> Iterator[Path | str]:
    """Folders with a manifest, the preferred one first; or what is wrong with `latest`."""
    complete = [folder for folder in snapshot_folders(snapshots).values() if (folder / MANIFEST).is_file()]
    try:
        latest = latest_folder(snapshots)
    except SnapshotError as error:
        if not complete:
            raise
        yield str(error)
        yield from reversed(complete)
    else:
        yield from reversed(complete[: complete.index(latest) + 1])


def _verified(folder: Path, *, all_files_here: bool, before: float) -> Manifest:
    manifest = read_manifest(folder)
    if snapshot_folders(folder.parent).get(manifest.step) != folder:
        raise SnapshotError(f"{folder / MANIFEST} belongs to the checkpoint after step {manifest.step}")
    if manifest.step >= before:
        raise SnapshotError(f"a stage cannot begin at {folder.name}")
    for entry in manifest.files:
        path = folder / entry.file
        if path.is_file():
            nbytes = path.stat().st_size
            if nbytes != entry.nbytes:
                raise SnapshotError(f"{path} is damaged: it has {nbytes:,} bytes, expected {entry.nbytes:,}")
            check_sha256(path, entry.sha256)
        elif all_files_here:
            raise SnapshotError(f"{path} is missing")
    return manifest
