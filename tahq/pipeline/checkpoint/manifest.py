"""A checkpoint's files and manifest, their places, and the hardware and libraries that computed them.

::

    snapshots/
    ├── latest                              name of the newest complete folder, one line
    ├── best                                the same of the one with the lowest validation loss, if losses are known
    └── step-00000100/                      after 100 committed steps
        ├── manifest.json                   its files; written when all stages have reported
        ├── stage-000-1f0c….safetensors     named by stage and content
        └── stage-001-88ab….safetensors

`latest` is a text file rather than a symbolic link, because rsync, object stores and network shares preserve it. Others
may write to the disk, so everything read here is bounded and checked.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import torch

from tahq.errors import SnapshotError
from tahq.pipeline.checkpoint.durable_file import read_bounded

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"
BEST = "best"
FOLDER_PREFIX = "step-"
MAX_LATEST_NBYTES = 1024
MAX_MANIFEST_NBYTES = 64 << 20
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class StageMeta:
    """The description in a stage's file, in plain values: its writer, and the committed steps before it."""

    step: int
    stage: int
    num_stages: int
    block_start: int
    """Its first transformer block."""
    block_stop: int
    """One past its last; with several chunks, other stages have blocks in between."""
    cursor: dict[str, int]
    """Where the data continues."""
    config_hash: str
    versions: dict[str, str] = field(default_factory=dict)
    arithmetic: dict[str, str] = field(default_factory=dict)
    """`arithmetic_of`; empty in files of earlier versions."""

    def to_json(self) -> str:
        """The text in the file's header."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse `to_json`, without keys of later versions; ValueError: not such an object, or fields are missing."""
        names = {entry.name for entry in fields(cls)}
        try:
            return cls(**{name: value for name, value in json.loads(text).items() if name in names})
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not the description of a stage: {error}") from error


@dataclass(frozen=True, slots=True)
class StageFile:
    """A stage's part of a checkpoint."""

    file: str
    sha256: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint. `meta` has `run_id`, the resolved `config`, and anything else to keep."""

    step: int
    files: tuple[StageFile, ...]
    meta: dict[str, Any]

    @property
    def run_id(self) -> int:
        """The run's number, which a resumed run keeps."""
        return int(self.meta["run_id"])

    @property
    def config(self) -> dict[str, Any]:
        """The run's resolved configuration."""
        return dict(self.meta["config"])

    @property
    def sha256(self) -> dict[str, str]:
        """Hash by file name, for `SnapshotReader`."""
        return {entry.file: entry.sha256 for entry in self.files}

    def to_json(self) -> str:
        """The text of manifest.json."""
        files = [asdict(entry) for entry in self.files]
        content = {"format": FORMAT, "step": self.step, "meta": self.meta, "files": files}
        return json.dumps({**content, "sha256": _digest(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse `to_json`.

        Raises:
            ValueError, KeyError, TypeError, RecursionError: not a manifest of this format, or damaged.
        """
        content = json.loads(text)
        digest = content.pop("sha256", None)  # absent in older manifests
        if digest is not None and digest != _digest(content):
            raise ValueError("its content was changed")
        if set(content) != {"format", "step", "meta", "files"}:
            raise ValueError(f"expected format, step, meta and files; got {', '.join(sorted(content))}")
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, expected {FORMAT}; use the tahq that wrote it")
        files = []
        for entry in content["files"]:
            name = str(entry["file"])
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not a plain file name")
            files.append(StageFile(name, str(entry["sha256"]), int(entry["nbytes"])))
        manifest = cls(int(content["step"]), tuple(files), dict(content["meta"]))
        _ = manifest.run_id, manifest.config  # a KeyError now, not when a run needs them
        return manifest


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint's folder.

    Raises:
        SnapshotError: it is missing, damaged, or of a format that this version does not know.
    """
    path = folder / MANIFEST
    try:
        return Manifest.from_json(read_bounded(path, MAX_MANIFEST_NBYTES).decode())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}; resume from another checkpoint") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SnapshotError(
            f"{path} is not a usable manifest ({type(error).__name__}: {error}); resume from another checkpoint"
        ) from error


def snapshot_name(step: int) -> str:
    """Name of the folder of the checkpoint after this many committed steps."""
    return f"{FOLDER_PREFIX}{step:08d}"


def snapshot_folder(snapshots: Path, step: int) -> Path:
    """Path of that folder."""
    return snapshots / snapshot_name(step)


def snapshot_folders(snapshots: Path) -> dict[int, Path]:
    """The existing folders of checkpoints, complete or not, by step in ascending order."""
    paths = {
        int(number): path
        for path in snapshots.glob(f"{FOLDER_PREFIX}*")
        if (number := path.name.removeprefix(FOLDER_PREFIX)).isdecimal() and path.is_dir()
    }
    return dict(sorted(paths.items()))


def latest_folder(snapshots: Path) -> Path:
    """The newest complete checkpoint.

    Raises:
        SnapshotError: there is none, or `latest` cannot be read or names something else.
    """
    path = snapshots / LATEST
    try:
        name = read_bounded(path, MAX_LATEST_NBYTES).decode().strip()
    except FileNotFoundError as error:
        raise SnapshotError(f"no complete checkpoint in {snapshots}: nothing to resume, start the run anew") from error
    except ValueError as error:
        raise SnapshotError(f"cannot read {path}: {error}") from error
    folder = snapshots / name
    if folder not in snapshot_folders(snapshots).values() or not (folder / MANIFEST).is_file():
        raise SnapshotError(
            f"{path} names {name[:80]!r}, which is not a complete checkpoint; write another name into it"
        )
    return folder


def best_folder(snapshots: Path) -> Path | None:
    """The checkpoint that `best` names; None: there is none, or it is not complete."""
    try:
        folder = snapshots / read_bounded(snapshots / BEST, MAX_LATEST_NBYTES).decode().strip()
    except (OSError, ValueError):
        return None
    is_whole = folder in snapshot_folders(snapshots).values() and (folder / MANIFEST).is_file()
    return folder if is_whole else None


def read_latest(snapshots: Path) -> tuple[Path, Manifest]:
    """Folder and manifest of the newest complete checkpoint; SnapshotError if there is none."""
    folder = latest_folder(snapshots)
    return folder, read_manifest(folder)


# -- what computed a checkpoint ----------------------------------------------------------------------


def arithmetic_of(device: torch.device, codec_backend: str) -> dict[str, str]:
    """The hardware and libraries on which the bits of a stage's results depend, as short texts by name.

    A stage that continues on another processor, library or number of threads still runs, but sooner or later rounds
    differently; so a checkpoint records these, and a difference is announced. `codec_backend` is `wire.backend`.
    """
    own = "triton" if device.type == "cuda" else "cpu"
    common = {"torch": str(torch.__version__), "codec backend": own if codec_backend == "auto" else codec_backend}
    if device.type == "cuda":
        return common | {
            "device": torch.cuda.get_device_name(device),
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return common | {
        "device": next(models, "") or platform.processor() or platform.machine(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "matrix library": "MKL" if torch.backends.mkl.is_available() else "other",  # type: ignore[no-untyped-call]
        "threads": str(torch.get_num_threads()),
    }


def arithmetic_differences(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Differences of two `arithmetic_of`, one text each: ``device: AMD EPYC 7B13 -> Intel Xeon 8481C``.

    Names that only one side has come from another version of tahq or another kind of device, and are ignored.
    """
    common = (name for name in before if name in now)
    return tuple(f"{name}: {before[name]} -> {now[name]}" for name in common if before[name] != now[name])
