"""`raw`: the values themselves, little-endian, row by row, without a header.

The stream of fp32 values in `raw:dtype=fp32` is exact to the bit, NaN payloads included. A narrower type
rounds to nearest even, and what is beyond its range becomes infinite, which `has_non_finite` sees.
"""

import math
from collections.abc import Sequence

import torch

from tahq.errors import CodecError
from tahq.quant.codec import Codec
from tahq.quant.spec import RawSpec
from tahq.quant.stream import accept
from tahq.quant.tiling import check_decodable, check_encodable, check_shape

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class RawCodec(Codec):
    """32 or 16 bits an element; deterministic, so `key` is ignored.

    A cast and a copy, which torch does at the speed of memory on every device: there is one implementation,
    whatever backend is asked for.
    """

    def __init__(self, spec: RawSpec) -> None:
        self.spec: RawSpec = spec
        self._dtype = DTYPES[spec.dtype]

    def encoded_nbytes(self, shape: Sequence[int]) -> int:
        """Exact length of a stream in bytes: elements times the size of one."""
        return math.prod(check_shape(shape)) * self._dtype.itemsize

    def encode(self, x: torch.Tensor, *, key: int = 0) -> torch.Tensor:
        """The bytes of x, in fresh memory.

        Raises:
            CodecError: x is not fp32, bf16 or fp16, or has no dimension.
        """
        check_encodable(x)
        copied = x.detach().to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        return copied.view(-1).view(torch.uint8)

    def decode(
        self, buf: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, key: int = 0
    ) -> torch.Tensor:
        """See `Codec.decode`; every bit pattern is a value, so only a wrong length is refused."""
        check_decodable(dtype)
        checked = check_shape(shape)
        values = accept(buf, math.prod(checked) * self._dtype.itemsize, self.spec).view(self._dtype)
        return values.to(dtype, copy=True).view(checked)

    def has_non_finite(self, buf: torch.Tensor) -> bool:
        """Looks at every value: there is no header to carry a flag.

        Raises:
            CodecError: the length is no whole number of values.
        """
        if buf.numel() % self._dtype.itemsize:
            raise CodecError(f"{self.spec}: {buf.numel()} bytes are no whole number of values")
        values = accept(buf, buf.numel(), self.spec).view(self._dtype)
        # NaN and infinity survive a sum, so a finite one clears them all; one that overflows decides nothing
        return not (math.isfinite(float(values.sum())) or bool(values.isfinite().all()))
