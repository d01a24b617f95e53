"""Tensors from .safetensors and .npy files; pickled ones (.pt) are never opened, for a pickle may run code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tahq.errors import UserError
from tahq.quant.tiling import ENCODABLE


@dataclass(frozen=True, slots=True)
class LoadedTensors:
    """By name; of what was left out, the reason."""

    taken: dict[str, torch.Tensor]
    left_out: dict[str, str]


def load_tensors(file: Path, names: Sequence[str] = ()) -> LoadedTensors:
    """Tensors of one dimension or more that a codec takes; fp64 as fp32.

    Args:
        file: .safetensors; .npy, whose one array is named like the file.
        names: which; all floating-point ones if empty.

    Raises:
        UserError: a file that cannot be read, a name that is not in it, or nothing that a codec takes.
    """
    read = _READERS.get(file.suffix)
    if read is None:
        raise UserError(f"{file}: tensors are read from {', '.join(_READERS)} files; got {file.suffix or 'no suffix'}")
    try:
        tensors = read(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, EOFError) as error:
        raise UserError(f"{file} is no readable {file.suffix} file: {error}") from error
    except MemoryError as error:
        raise UserError(f"{file} does not fit into memory, or is damaged: {error}") from error
    return _chosen(file, tensors, names)


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    return dict(sorted(load_file(file).items()))


def _read_npy(file: Path) -> dict[str, torch.Tensor]:
    array = np.load(file, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("it is an archive of several arrays")
    try:
        return {file.stem: torch.from_numpy(array)}
    except TypeError as error:
        raise ValueError(
            f"torch has no such type as its {array.dtype}; convert it to float32 first (bf16, which numpy does not "
            "know, it writes as V2: a .safetensors file keeps it)"
        ) from error


_TAKEN = "codecs take fp32, bf16 and fp16 tensors [..., C]"

_READERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    ".safetensors": _read_safetensors,
    ".npy": _read_npy,
}


def _chosen(file: Path, tensors: dict[str, torch.Tensor], names: Sequence[str]) -> LoadedTensors:
    if missing := [name for name in names if name not in tensors]:
        raise UserError(f"{file} has no tensor {missing[0]!r}; there are {', '.join(tensors) or 'none'}")
    wanted = {name: tensors[name] for name in names} if names else tensors
    floats = {name: x.float() if x.dtype == torch.float64 else x for name, x in wanted.items()}
    taken = {name: x for name, x in floats.items() if x.dtype in ENCODABLE and x.dim()}
    got = {name: f"{x.dtype} {list(x.shape)}" for name, x in floats.items() if name not in taken}
    if not taken or (names and got):
        listed = ", ".join(f"{name} {kind}" for name, kind in got.items())
        raise UserError(f"{file}: {_TAKEN}; got {listed or 'no tensors'}")
    return LoadedTensors(taken, {name: f"{_TAKEN}; it is {kind}" for name, kind in got.items()})
