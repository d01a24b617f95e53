"""`tah`: TAH-Quant (tile-wise adaptive Hadamard quantisation) as a codec.

The reference backend puts together what is kept apart: `tiling` (shape), `tah.reference` (arithmetic),
`tah.stream` (bytes). The others, `tah.cpu` and `tah.triton`, write the same streams in one go.
"""

from functools import partial

import torch

from tahq.quant.backends import AUTO, Dispatch, Kernels
from tahq.quant.framed_codec import FramedCodec
from tahq.quant.spec import TahSpec
from tahq.quant.tah import reference as tah_reference
from tahq.quant.tah import stream as tah_stream
from tahq.quant.tah.stream import TahLayout


def encode_reference(layout: TahLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """A stream of version 1 in plain torch, on any device, without synchronising it."""
    spec = layout.spec
    tiles = tah_reference.encode(
        layout.tiling.split(x),
        layout.allocation,
        tau=spec.tau,
        low=spec.low,
        high=spec.high,
        padding=layout.tiling.padding,
    )
    return tah_stream.pack(layout, tiles)


def decode_reference(
    layout: TahLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor:
    """The tensor of a stream in plain torch; raises what `tah.stream.unpack` does."""
    return layout.tiling.join(tah_reference.decode(tah_stream.unpack(layout, buf)), dtype)


class TahCodec(FramedCodec[TahLayout]):
    """4.41 bits an element at the defaults, 1,806,096 bytes for [2, 1024, 1600]; deterministic, so `key` is ignored."""

    def __init__(self, spec: TahSpec, backend: str = AUTO, threads: int = 1) -> None:
        backends = Dispatch("tah", Kernels(encode_reference, decode_reference), backend)
        super().__init__(spec, partial(TahLayout.of, spec), backends, threads)
