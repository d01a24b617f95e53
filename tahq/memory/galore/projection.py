"""The basis of a subspace as it is kept: INT4, two codes a byte, or fp32 or bf16.

INT4 has a scale (bf16) and a place of 0 (one byte) for 256 codes, 4.09 bits a number in all. The authors' code keeps a
byte a code. Element 2i of the flattened basis has the low half of byte i, element 2i + 1 the high one.

Source: Q-GaLore §3.3.
"""

from typing import Literal

import torch

from tahq.memory.galore.affine_backend import affine_kernels
from tahq.memory.galore.affine_groups import as_groups, decode, num_groups, scales

ProjectionType = Literal["int4", "bf16", "fp32"]
FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32}
STEPS = 15


class Int4Projection:
    """[r, d] in INT4.

    Args:
        shape: r vectors of d numbers.
        device: where it lies; zeros until it is assigned or loaded.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.shape = shape
        numel = shape[0] * shape[1]
        self.packed = torch.zeros(-(-numel // 2), dtype=torch.uint8, device=device)
        self.zero = torch.zeros(num_groups(numel), dtype=torch.uint8, device=device)
        self.scale = torch.zeros(num_groups(numel), dtype=torch.bfloat16, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the name of the state in a snapshot; the tensors themselves."""
        return {"projection": self.packed, "projection_zero": self.zero, "projection_scale": self.scale}

    def assign(self, basis: torch.Tensor) -> None:
        """Round fp32 [r, d] to nearest; an element moves by half a step at most.

        Both ends of the range are rounded to the same side only where both lie halfway, so that the code above 15
        that would come of it is at most half a step off as 15.
        """
        groups = as_groups(basis.reshape(-1).float())
        scale, zero = scales(groups, STEPS)
        zero = zero.round_()
        codes = (groups / scale[:, None]).round_().add_(zero[:, None]).clamp_(0, STEPS)
        self.packed.copy_(pack(codes.to(torch.uint8).view(-1)[: basis.numel()]))
        self.zero.copy_(zero)
        self.scale.copy_(scale)

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """[r, d], in memory of its own."""
        kernels = affine_kernels(self.packed)
        if kernels is not None:
            out: torch.Tensor = kernels.decoded4(self, dtype)
            return out
        numel = self.shape[0] * self.shape[1]
        codes = as_groups(unpack(self.packed, numel))
        return decode(codes, self.zero, self.scale, dtype).view(-1)[:numel].view(self.shape)


class FullProjection:
    """[r, d] in fp32 or bf16."""

    def __init__(self, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the name of the state in a snapshot; the tensor itself."""
        return {"projection": self.values}

    def assign(self, basis: torch.Tensor) -> None:
        """Take [r, d]."""
        self.values.copy_(basis)

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """[r, d]; the tensor itself where it has this type."""
        return self.values.to(dtype)


Projection = Int4Projection | FullProjection


def new_projection(kind: ProjectionType, shape: tuple[int, int], device: torch.device) -> Projection:
    """Room for a basis, all zeros."""
    return Int4Projection(shape, device) if kind == "int4" else FullProjection(shape, device, FLOATS[kind])


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N] below 16 -> uint8 [⌈N/2⌉]: codes 1, 2, 3 are bytes 0x21, 0x03."""
    if codes.numel() % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """What `pack` was given, uint8 [count]."""
    return torch.stack((packed & 15, packed >> 4), dim=1).view(-1)[:count]
