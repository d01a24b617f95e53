"""NF4: frozen weights in 4 bits, 16 values with a scale per 64 weights, and these scales in 8 bits.

    scale_k = max |x| over block k,   code = the value nearest to x · (1 / scale_k), a tie to the lower one

The values are quantiles of a normal distribution, scaled to [−1, 1], with an exact 0. Scales less their mean are coded
in 8 bits in groups of 256, in the dynamic tree map (`adam/blockwise8.py`). A byte has two codes, the first in its upper
half. All this is bitsandbytes' nf4 with double quantisation, in codes, layout and decoded values, but for the last bit
of the mean, which is summed in fp64 here, so that it is the same on every device. A scale between two codes may then
get the other one.

Every other operation is correctly rounded by IEEE 754: codes and decoded values are bit-equal on all devices, and so
are the kernels' on CUDA (`nf4_kernels.py`).

Source: QLoRA (Dettmers et al. 2023), §3 (double quantisation) and App. E (values). Letters: N weights, K = ⌈N/64⌉
blocks, G = ⌈K/256⌉ groups.
"""

from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from tahq.kernel_launch import has_triton
from tahq.memory.adam import blockwise8
from tahq.memory.small_floats.block_codes import in_blocks
from tahq.models.weights import sum_of_bits

BLOCK = 64
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""By code."""
_SLAB = 2**14  # Blocks that plain torch codes or decodes at a time, with temporaries of up to 16 bytes per weight


def nf4_nbytes(numel: int) -> int:
    """Bytes of N weights: 32 per block and a scale of 1, 4 per group, and 4 for the mean."""
    blocks = -(-numel // BLOCK)
    return (BLOCK // 2 + 1) * blocks + 4 * -(-blocks // blockwise8.BLOCK) + 4


class Nf4Weight:
    """A weight in NF4, zeros until it is filled.

    `is_transposed`: blocks run along the columns of the matrix, as those of GPT-2's Conv1D do in bitsandbytes.
    """

    def __init__(self, shape: torch.Size, device: torch.device, *, is_transposed: bool = False) -> None:
        self.shape, self._is_transposed = shape, is_transposed
        num_blocks = -(-shape.numel() // BLOCK)
        zero = VALUES.index(0.0)
        self.codes = torch.full((num_blocks, BLOCK // 2), zero << 4 | zero, dtype=torch.uint8, device=device)
        self.scales = torch.full((num_blocks,), blockwise8.ZERO_SIGNED, dtype=torch.uint8, device=device)
        self.groups = torch.zeros(-(-num_blocks // blockwise8.BLOCK), device=device)
        self.mean = torch.zeros((), device=device)
        self.sum_of_bits = torch.zeros((), dtype=torch.int64)
        """Of what it was filled with, in fp32."""

    def numel(self) -> int:
        """Weights."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Bytes on the device, `nf4_nbytes`."""
        return self.codes.nbytes + self.scales.nbytes + self.groups.nbytes + self.mean.nbytes

    @torch.no_grad()
    def copy_(self, values: torch.Tensor, /) -> None:
        """Code these values, of any float type and device."""
        flat = (values.t() if self._is_transposed else values).reshape(-1).to(self.codes.device)
        self.sum_of_bits = sum_of_bits(flat.float())  # whatever their order
        scales = torch.empty(len(self.codes), device=self.codes.device)
        for place, part in self._slabs():
            self.codes[place], scales[place] = _encode(flat[part])
        self.mean.copy_(scales.double().mean())
        coded, groups = blockwise8.encode(scales - self.mean, signed=True)
        self.scales.copy_(coded)
        self.groups.copy_(groups)

    @torch.no_grad()
    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, in new memory: value · scale in fp32, rounded to `dtype`."""
        out = torch.empty(self.shape.numel(), dtype=dtype, device=self.codes.device)
        kernels = _kernels(self.codes)
        if kernels is not None:
            kernels.decode(self, out)
        else:
            scales = blockwise8.decode(self.scales, self.groups, signed=True) + self.mean
            for place, part in self._slabs():
                out[part] = _decode(self.codes[place], scales[place])[: len(out[part])]
        return out.view(self.shape[::-1]).t() if self._is_transposed else out.view(self.shape)

    def _slabs(self) -> list[tuple[slice, slice]]:
        """Blocks, and their weights, to be coded at a time."""
        starts = range(0, len(self.codes), _SLAB)
        return [(slice(at, at + _SLAB), slice(at * BLOCK, (at + _SLAB) * BLOCK)) for at in starts]


def packed_weight(parameter: Any) -> Nf4Weight | None:
    """What stands for a parameter's values, if they are kept in NF4."""
    packed: Nf4Weight | None = getattr(parameter, "packed", None)
    return packed


def _encode(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [K, 32] and scales fp32 [K] of [N]; a block of zeros has the scale 0."""
    blocks = in_blocks(flat, BLOCK).float()
    scales = torch.maximum(blocks.amax(1), -blocks.amin(1))
    usual = torch.where(scales < blockwise8.SMALLEST_SCALE, 1.0, scales)
    codes = torch.bucketize(blocks * (1 / usual)[:, None], _borders(flat.device)).to(torch.uint8)
    return codes[:, ::2] << 4 | codes[:, 1::2], scales


def _decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [64·K] of codes [K, 32] and scales fp32 [K]."""
    pairs = _pairs(codes.device).index_select(0, codes.flatten().int())
    return pairs.view(-1, BLOCK).mul_(scales[:, None]).view(-1)


@lru_cache(maxsize=16)
def values(device: torch.device) -> torch.Tensor:
    """The 16 values, fp32; not to be written to."""
    return torch.tensor(VALUES, dtype=torch.float64).float().to(device)


@lru_cache(maxsize=16)
def _borders(device: torch.device) -> torch.Tensor:
    """Middles between neighbouring values, fp32 [15]."""
    exact = values(torch.device("cpu")).double()
    return ((exact[1:] + exact[:-1]) / 2).float().to(device)


@lru_cache(maxsize=16)
def _pairs(device: torch.device) -> torch.Tensor:
    """The values of the two codes of each byte, fp32 [256, 2]."""
    upper, lower = torch.meshgrid(values(device), values(device), indexing="ij")
    return torch.stack((upper, lower), dim=-1).view(256, 2)


def _kernels(codes: torch.Tensor) -> ModuleType | None:
    """The Triton kernel, for codes on CUDA where triton is installed; None: plain torch."""
    return import_module("tahq.memory.small_floats.nf4_kernels") if codes.is_cuda and has_triton() else None
