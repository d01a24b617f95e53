"""Reads tensors by name from the files of a snapshot, believing nothing before its SHA-256 has been compared.

Which file has a tensor is looked up in the headers, so a stage finds its tensors whatever stages wrote them,
and files that hold none of them are neither hashed nor needed. A header that has not been verified only
ever serves as such a hint.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tahq.errors import SnapshotError
from tahq.pipeline.checkpoint.manifest import StageMeta

META_KEY = "tahq"
"""Under which a file's metadata has the StageMeta."""


class SnapshotReader(Mapping[str, torch.Tensor]):
    """The tensors of a snapshot by name, read when asked for.

    Args:
        folder: the snapshot's.
        expected: SHA-256 (hex) by file name. Files that are not there are no error until something is
            asked for that no other file has: a host needs only its own stage's.

    Raises:
        SnapshotError: none of the files is there, or one is no safetensors file.
    """

    def __init__(self, folder: Path, expected: Mapping[str, str]) -> None:
        self._folder = folder
        self._expected = dict(expected)
        self._present = [name for name in self._expected if (folder / name).is_file()]
        if not self._present:
            raise SnapshotError(f"none of {', '.join(expected) or 'no files'} is in {folder}; copy the snapshot there")
        self._file_of = {name: file for file in self._present for name in _header_names(folder / file)}
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor in memory of its own, on the CPU.

        Raises:
            KeyError: no file that is here has it (see `tensor`).
            SnapshotError: its file is damaged.
        """
        file = self._file_of[name]
        opened = self._verified(file)
        try:
            # a copy, because what safetensors gives may lie in the mapped file
            tensor: torch.Tensor = opened.get_tensor(name).clone()
        except (SafetensorError, OSError) as error:
            raise SnapshotError(f"cannot read {name} from {self._folder / file}: {error}") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that are here."""
        return tuple(self._present)

    def names(self) -> set[str]:
        """All tensors in the files that are here."""
        return set(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in memory of its own, on the CPU.

        Raises:
            SnapshotError: its file is damaged, or no file here has it; names what is missing.
        """
        if name not in self._file_of:
            self.verify()  # a damaged header is the likelier reason, and says more
            missing = sorted(set(self._expected) - set(self._present))
            there = f"; not there: {', '.join(missing)}" if missing else ": it is of another model"
            raise SnapshotError(f"no file in {self._folder} has {name}{there}")
        return self[name]

    @property
    def meta(self) -> StageMeta:
        """What the first file that is here says about itself."""
        return self.stage_meta(self._present[0])

    def stage_meta(self, file: str) -> StageMeta:
        """What a file says about itself.

        Raises:
            SnapshotError: it is damaged, or was not written by tahq.
        """
        metadata = self._verified(file).metadata() or {}
        try:
            return StageMeta.from_json(metadata[META_KEY])
        except (KeyError, ValueError) as error:
            raise SnapshotError(f"{self._folder / file} has no description by tahq: {error}") from error

    def verify(self) -> None:
        """Compare the hashes of all files that are here; SnapshotError names the first that differs."""
        for file in self._present:
            self._verified(file)

    def close(self) -> None:
        """Let go of the files; reading again opens and verifies them again."""
        self._open.clear()

    def _verified(self, file: str) -> Any:
        """The file, opened once its content is known to be what was written."""
        if file not in self._open:
            path = self._folder / file
            check_sha256(path, self._expected[file])
            self._open[file] = _open(path)
        return self._open[file]


def check_sha256(path: Path, expected: str) -> None:
    """Compare a file's SHA-256, read as a stream.

    Raises:
        SnapshotError: it differs, or the file cannot be read; the message names it.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}; copy it there, or resume from another") from error
    if digest != expected:
        raise SnapshotError(
            f"{path} is damaged: its SHA-256 is {digest[:16]}…, expected {expected[:16]}…; resume from another snapshot"
        )


def _header_names(path: Path) -> list[str]:
    return list(_open(path).keys())


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise SnapshotError(f"{path} is no safetensors file ({error}); resume from another snapshot") from error
