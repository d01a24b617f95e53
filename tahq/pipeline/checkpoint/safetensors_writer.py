"""Writes a safetensors file as a stream: one tensor in memory at a time, hashed on its way to the disk.

The hash is of what was meant to be written, so a disk that stores something else is found out when the
file is read. (`safetensors.torch.save_file` wants all tensors on the CPU at once, would have to be read
again for the hash, and hides the errno of a full disk.) The format: u64 length of the header, little-endian;
the header as JSON, name -> dtype, shape, offsets; then the tensors' bytes without gaps.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import BinaryIO

import torch

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


def write_safetensors(file: BinaryIO, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Write named tensors, in any place and of any strides, to an open binary file.

    Args:
        file: where to; not closed, not flushed.
        tensors: little-endian, of a dtype in `DTYPE_NAMES`.
        metadata: goes into the header as `__metadata__`.

    Returns:
        SHA-256 of everything written, in hex.

    Raises:
        OSError: from the file.
        KeyError: a dtype that the format does not have.
    """
    # widest types first, so that every tensor lies aligned to its own type
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    digest = hashlib.sha256()
    header = _header(names, tensors, metadata)
    for piece in (len(header).to_bytes(8, "little"), header):
        digest.update(piece)
        file.write(piece)
    for name in names:
        content = _content(tensors[name])
        digest.update(content)
        file.write(content)
    return digest.hexdigest()


def _header(names: list[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % HEADER_ALIGNMENT)


def _content(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
