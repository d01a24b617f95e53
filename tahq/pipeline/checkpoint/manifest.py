"""What a snapshot is made of, and where it lies.

::

    snapshots/
    ├── latest                              the name of the newest complete folder, one line
    └── step-00000100/                      after 100 committed steps
        ├── manifest.json                   what belongs to it; written when all stages have reported
        ├── stage-000-1f0c….safetensors     named by stage and content
        └── stage-001-88ab….safetensors

`latest` is a text file rather than a symbolic link, because rsync, object stores and shares keep it.
What is read here comes from a disk that others write to: it is checked, and complained about by name.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from tahq.errors import SnapshotError

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"
FOLDER_PREFIX = "step-"


@dataclass(frozen=True, slots=True)
class StageMeta:
    """What a stage's file says about itself, in plain values.

    Attributes:
        step: committed steps behind it.
        stage: who wrote it.
        num_stages: stages of the run that wrote it.
        block_start: its first transformer block.
        block_stop: one past its last; of several chunks, whose blocks others have between.
        cursor: where the data goes on.
        config_hash: of the configuration that it ran under.
        skipped: steps skipped in a row just before, for non-finite gradients.
        versions: of tahq and torch.
        arithmetic: what computed it (`arithmetic.py`); empty in files of earlier versions.
    """

    step: int
    stage: int
    num_stages: int
    block_start: int
    block_stop: int
    cursor: dict[str, int]
    config_hash: str
    skipped: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    arithmetic: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """As it stands in the file's header."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Back from `to_json`; keys of later versions are ignored.

        Raises:
            ValueError: no such object, or fields are missing.
        """
        values = json.loads(text)
        names = {entry.name for entry in fields(cls)}
        try:
            return cls(**{name: value for name, value in values.items() if name in names})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not the description of a stage: {error}") from error


@dataclass(frozen=True, slots=True)
class StageFile:
    """A stage's part of a snapshot; `tensors` are the names in it, where they are known."""

    file: str
    sha256: str
    nbytes: int
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What belongs to a snapshot. `meta` holds `run_id`, the resolved `config`, and whatever else was given."""

    step: int
    files: tuple[StageFile, ...]
    meta: dict[str, Any]

    @property
    def run_id(self) -> int:
        """The run's number, which a resumed run keeps."""
        return int(self.meta["run_id"])

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration that the run had."""
        return dict(self.meta["config"])

    @property
    def sha256(self) -> dict[str, str]:
        """Hash by file name, as `SnapshotReader` expects it."""
        return {entry.file: entry.sha256 for entry in self.files}

    def to_json(self) -> str:
        """As it stands in manifest.json."""
        files = [asdict(entry) for entry in self.files]
        content = {"format": FORMAT, "step": self.step, "meta": self.meta, "files": files}
        return json.dumps({**content, "sha256": _digest(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Back from `to_json`.

        Raises:
            ValueError, KeyError, TypeError: it is not a manifest of this format, or is damaged.
        """
        content = json.loads(text)
        digest = content.pop("sha256", None)  # older ones have none
        if digest is not None and digest != _digest(content):
            raise ValueError("its content is not what was written")
        if set(content) != {"format", "step", "meta", "files"}:
            raise ValueError(f"expected format, step, meta and files; got {', '.join(sorted(content))}")
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, expected {FORMAT}; use the tahq that wrote it")
        manifest = cls(int(content["step"]), tuple(map(_stage_file, content["files"])), dict(content["meta"]))
        _ = manifest.run_id, manifest.config  # a KeyError now, not when a run needs them
        return manifest


def _digest(content: dict[str, Any]) -> str:
    """SHA-256, in hex, of a manifest without its own."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _stage_file(entry: dict[str, Any]) -> StageFile:
    name = str(entry["file"])
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a plain file name")
    return StageFile(name, str(entry["sha256"]), int(entry["nbytes"]), tuple(map(str, entry["tensors"])))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of one snapshot's folder.

    Raises:
        SnapshotError: it is missing, damaged, or of a format that this version does not know.
    """
    path = folder / MANIFEST
    try:
        return Manifest.from_json(path.read_text())
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}; resume from another snapshot") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SnapshotError(
            f"{path} is no usable manifest ({type(error).__name__}: {error}); resume from another snapshot"
        ) from error


def snapshot_name(step: int) -> str:
    """What the folder of the snapshot after so many committed steps is called."""
    return f"{FOLDER_PREFIX}{step:08d}"


def snapshot_folder(snapshots: Path, step: int) -> Path:
    """Where that folder lies."""
    return snapshots / snapshot_name(step)


def snapshot_folders(snapshots: Path) -> dict[int, Path]:
    """The folders of snapshots that are there, complete or not, by step in ascending order."""
    paths = {
        int(number): path
        for path in snapshots.glob(f"{FOLDER_PREFIX}*")
        if (number := path.name.removeprefix(FOLDER_PREFIX)).isdecimal() and path.is_dir()
    }
    return dict(sorted(paths.items()))


def latest_folder(snapshots: Path) -> Path:
    """The newest complete snapshot.

    Raises:
        SnapshotError: there is none, or `latest` names something that is not there.
    """
    try:
        name = (snapshots / LATEST).read_text().strip()
    except FileNotFoundError as error:
        raise SnapshotError(f"no complete snapshot in {snapshots}: nothing to resume, start the run anew") from error
    except (OSError, ValueError) as error:
        raise SnapshotError(f"cannot read {snapshots / LATEST}: {error}") from error
    folder = snapshots / name
    if folder not in snapshot_folders(snapshots).values() or not (folder / MANIFEST).is_file():
        raise SnapshotError(f"{snapshots / LATEST} says {name!r}, which is no complete snapshot; write the name of one")
    return folder


def read_latest(snapshots: Path) -> tuple[Path, Manifest]:
    """Folder and manifest of the newest complete snapshot; SnapshotError if there is none."""
    folder = latest_folder(snapshots)
    return folder, read_manifest(folder)
