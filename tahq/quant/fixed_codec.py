"""`fixed`: group-wise fixed point as a codec.

Puts together what is kept apart: `tiling` (shape), `fixed_reference` (arithmetic), `fixed_stream` (bytes).
"""

from collections.abc import Sequence

import torch

from tahq.quant import fixed_reference, fixed_stream, stream
from tahq.quant.codec import Codec
from tahq.quant.fixed_stream import FixedLayout
from tahq.quant.spec import FixedSpec
from tahq.quant.tiling import check_decodable, check_encodable


class FixedCodec(Codec):
    """`bits` + 16/group bits an element; only stochastic rounding looks at `key`."""

    def __init__(self, spec: FixedSpec) -> None:
        self.spec: FixedSpec = spec
        self.is_keyed = spec.round == "stochastic"

    def encoded_nbytes(self, shape: Sequence[int]) -> int:
        """Exact length of a stream in bytes."""
        return FixedLayout.of(self.spec, shape).sections.nbytes

    def encode(self, x: torch.Tensor, *, key: int = 0) -> torch.Tensor:
        """A stream of version 1; see `Codec.encode` and docs/wire-format.md.

        Raises:
            CodecError: x is not fp32, bf16 or fp16, or has no dimension.
        """
        check_encodable(x)
        layout = FixedLayout.of(self.spec, x.shape)
        groups = layout.tiling.split(x.detach()).view(-1, layout.tiling.group)
        draws_key = key if self.spec.round == "stochastic" else None
        return fixed_stream.pack(layout, fixed_reference.encode(groups, self.spec.bits, draws_key))

    def decode(
        self, buf: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, key: int = 0
    ) -> torch.Tensor:
        """See `Codec.decode`; a group that was not finite comes out as NaN."""
        check_decodable(dtype)
        layout = FixedLayout.of(self.spec, shape)
        values = fixed_reference.decode(fixed_stream.unpack(layout, buf), self.spec.bits)
        return layout.tiling.join(values, dtype)

    def has_non_finite(self, buf: torch.Tensor) -> bool:
        """Bit 0 of the header's flags."""
        return stream.is_flagged(buf)
