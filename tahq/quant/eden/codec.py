"""`eden` as a codec: randomised, unbiased, 1 to 8 bits on average; for gradients.

The reference backend puts together what is kept apart: `tiling` (shape), `eden.reference` (arithmetic), `eden.stream`
(bytes). The others, `eden.cpu` and `eden.triton`, write the same streams in one go.
"""

from functools import partial

import torch

from tahq.quant.backends import AUTO, Dispatch, Kernels
from tahq.quant.eden import reference as eden_reference
from tahq.quant.eden import stream as eden_stream
from tahq.quant.eden.stream import EdenLayout
from tahq.quant.framed_codec import FramedCodec
from tahq.quant.spec import EdenSpec


def encode_reference(layout: EdenLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """A stream of version 1 in plain torch, on any device, without synchronising it."""
    tiles = layout.tiling.split(x).reshape(-1, layout.tiling.group)
    return eden_stream.pack(layout, eden_reference.encode(tiles, layout.num_planes, key))


def decode_reference(
    layout: EdenLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor:
    """The tensor of a stream in plain torch; raises what `eden.stream.unpack` does."""
    return layout.tiling.join(eden_reference.decode(eden_stream.unpack(layout, buf), key), dtype)


class EdenCodec(FramedCodec[EdenLayout]):
    """⌊bits·T⌋/T + 11/G bits an element; both ends need the same key."""

    is_keyed = True

    def __init__(self, spec: EdenSpec, backend: str = AUTO, threads: int = 1) -> None:
        backends = Dispatch("eden", Kernels(encode_reference, decode_reference), backend)
        super().__init__(spec, partial(EdenLayout.of, spec), backends, threads)
