"""`wf` as a codec: water-filled bits, 1 to 8 on average, and error-minimising steps; for activations.

The reference backend puts together what is kept apart: `tiling` (shape), `wf.reference` (arithmetic), `wf.stream`
(bytes). The others, `wf.cpu` and `wf.triton`, write the same streams in one go.
"""

from functools import partial

import torch

from tahq.quant.backends import AUTO, Dispatch, Kernels
from tahq.quant.framed_codec import FramedCodec
from tahq.quant.spec import WfSpec
from tahq.quant.wf import reference as wf_reference
from tahq.quant.wf import stream as wf_stream
from tahq.quant.wf.stream import WfLayout


def encode_reference(layout: WfLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """A stream of version 1 in plain torch, on any device, without synchronising it."""
    tiles = layout.tiling.split(x).flatten(0, 1)
    return wf_stream.pack(layout, wf_reference.encode(tiles, layout.num_planes, center=layout.has_mean))


def decode_reference(
    layout: WfLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor:
    """The tensor of a stream in plain torch; raises what `wf.stream.unpack` does."""
    return layout.tiling.join(wf_reference.decode(wf_stream.unpack(layout, buf)), dtype)


class WfCodec(FramedCodec[WfLayout]):
    """⌊bits·T⌋/T + 11/G + 16/tokens bits an element, the last for means; deterministic, so `key` is ignored."""

    def __init__(self, spec: WfSpec, backend: str = AUTO, threads: int = 1) -> None:
        backends = Dispatch("wf", Kernels(encode_reference, decode_reference), backend)
        super().__init__(spec, partial(WfLayout.of, spec), backends, threads)
