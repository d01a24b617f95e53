"""`fixed`: group-wise fixed point as a codec.

The reference backend puts together what is kept apart: `tiling` (shape), `fixed.reference` (arithmetic),
`fixed.stream` (bytes). The others, `fixed.cpu` and `fixed.triton`, write the same streams in one go.
"""

from functools import partial

import torch

from tahq.quant.backends import AUTO, Dispatch, Kernels
from tahq.quant.fixed import reference as fixed_reference
from tahq.quant.fixed import stream as fixed_stream
from tahq.quant.fixed.stream import FixedLayout
from tahq.quant.framed_codec import FramedCodec
from tahq.quant.spec import FixedSpec


def encode_reference(layout: FixedLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """A stream of version 1 in plain torch, on any device, without synchronising it."""
    groups = layout.tiling.split(x).reshape(-1, layout.tiling.group)
    draws_key = key if layout.spec.round == "stochastic" else None
    return fixed_stream.pack(layout, fixed_reference.encode(groups, layout.spec.bits, draws_key))


def decode_reference(
    layout: FixedLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor:
    """The tensor of a stream in plain torch; raises what `fixed.stream.unpack` does."""
    values = fixed_reference.decode(fixed_stream.unpack(layout, buf), layout.spec.bits)
    return layout.tiling.join(values, dtype)


class FixedCodec(FramedCodec[FixedLayout]):
    """`bits` + 16/group bits an element; only stochastic rounding looks at `key`."""

    def __init__(self, spec: FixedSpec, backend: str = AUTO, threads: int = 1) -> None:
        backends = Dispatch("fixed", Kernels(encode_reference, decode_reference), backend)
        super().__init__(spec, partial(FixedLayout.of, spec), backends, threads)
        self.is_keyed = spec.round == "stochastic"
