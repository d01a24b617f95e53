"""`tah`: TAH-Quant (tile-wise adaptive Hadamard quantisation) as a codec.

Puts together what is kept apart: `tiling` (shape), `tah_reference` (arithmetic), `tah_stream` (bytes).
Another backend replaces the arithmetic, and the packing if it likes, and writes the same streams.
"""

from collections.abc import Sequence

import torch

from tahq.quant import stream, tah_reference, tah_stream
from tahq.quant.codec import Codec
from tahq.quant.spec import TahSpec
from tahq.quant.tah_stream import TahLayout
from tahq.quant.tiling import check_decodable, check_encodable


class TahCodec(Codec):
    """4.41 bits an element at the defaults; deterministic, so `key` is ignored."""

    def __init__(self, spec: TahSpec) -> None:
        self.spec: TahSpec = spec

    def encoded_nbytes(self, shape: Sequence[int]) -> int:
        """Exact length of a stream in bytes; for [2, 1024, 1600] it is 1,806,096."""
        return TahLayout.of(self.spec, shape).sections.nbytes

    def encode(self, x: torch.Tensor, *, key: int = 0) -> torch.Tensor:
        """A stream of version 1; see `Codec.encode` and docs/wire-format.md.

        Raises:
            CodecError: x is not fp32, bf16 or fp16, or has no dimension.
        """
        check_encodable(x)
        layout = TahLayout.of(self.spec, x.shape)
        tiles = tah_reference.encode(
            layout.tiling.split(x.detach()),
            layout.num_low,
            tau=self.spec.tau,
            low=self.spec.low,
            high=self.spec.high,
            padding=layout.tiling.padding,
        )
        return tah_stream.pack(layout, tiles)

    def decode(
        self, buf: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, key: int = 0
    ) -> torch.Tensor:
        """See `Codec.decode`; a tile that was not finite comes out as NaN."""
        check_decodable(dtype)
        layout = TahLayout.of(self.spec, shape)
        return layout.tiling.join(tah_reference.decode(tah_stream.unpack(layout, buf)), dtype)

    def has_non_finite(self, buf: torch.Tensor) -> bool:
        """Bit 0 of the header's flags."""
        return stream.is_flagged(buf)
