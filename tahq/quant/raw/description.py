"""What a raw stream holds, for `tahq codec inspect`: values, and nothing else."""

from collections.abc import Sequence

import torch

from tahq.quant.description import Description, Statistics
from tahq.quant.raw.codec import RawCodec
from tahq.quant.spec import RawSpec
from tahq.quant.stream import Section, Sections


def _sections(spec: RawSpec, shape: Sequence[int], buf: torch.Tensor) -> Sections:
    nbytes = RawCodec(spec).encoded_nbytes(shape)
    return Sections({"values": Section(0, nbytes)}, nbytes)


def _statistics(spec: RawSpec, shape: Sequence[int], buf: torch.Tensor) -> Statistics:
    values = RawCodec(spec).decode(buf, shape)
    return {"values": values.numel(), "values that are not finite": int((~values.isfinite()).sum())}


RAW = Description(
    summary="the values themselves, in another floating-point type at most",
    header=(),
    contents={"values": "in row order"},
    sections=_sections,
    statistics=_statistics,
)
