"""A cut without a link: what codecs do to what crosses a cut, inside one process and one autograd graph.

Invariants:
- what comes out is what a `Boundary` on the other side would have received, to the bit: decode(encode(x))
  forward, decode(encode(g)) backward, in the dtype, shape and device of what went in;
- a codec that changes nothing (None, or `raw` of a type that holds every value) costs nothing.

For probes and experiments; runs go through `boundary.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tahq.quant.codec import Codec
from tahq.quant.raw.codec import DTYPES
from tahq.quant.spec import RawSpec
from tahq.quant.stateful_codec import StatefulCodec


class CodecCut:
    """A place where the model is cut: the codecs of both directions, as one differentiable function.

    A stateful codec (AQ-SGD) belongs to one cut and one direction, others may be shared.

    Args:
        activations: packs what goes forward; None leaves it as it is.
        gradients: packs what comes back; None leaves it as it is.
    """

    def __init__(self, activations: Codec | None, gradients: Codec | None) -> None:
        self._activations = activations
        self._gradients = gradients

    def __call__(
        self, x: torch.Tensor, *, forward_key: int, backward_key: int, sample_ids: Sequence[int] | None = None
    ) -> torch.Tensor:
        """What the next stage gets of x; its gradient comes back through the other codec.

        Args:
            x: [B, …, C] in fp32, bf16 or fp16, on any device.
            forward_key: key of the activation's codec; see `boundary.codec_key`.
            backward_key: key of the gradient's codec.
            sample_ids: of the B samples, for stateful codecs; None: nobody's, nothing is remembered.

        Returns:
            A tensor of x's shape, dtype and device; x itself if neither codec changes anything.

        Raises:
            CodecError: what a codec refuses.
        """
        if is_lossless(self._activations, x.dtype) and is_lossless(self._gradients, x.dtype):
            return x
        codecs, keys = (self._activations, self._gradients), (forward_key, backward_key)
        crossed: torch.Tensor = _Crossing.apply(x, codecs, keys, sample_ids)  # type: ignore[no-untyped-call]
        return crossed


class _Crossing(torch.autograd.Function):
    """Forward through one codec, backward through the other."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        codecs: tuple[Codec | None, Codec | None],
        keys: tuple[int, int],
        sample_ids: Sequence[int] | None,
    ) -> torch.Tensor:
        """What arrives at the next stage."""
        ctx.codec, ctx.key, ctx.sample_ids = codecs[1], keys[1], sample_ids
        arrived = transfer(codecs[0], x, keys[0], sample_ids)
        return x.view_as(x) if arrived is x else arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """What arrives back at the stage before."""
        return transfer(ctx.codec, gradient, ctx.key, ctx.sample_ids), None, None, None


def transfer(codec: Codec | None, x: torch.Tensor, key: int, sample_ids: Sequence[int] | None = None) -> torch.Tensor:
    """decode(encode(x)), without autograd; x itself where that would change nothing.

    Args:
        codec: None changes nothing.
        x: [B, …, C] in fp32, bf16 or fp16.
        key: 64 bits; matters to randomised codecs.
        sample_ids: of the B samples; only stateful codecs see them.

    Raises:
        CodecError: what the codec refuses.
    """
    if codec is None or is_lossless(codec, x.dtype):
        return x
    if isinstance(codec, StatefulCodec):
        payload = codec.encode(x.detach(), key=key, sample_ids=sample_ids)
        return codec.decode(payload, x.shape, x.dtype, key=key, sample_ids=sample_ids)
    return codec.decode(codec.encode(x.detach(), key=key), x.shape, x.dtype, key=key)


def is_lossless(codec: Codec | None, dtype: torch.dtype) -> bool:
    """Whether every tensor of `dtype` (fp32, bf16 or fp16) comes back from the codec with the same bits."""
    if codec is None:
        return True
    return isinstance(codec.spec, RawSpec) and DTYPES[codec.spec.dtype] in (torch.float32, dtype)
