"""What a TAH stream holds, for `tahq codec inspect`."""

from collections.abc import Sequence

import torch

from tahq.quant.description import FLAGS, LOG2_GROUP, Description, HeaderByte, Statistics, exponent, step_statistics
from tahq.quant.description import version as version_byte
from tahq.quant.spec import TahSpec
from tahq.quant.stream import Sections
from tahq.quant.tah.reference import TahTiles
from tahq.quant.tah.stream import MIN_EXPONENT, VERSION, TahLayout, unpack

_HEADER = (
    version_byte(VERSION),
    FLAGS,
    LOG2_GROUP,
    HeaderByte("L", 2, 8, "bits of a code in a tile of few"),
    HeaderByte("H", 2, 8, "bits of a code in a tile of many"),
    exponent(MIN_EXPONENT),
)
_CONTENTS = {
    "bit map": "a bit an allocation tile, 1 = H bits",
    "scale": "fp16 a tile; sign bit = transformed",
    "zero-point": "fp16 a tile, its minimum; NaN = not finite",
    "pivot": "log2 G bits a tile",
    "low planes": "bits 0 to L−1 of the codes, tile by tile",
    "high planes": "bits L to H−1, of the tiles with H bits",
}


def _sections(spec: TahSpec, shape: Sequence[int], buf: torch.Tensor) -> Sections:
    return TahLayout.of(spec, shape).sections


def _statistics(spec: TahSpec, shape: Sequence[int], buf: torch.Tensor) -> Statistics:
    tiles = unpack(TahLayout.of(spec, shape), buf)
    finite = ~tiles.zero_point.isnan()
    steps = torch.ldexp(tiles.scale.double(), -tiles.exponent)
    return {
        "tiles": tiles.scale.numel(),
        "allocation tiles": tiles.high.numel(),
        "share of allocation tiles with H bits": _share(tiles.high),
        "share of tiles transformed": _share(tiles.transformed),
        "tiles that are not finite": int((~finite).sum()),
        "tiles of one value": _count_constant(tiles, finite),
        **step_statistics(steps),
    }


def _share(flags: torch.Tensor) -> float:
    return float(flags.double().mean()) if flags.numel() else 0.0


def _count_constant(tiles: TahTiles, finite: torch.Tensor) -> int:
    return int(((tiles.scale == 0) & finite).sum())


TAH = Description(
    summary="TAH-Quant: bits by entropy, Hadamard for tiles with an outlier",
    header=_HEADER,
    contents=_CONTENTS,
    sections=_sections,
    statistics=_statistics,
)
