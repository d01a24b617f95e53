"""`raw`: the values themselves, little-endian, row by row, without a header.

The stream of fp32 values in `raw:dtype=fp32` is exact to the bit, NaN payloads included. A narrower type
rounds to nearest even, and values beyond its range become infinite, which `has_non_finite` sees.
"""

import math
from collections.abc import Sequence

import torch

from tahq.errors import CodecError
from tahq.quant.codec import Codec
from tahq.quant.spec import RawSpec
from tahq.quant.stream import ByteRange, Description, Sections, Statistics, accept
from tahq.quant.tiling import check_decodable, check_encodable, check_shape

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class RawCodec(Codec):
    """32 or 16 bits per element: a cast and a copy, which torch does at memory speed on every device."""

    def __init__(self, spec: RawSpec) -> None:
        self.spec: RawSpec = spec
        self._dtype = DTYPES[spec.dtype]

    def encoded_nbytes(self, shape: Sequence[int]) -> int:
        """Exact length of a stream in bytes."""
        return math.prod(check_shape(shape)) * self._dtype.itemsize

    def encode(self, x: torch.Tensor, *, key: int = 0) -> torch.Tensor:
        """The bytes of x, in fresh memory."""
        check_encodable(x)
        copied = x.detach().to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        return copied.view(-1).view(torch.uint8)

    def decode(
        self, buf: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, key: int = 0
    ) -> torch.Tensor:
        """See `Codec.decode`; every bit pattern is a value, so only a wrong length is refused."""
        check_decodable(dtype)
        values = accept(buf, self.encoded_nbytes(shape), self.spec).view(self._dtype)
        return values.to(dtype, copy=True).view(check_shape(shape))

    def has_non_finite(self, buf: torch.Tensor) -> bool:
        """Check every value, since there is no header with a flag."""
        if buf.numel() % self._dtype.itemsize:
            raise CodecError(f"{self.spec}: got {buf.numel()} bytes, expected a multiple of {self._dtype.itemsize}")
        values = accept(buf, buf.numel(), self.spec).view(self._dtype)
        # NaN and infinity survive a sum, so a finite sum proves all finite; a sum that overflows proves nothing
        return not (math.isfinite(float(values.sum())) or bool(values.isfinite().all()))


def _sections(spec: RawSpec, shape: Sequence[int], buf: torch.Tensor) -> Sections:
    nbytes = RawCodec(spec).encoded_nbytes(shape)
    return Sections({"values": ByteRange(0, nbytes)}, nbytes)


def _statistics(spec: RawSpec, shape: Sequence[int], buf: torch.Tensor) -> Statistics:
    values = RawCodec(spec).decode(buf, shape)
    return {"values": values.numel(), "values that are not finite": int((~values.isfinite()).sum())}


RAW = Description(
    summary="the values themselves, possibly in a narrower floating-point type",
    header=(),
    contents={"values": "in row order"},
    sections=_sections,
    statistics=_statistics,
)
