"""What a fixed-point stream holds, for `tahq codec inspect`."""

from collections.abc import Sequence

import torch

from tahq.quant.description import FLAGS, LOG2_GROUP, Description, HeaderByte, Statistics, exponent, step_statistics
from tahq.quant.description import version as version_byte
from tahq.quant.fixed.reference import step_size
from tahq.quant.fixed.stream import MIN_EXPONENT, VERSION, FixedLayout, unpack
from tahq.quant.spec import FixedSpec
from tahq.quant.stream import Sections

_HEADER = (
    version_byte(VERSION),
    FLAGS,
    LOG2_GROUP,
    HeaderByte("bits", 2, 16, "of a code"),
    exponent(MIN_EXPONENT),
)
_CONTENTS = {
    "scale": "fp16 a group, its largest magnitude; NaN = not finite",
    "bytes": "bits 0 to 7 of all codes, then 8 to 15",
    "planes": "the remaining bits, lowest first, group by group",
}


def _sections(spec: FixedSpec, shape: Sequence[int], buf: torch.Tensor) -> Sections:
    return FixedLayout.of(spec, shape).sections


def _statistics(spec: FixedSpec, shape: Sequence[int], buf: torch.Tensor) -> Statistics:
    tiles = unpack(FixedLayout.of(spec, shape), buf)
    return {
        "groups": tiles.scale.numel(),
        "groups that are not finite": int(tiles.scale.isnan().sum()),
        "groups of zeros": int((tiles.scale == 0).sum()),
        **step_statistics(torch.ldexp(step_size(tiles.scale, spec.bits).double(), -tiles.exponent)),
    }


FIXED = Description(
    summary="group-wise fixed point, symmetric",
    header=_HEADER,
    contents=_CONTENTS,
    sections=_sections,
    statistics=_statistics,
)
