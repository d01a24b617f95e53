"""The file of one stage in a checkpoint: written as a stream, and read by tensor name once its hash is verified.

The format is safetensors: u64 length of the header, little-endian; the header as JSON, name -> dtype, shape, offsets;
then the tensors' bytes without gaps. Writing holds one tensor in memory at a time and hashes it on its way to the disk,
so corruption on the disk is detected on reading. (`safetensors.torch.save_file` wants all tensors on the
CPU at once, needs another read for the hash, and hides the errno of a full disk.)
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from tahq.errors import SnapshotError
from tahq.fault_points import SNAPSHOT, reached
from tahq.pipeline.checkpoint.durable_file import TEMPORARY_SUFFIX, sha256_of, write_durably
from tahq.pipeline.checkpoint.manifest import StageFile, StageMeta
from tahq.units import counted

META_KEY = "tahq"
"""Key of the StageMeta in a file's metadata."""
NAME_DIGITS = 16
"""Hexadecimal digits of the content's hash in a file's name."""
DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
HEADER_ALIGNMENT = 8


def write_stage(
    folder: Path,
    stage: int,
    tensors: Mapping[str, torch.Tensor],
    meta: StageMeta,
    working: Callable[[str], None] = lambda activity: None,
) -> StageFile:
    """Write one stage's part of a checkpoint, durably, or not at all, into a folder that is made if necessary.

    Tensors, on any device, come by their names in the checkpoint; one process per stage writes. `working` is called
    with the bytes that are written.

    Raises:
        SnapshotError: the file cannot be written (DiskFullError: for lack of room); nothing is left of it.
    """
    # widest types first, so that every tensor is aligned to its own type
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header = _header(names, tensors, {META_KEY: meta.to_json()})
    digest, nbytes = hashlib.sha256(), 0
    written = counted(working, "checkpoint", len(header) + sum(tensor.nbytes for tensor in tensors.values()))

    def contents() -> Iterator[Any]:
        yield from (len(header).to_bytes(8, "little"), header)
        for name in names:
            yield tensors[name].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data

    def write(file: BinaryIO) -> str:
        nonlocal nbytes
        for content in contents():
            digest.update(content)
            file.write(content)
            written(len(content))
        nbytes = file.tell()
        reached(SNAPSHOT, stage=stage, step=meta.step)
        return f"stage-{stage:03d}-{digest.hexdigest()[:NAME_DIGITS]}.safetensors"

    path = write_durably(folder / f"stage-{stage:03d}{TEMPORARY_SUFFIX}", write)
    return StageFile(path.name, digest.hexdigest(), nbytes)


def _header(names: list[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % HEADER_ALIGNMENT)


class SnapshotReader:
    """The tensors of a checkpoint by name, read on demand; nothing is trusted before its file's hash is verified.

    Headers say which file has a tensor, so a stage finds its tensors whatever stages wrote them, and files that hold
    none of them are neither hashed nor needed. An unverified header only serves as this hint.

    `expected` has the SHA-256 (hex) by file name; `working` is called with the present activity. A missing file is an
    error only when something is asked for that no other file has: a host needs only its own stage's.

    Raises:
        SnapshotError: none of the files exists, or one is not a safetensors file.
    """

    def __init__(
        self, folder: Path, expected: Mapping[str, str], working: Callable[[str], None] = lambda activity: None
    ) -> None:
        self._folder = folder
        self._working = working
        self._read = counted(working, "reading the checkpoint", 0)
        self._expected = dict(expected)
        self.files = tuple(name for name in self._expected if (folder / name).is_file())
        """Names of the files that are here."""
        if not self.files:
            names = ", ".join(expected) or "no files"
            raise SnapshotError(f"none of {names} is in {folder}; copy the checkpoint there")
        self._file_of = {name: file for file in self.files for name in _open(folder / file).keys()}  # noqa: SIM118
        self._open: dict[str, Any] = {}

    def names(self) -> set[str]:
        """All tensors in the files that are here."""
        return set(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in memory of its own, on the CPU.

        Raises:
            SnapshotError: its file is damaged, or no file here has it; names what is missing.
        """
        file = self._file_of.get(name)
        if file is None:
            self.verify()  # a damaged header is more likely, and says more
            missing = sorted(set(self._expected) - set(self.files))
            there = f"; missing here: {', '.join(missing)}" if missing else ": it is from another model"
            raise SnapshotError(f"no file in {self._folder} has {name}{there}")
        opened = self._verified(file)
        try:
            # a copy, because the tensor may be in the mapped file
            tensor: torch.Tensor = opened.get_tensor(name).clone()
        except (SafetensorError, OSError) as error:
            raise SnapshotError(f"cannot read {name} from {self._folder / file}: {error}") from error
        self._read(tensor.nbytes)
        return tensor

    def stage_meta(self, file: str) -> StageMeta:
        """The description in a file's header; SnapshotError if it is damaged or was not written by tahq."""
        metadata = self._verified(file).metadata() or {}
        try:
            return StageMeta.from_json(metadata[META_KEY])
        except (KeyError, ValueError) as error:
            raise SnapshotError(f"{self._folder / file} was not written by tahq: {error}") from error

    def verify(self) -> None:
        """Compare the hashes of all files that are here; SnapshotError names the first that differs."""
        for file in self.files:
            self._verified(file)

    def close(self) -> None:
        """Release the files; reading again opens and verifies them again."""
        self._open.clear()

    def _verified(self, file: str) -> Any:
        """The file, opened once its content is known to be what was written."""
        if file not in self._open:
            path = self._folder / file
            check_sha256(path, self._expected[file], self._working)
            self._open[file] = _open(path)
            nbytes = sum((self._folder / each).stat().st_size for each in self._open)
            self._read = counted(self._working, "reading the checkpoint", nbytes)
        return self._open[file]


def check_sha256(path: Path, expected: str, working: Callable[[str], None] = lambda activity: None) -> None:
    """Compare a file's SHA-256, read as a stream; SnapshotError names a file that differs or cannot be read."""
    try:
        digest = sha256_of(path, working)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}; copy it there, or resume from another") from error
    if digest != expected:
        raise SnapshotError(
            f"{path} is damaged: its SHA-256 is {digest[:16]}…, expected {expected[:16]}…; resume from another "
            "checkpoint"
        )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise SnapshotError(f"{path} is not a safetensors file ({error}); resume from another checkpoint") from error
