"""Tensors from .safetensors and .npy files; pickled ones (.pt) are never opened, for a pickle may run code."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tahq.errors import UserError
from tahq.quant.tiling import ENCODABLE


def load_tensors(file: Path, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Tensors of one dimension or more that a codec takes, by name; fp64 as fp32.

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
    return _chosen(file, tensors, names)


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    return dict(sorted(load_file(file).items()))


def _read_npy(file: Path) -> dict[str, torch.Tensor]:
    return {file.stem: torch.from_numpy(np.load(file, allow_pickle=False))}


_READERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    ".safetensors": _read_safetensors,
    ".npy": _read_npy,
}


def _chosen(file: Path, tensors: dict[str, torch.Tensor], names: Sequence[str]) -> dict[str, torch.Tensor]:
    if missing := [name for name in names if name not in tensors]:
        raise UserError(f"{file} has no tensor {missing[0]!r}; there are {', '.join(tensors) or 'none'}")
    wanted = {name: tensors[name] for name in names} if names else tensors
    floats = {name: x.float() if x.dtype == torch.float64 else x for name, x in wanted.items()}
    taken = {name: x for name, x in floats.items() if x.dtype in ENCODABLE and x.dim()}
    if not taken or (names and len(taken) < len(floats)):
        got = ", ".join(f"{name} {x.dtype} {list(x.shape)}" for name, x in floats.items() if name not in taken)
        raise UserError(f"{file}: codecs take fp32, bf16 and fp16 tensors [..., C]; got {got or 'no tensors'}")
    return taken
