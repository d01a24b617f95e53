"""A codec whose streams have a layout that shape and spec decide, and several backends: the thin part around them."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import torch

from tahq.quant import stream
from tahq.quant.backends import Dispatch
from tahq.quant.codec import Codec
from tahq.quant.spec import CodecSpec
from tahq.quant.tiling import Tiling, check_decodable, check_encodable


class Layout(Protocol):
    """What is asked of a layout here."""

    @property
    def tiling(self) -> Tiling:
        """Of the tensor."""

    @property
    def sections(self) -> stream.Sections:
        """Of the stream."""


L = TypeVar("L", bound=Layout)


class FramedCodec(Codec, Generic[L]):
    """Checks what it is given, looks up the layout, and hands over to a backend.

    Args:
        spec: of the codec.
        layout_of: the layout of a shape; raises CodecError where there is none.
        backends: of the codec.
        threads: how many a CPU backend may use.
    """

    def __init__(
        self, spec: CodecSpec, layout_of: Callable[[Sequence[int]], L], backends: Dispatch[L], threads: int
    ) -> None:
        self.spec = spec
        self._threads = threads
        # A run has a few shapes, and laying one out takes as long as a kernel's launch.
        self._layout = lru_cache(maxsize=16)(layout_of)
        self._backends = backends

    def encoded_nbytes(self, shape: Sequence[int]) -> int:
        """Exact length of a stream in bytes."""
        return self._layout(tuple(shape)).sections.nbytes

    def encode(self, x: torch.Tensor, *, key: int = 0) -> torch.Tensor:
        """A stream; see `Codec.encode` and docs/wire-format.md.

        Raises:
            CodecError: x is not fp32, bf16 or fp16, has no dimension, or is not where the forced backend runs.
        """
        check_encodable(x)
        layout = self._layout(tuple(x.shape))
        kernels = self._backends.kernels(x.device, x.numel())
        return kernels.encode(layout, x.detach(), key=key, threads=self._threads)

    def decode(
        self, buf: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, key: int = 0
    ) -> torch.Tensor:
        """See `Codec.decode`; a tile that was not finite comes out as NaN."""
        check_decodable(dtype)
        layout = self._layout(tuple(shape))
        kernels = self._backends.kernels(buf.device, layout.tiling.num_elements)
        return kernels.decode(layout, buf, dtype, key=key, threads=self._threads)

    def has_non_finite(self, buf: torch.Tensor) -> bool:
        """Bit 0 of the header's flags."""
        return stream.is_flagged(buf)
