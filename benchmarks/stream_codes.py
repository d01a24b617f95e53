"""The codes that a stream of ours carries, tile by tile with their width in bits, and their entropy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tahq.quant import CodecSpec
from tahq.quant.aqsgd import stream as aqsgd_stream
from tahq.quant.fixed import stream as fixed_stream
from tahq.quant.gaussian import tile_stream
from tahq.quant.tah import stream as tah_stream
from tahq.quant.tah.reference import tile_by_tile


@dataclass(frozen=True, slots=True)
class Codes:
    """What quantisation left.

    Attributes:
        codes: int32 [T, G].
        width: int64 [T], bits of a tile's codes.
    """

    codes: torch.Tensor
    width: torch.Tensor

    @property
    def num_bits(self) -> float:
        """As they are sent."""
        return float(self.width.sum()) * self.codes.shape[1]

    @property
    def entropy_bits(self) -> float:
        """What an ideal coder would take that knows the frequencies for each width: Σ N·H(code | width)."""
        parts = [self.codes[self.width == bits] for bits in self.width.unique()]
        return sum(part.numel() * entropy(part) for part in parts)


def entropy(codes: torch.Tensor) -> float:
    """Bits a code, −Σ p·log2 p over the frequencies in this very tensor."""
    counts = codes.flatten().long().bincount().double()
    share = counts[counts > 0] / counts.sum()
    return -float((share * share.log2()).sum())


def codes_of(spec: CodecSpec, buf: torch.Tensor, shape: torch.Size) -> Codes | None:
    """The codes in the stream of a tensor of this shape; None where there are none, but values."""
    reader = _READERS.get(spec.name)
    return reader(spec, buf, shape) if reader is not None else None


def _of_tah(spec: Any, buf: torch.Tensor, shape: torch.Size) -> Codes:
    layout = tah_stream.TahLayout.of(spec, shape)
    tiles = tah_stream.unpack(layout, buf)
    high = tile_by_tile(tiles.high, layout.tiles_per_alloc).flatten()
    return _codes(tiles.codes.flatten(0, -2), torch.where(high, spec.high, spec.low))


def _of_fixed(spec: Any, buf: torch.Tensor, shape: torch.Size) -> Codes:
    codes = fixed_stream.unpack(fixed_stream.FixedLayout.of(spec, shape), buf).codes
    return _codes(codes, torch.full((len(codes),), spec.bits))


def _of_aqsgd(spec: Any, buf: torch.Tensor, shape: torch.Size) -> Codes | None:
    samples = aqsgd_stream.grid(shape)[0]
    layout = aqsgd_stream.AqsgdLayout.of(spec, shape, (spec.has_cache,) * samples)
    codes = aqsgd_stream.unpack(layout, buf).codes.flatten(0, 1)
    return _codes(codes, torch.full((len(codes),), spec.bits)) if codes.numel() else None


def _of_tiles(spec: Any, buf: torch.Tensor, shape: torch.Size) -> Codes:
    tiles = tile_stream.unpack(tile_stream.TileLayout.of(spec, shape), buf)
    return _codes(tiles.codes, tiles.width)


def _codes(codes: torch.Tensor, width: torch.Tensor) -> Codes:
    return Codes(codes.to(torch.int32), width.to(torch.int64))


_READERS: Mapping[str, Callable[[Any, torch.Tensor, torch.Size], Codes | None]] = {
    "tah": _of_tah,
    "fixed": _of_fixed,
    "aqsgd": _of_aqsgd,
    "eden": _of_tiles,
    "wf": _of_tiles,
}
