"""Weights from a folder of safetensors: only the requested tensors are read, and of the Hub only their files fetched.

A folder has `model.safetensors`, or shards and `model.safetensors.index.json`. Each tensor is copied out of the
memory-mapped file into the caller's memory and converted to its dtype. A parameter of stacked experts is read whole, or
put together from the tensors of each expert, in the file's dtype. Pickled weights (`.bin`) are never opened,
because unpickling runs code from the file.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tahq.errors import ModelError
from tahq.hub import download, is_hub_name, local_folder, weight_files
from tahq.models.families import FamilyLayout

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_NBYTES = 2**26
_WORDS = {2: torch.int16, 4: torch.int32}


def one_line(error: BaseException) -> str:
    """A library's error as one line: its type and its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def read_json(path: Path, max_nbytes: int) -> dict[str, Any]:
    """A JSON object from a file of at most `max_nbytes`; ModelError, one line, if it is anything else."""
    try:
        with path.open("rb") as file:
            content = file.read(max_nbytes + 1)
        if len(content) > max_nbytes:
            raise ModelError(f"{path} is larger than {max_nbytes:,} bytes, the most that tahq reads of such a file")
        value = json.loads(content)
    except RecursionError:
        raise ModelError(f"{path} cannot be read: its JSON is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def sum_of_bits(weights: torch.Tensor) -> torch.Tensor:
    """The sum over a tensor's words, int64 on the CPU: another one where bits differ, but for rare accidents."""
    return weights.contiguous().view(_WORDS[weights.itemsize]).sum(dtype=torch.int64).cpu()


class FilledWeight(Protocol):
    """A parameter that can be filled: a tensor, or a weight that is stored in another form."""

    @property
    def shape(self) -> torch.Size:
        """As in the whole model."""

    def numel(self) -> int:
        """Elements."""

    def copy_(self, values: torch.Tensor, /) -> object:
        """Store these values, of any float type and device."""


@dataclass(frozen=True, slots=True)
class FolderWeights:
    """Names of a folder's tensors, and the file that each is in; `path`: the folder's, or a name on the Hub."""

    path: str
    folder: Path
    layout: FamilyLayout
    file_of: Mapping[str, str]

    @classmethod
    def find(cls, path: str, layout: FamilyLayout) -> "FolderWeights":
        """Read the index, or the single file's header; names may lack the trunk's prefix (`transformer`, `model`).

        ModelError if there are no safetensors, or the index is damaged or names missing files.
        """
        folder, is_on_hub = local_folder(path), is_hub_name(path)
        if (folder / INDEX_FILE).exists():
            return cls(path, folder, layout, _read_index(folder, has_all=not is_on_hub))
        if is_on_hub:
            return cls(path, folder, layout, weight_files(path, SINGLE_FILE))
        if (folder / SINGLE_FILE).exists():
            with _opened(folder / SINGLE_FILE) as handle:
                return cls(path, folder, layout, dict.fromkeys(handle.keys(), SINGLE_FILE))
        if any(folder.glob("*.bin")):
            raise ModelError(
                f"{folder} has pickled weights (.bin), which tahq never opens; convert them to safetensors, "
                "for example with save_pretrained of transformers"
            )
        raise ModelError(f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")

    def fetch(self, names: Iterable[str], told: Callable[[str, int, int], None]) -> None:
        """Download the files of these tensors, by canonical name, from the Hub, unless they are here.

        `told` is called with a file's name, the bytes of it that are here, and all of them.
        """
        for file in sorted({self.file_of[stored] for name in names for stored in self._stored_names(name)}):
            if not (self.folder / file).exists() and is_hub_name(self.path):
                download(self.path, file, partial(told, file))

    def read_into(
        self,
        parameters: Mapping[str, FilledWeight],
        sources: Mapping[str, str],
        filled: Callable[[int], None] = lambda numel: None,
    ) -> None:
        """Copy tensors from the files into `parameters`, one at a time, by canonical name, of any dtype and device.

        `sources`: canonical name -> canonical name to read instead (a tied head reads the embedding). `filled` is
        called with the number of elements of each tensor that has been read. ModelError if a tensor is missing, has
        another shape, or does not hold floats.
        """
        stored = {name: self._stored_names(sources.get(name, name)) for name in parameters}
        opened: dict[str, Any] = {}
        for name in sorted(parameters, key=lambda name: self.file_of[stored[name][0]]):
            shape, parts = parameters[name].shape, stored[name]
            if len(parts) == 1:
                whole = self._read(opened, parts[0], shape)
            else:
                whole = self._stacked(opened, name, parts, shape)
            with torch.no_grad():
                parameters[name].copy_(whole)
            filled(parameters[name].numel())

    def _stacked(self, opened: dict[str, Any], name: str, parts: Sequence[str], shape: torch.Size) -> torch.Tensor:
        """The parts of all experts [E, rows, columns], those of an expert one below the other."""
        num_parts = len(self.layout.names_in_files(name))
        if len(parts) != shape[0] * num_parts:
            raise ModelError(
                f"{self.folder} has {len(parts) // num_parts} experts for {name}, config.json expects {shape[0]}"
            )
        of_part = torch.Size((shape[1] // num_parts, shape[2]))
        first = self._read(opened, parts[0], of_part)
        whole = torch.empty(shape, dtype=first.dtype)
        for place, part in zip(whole.view(len(parts), *of_part), parts, strict=True):
            place.copy_(self._read(opened, part, of_part))
        return whole

    def _read(self, opened: dict[str, Any], stored: str, shape: torch.Size) -> torch.Tensor:
        path = self.folder / self.file_of[stored]
        if path.name not in opened:
            opened[path.name] = _opened(path)
        return _read(opened[path.name], stored, shape, path)

    def _stored_names(self, name: str) -> list[str]:
        """Names in the files of a parameter's parts, by expert; mostly it is one."""
        trunk = f"{self.layout.trunk}."
        names = self.layout.names_in_files(name)
        for prefix in ("", trunk):
            if name.removeprefix(prefix) in self.file_of:
                return [name.removeprefix(prefix)]
            found = list(self._of_experts([each.removeprefix(prefix) for each in names]))
            if found:
                return found
        raise ModelError(f"{self.folder} has no tensor {name}; its config.json describes another model")

    def _of_experts(self, names: Sequence[str]) -> Iterator[str]:
        for expert in count():
            parts = [each.replace("*", str(expert)) for each in names]
            if not parts or not all(part in self.file_of for part in parts):
                return
            yield from parts
            if parts == list(names):  # not of experts
                return


def _read_index(folder: Path, *, has_all: bool) -> dict[str, str]:
    path = folder / INDEX_FILE
    try:
        file_of = dict(read_json(path, _MAX_INDEX_NBYTES)["weight_map"])
    except (ModelError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is not an index of safetensors: {one_line(error)}") from error
    for file in sorted({str(file) for file in file_of.values()}):
        if Path(file).name != file or (has_all and not (folder / file).is_file()):
            raise ModelError(f"{path} names {file}, which is not a file in {folder}")
    return file_of


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def _read(handle: Any, stored: str, expected: torch.Size, path: Path) -> torch.Tensor:
    try:
        shape = tuple(handle.get_slice(stored).get_shape())
        if shape != tuple(expected):
            raise ModelError(f"{path}: {stored} has shape {list(shape)}, config.json expects {list(expected)}")
        tensor: torch.Tensor = handle.get_tensor(stored)
    except SafetensorError as error:
        raise ModelError(f"{path}: {stored} cannot be read: {error}") from error
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ModelError(f"{path}: {stored} is {tensor.dtype}; training needs fp32, bf16 or fp16 weights")
    return tensor
