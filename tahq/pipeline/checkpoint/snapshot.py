"""Snapshots of committed steps: written so that a crash at any moment leaves a whole one to go back to.

Invariants (manifest.py draws the folders):
- a file appears under its name only when it is whole and durable, and its name carries its content's hash, so
  no file ever changes under its name;
- the manifest comes after the files, `latest` after the manifest; readers start from `latest`;
- what a killed writer leaves goes with the next write of its stage, the next `publish` or the next `prune`.

Tensors are named `model/<canonical name>` and `optimizer/<state>/<canonical name>`, never by stage, so a run
can be resumed with another number of stages. Of a weight in INT8 `model/` has the codes, `model_zero/` and
`model_scale/` the rest.
"""

import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tahq.errors import SnapshotError
from tahq.fault_points import SNAPSHOT, reached
from tahq.pipeline.checkpoint.durable_file import TEMPORARY_SUFFIX, write_durably, write_text_durably
from tahq.pipeline.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    Manifest,
    StageFile,
    StageMeta,
    latest_folder,
    read_latest,
    read_manifest,
    snapshot_folder,
    snapshot_folders,
    snapshot_name,
)
from tahq.pipeline.checkpoint.reader import META_KEY, SnapshotReader
from tahq.pipeline.checkpoint.safetensors_writer import write_safetensors

__all__ = [
    "Manifest",
    "SnapshotReader",
    "StageFile",
    "StageMeta",
    "discard",
    "latest_folder",
    "prune",
    "publish",
    "read_latest",
    "read_manifest",
    "snapshot_folder",
    "snapshot_name",
    "write_stage",
]

NAME_DIGITS = 16
"""Hexadecimal digits of the content's hash in a file's name."""


def write_stage(folder: Path, stage: int, tensors: Mapping[str, torch.Tensor], meta: StageMeta) -> StageFile:
    """Write one stage's part of a snapshot, durably, or not at all.

    Args:
        folder: `snapshot_folder(snapshots, step)`; made if it is not there.
        stage: the writer; one process a stage.
        tensors: by their names in the snapshot; on any device.
        meta: goes into the file's header.

    Returns:
        The file's name, SHA-256 and size, for the coordinator's manifest.

    Raises:
        SnapshotError: the disk is full, or would not take it; the message names the file, and nothing
            is left of it.
    """
    digest = ""

    def write(file: BinaryIO) -> str:
        nonlocal digest
        digest = write_safetensors(file, tensors, {META_KEY: meta.to_json()})
        reached(SNAPSHOT, stage=stage, step=meta.step)
        return f"stage-{stage:03d}-{digest[:NAME_DIGITS]}.safetensors"

    path = write_durably(folder / f"stage-{stage:03d}{TEMPORARY_SUFFIX}", write)
    return StageFile(path.name, digest, path.stat().st_size, tuple(sorted(tensors)))


def publish(snapshots: Path, step: int, files: Iterable[StageFile], meta: Mapping[str, Any]) -> Manifest:
    """Declare a snapshot complete: write its manifest, then point `latest` at it.

    What else lies in its folder, left by killed writers or by another division of the model, is removed.
    Names of tensors that a `StageFile` lacks are read from the file, where it is at hand.

    Args:
        snapshots: the run's folder of snapshots.
        step: committed steps behind it.
        files: one a stage, each reported durable.
        meta: `run_id`, the resolved `config`, and what else shall be kept; plain values.

    Returns:
        What was written.

    Raises:
        SnapshotError: it could not be written; `latest` still names the one before.
    """
    missing = sorted({"run_id", "config"} - set(meta))
    if missing:
        raise SnapshotError(f"a manifest needs {', '.join(missing)}; got {', '.join(meta) or 'nothing'}")
    folder = snapshot_folder(snapshots, step)
    entries = sorted(files, key=lambda entry: entry.file)
    manifest = Manifest(step, tuple(_with_tensor_names(folder, entry) for entry in entries), dict(meta))
    write_text_durably(folder / MANIFEST, manifest.to_json())
    write_text_durably(snapshots / LATEST, folder.name + "\n")
    _sweep(folder, {MANIFEST, *(entry.file for entry in manifest.files)})
    return manifest


def discard(snapshots: Path, step: int) -> None:
    """Remove what stages have written of a snapshot that came to nothing: it takes the room of the next one.

    A complete snapshot in the same folder, of an earlier start of the run, stays.

    Raises:
        SnapshotError: it could not be removed.
    """
    folder = snapshot_folder(snapshots, step)
    if (folder / MANIFEST).is_file():
        _sweep(folder, {MANIFEST, *(entry.file for entry in read_manifest(folder).files)})
    elif folder.is_dir():
        _remove_folder(folder)


def _with_tensor_names(folder: Path, entry: StageFile) -> StageFile:
    if entry.tensors or not (folder / entry.file).is_file():
        return entry
    reader = SnapshotReader(folder, {entry.file: entry.sha256})
    return replace(entry, tensors=tuple(sorted(reader.names())))


def prune(snapshots: Path, keep: int, complete: int = 0, base: int | None = None) -> list[Path]:
    """Remove all but the newest `keep` snapshots, and what killed writers left before them.

    What `latest` names stays, and so does whatever is newer: it may be under way. Where there is no
    `latest`, on a host that has only its own stage's files, `complete` stands for it, and every older folder
    counts as a snapshot.

    Args:
        snapshots: the run's folder of snapshots.
        keep: complete snapshots to keep, at least 1.
        complete: steps behind the newest one that the coordinator has; 0: it has none, so nothing is removed.
        base: steps behind the oldest one at which a lost stage may begin again; it and newer ones stay. None: no such.

    Returns:
        The folders that were removed.

    Raises:
        SnapshotError: one could not be removed.
    """
    folders = snapshot_folders(snapshots)
    if (snapshots / LATEST).is_file():
        stale = _older_than_latest(folders, latest_folder(snapshots), keep)
    else:
        stale = [folder for step, folder in folders.items() if step <= complete][:-keep]
    if base is not None:
        stale = [folder for folder in stale if folder in [folders[step] for step in folders if step < base]]
    for folder in stale:
        _remove_folder(folder)
    return stale


def _older_than_latest(folders: Mapping[int, Path], latest: Path, keep: int) -> list[Path]:
    """What comes before `latest`, but for the newest complete ones of it."""
    ascending = list(folders.values())
    older = ascending[: ascending.index(latest)]
    complete = [folder for folder in older if (folder / MANIFEST).is_file()]
    kept = complete[max(0, len(complete) - (keep - 1)) :]
    return [folder for folder in older if folder not in kept]


def _remove_folder(folder: Path) -> None:
    try:
        # the manifest first: what is half removed is no snapshot any more
        (folder / MANIFEST).unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # somebody else is removing it too
            shutil.rmtree(folder)
    except OSError as error:
        raise SnapshotError(f"cannot remove {folder}: {error.strerror}; remove it by hand") from error


def _sweep(folder: Path, listed: set[str]) -> None:
    """Remove the files of a folder that are not listed."""
    for path in folder.iterdir():
        if path.name in listed:
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise SnapshotError(f"cannot remove {path}: {error.strerror}; remove it by hand") from error
