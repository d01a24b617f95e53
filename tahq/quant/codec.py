"""The contract of a codec: a tensor to bytes and back, knowing no network."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from tahq.quant.first_use import one_compiles
from tahq.quant.spec import CodecSpec


class Codec(ABC):
    """Packs a tensor `[..., C]` (the first dimension being the sample) into uint8 and back.

    Encoding is a pure function of (x, key, the codec's state), runs on the caller's CUDA stream and
    never synchronises the device. `key` is a 64-bit number both ends derive from the logical id
    and the run's seed; deterministic codecs ignore it.
    """

    spec: CodecSpec
    is_keyed: bool = False
    """Whether `key` matters: deterministic codecs need none to be derived."""
    is_stateful: bool = False
    """Whether what was encoded before matters: such codecs also take the ids of the samples."""

    @abstractmethod
    def encoded_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that a tensor of this shape takes: exact for fixed-length codecs, else a maximum."""

    @abstractmethod
    def encode(self, x: torch.Tensor, *, key: int = 0) -> torch.Tensor:
        """uint8, 1-D, contiguous, on x's device; x is fp32, bf16 or fp16, any strides."""

    @abstractmethod
    def decode(
        self, buf: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, key: int = 0
    ) -> torch.Tensor:
        """A fresh, contiguous tensor of `shape` and `dtype` on buf's device.

        Raises:
            CodecError: a wrong length, or metadata out of range. Nothing in `buf` is trusted.
        """

    @abstractmethod
    def has_non_finite(self, buf: torch.Tensor) -> bool:
        """Whether the encoder met NaN or infinity (reads the stream's own flag; CPU buffers only)."""

    def prepare(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Compile or load every kernel that tensors of this shape, dtype and device will need.

        Called before the first step, so that no step waits for a compiler. Encodes and decodes a tensor of
        zeros, since kernels may be specialised on any of the three. Of several processes on a machine that
        prepare the same codec one compiles, and the others wait and load.

        Raises:
            CodecError: the tensors cannot be encoded, or not by the backend that was asked for.
        """
        x = torch.zeros(tuple(shape), dtype=dtype, device=device)
        with one_compiles(f"{self.spec} on {device.type}"):
            self.decode(self.encode(x), x.shape, dtype)
