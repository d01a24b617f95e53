"""The interface of a codec (a tensor to bytes and back), and the codecs whose layout depends on the shape alone."""

import fcntl
import logging
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import torch

from tahq.errors import CodecError
from tahq.quant import stream
from tahq.quant.backends import AUTO, check_backend, kernels_for, load
from tahq.quant.spec import CodecSpec
from tahq.quant.tiling import check_decodable, check_encodable

_log = logging.getLogger(__name__)
_POLL_S = 0.02
_LOGGED_WAIT_S = 1.0
"""Longer waits are logged."""
_MAX_WAIT_S = 60.0
_CACHES = ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR")
_INSTALLATION = Path(__file__).resolve().parent


class Codec(ABC):
    """Packs a tensor `[..., C]` (the first dimension is the sample) into uint8 and back.

    Encoding is a pure function of (x, key, the codec's state), runs on the caller's CUDA stream and
    never synchronises the device. `key` is a 64-bit number that both ends derive from the logical id
    and the run's seed; deterministic codecs ignore it.
    """

    spec: CodecSpec
    is_keyed: bool = False
    """Whether the stream depends on `key`."""
    is_stateful: bool = False
    """Whether the stream depends on what was encoded before: such codecs also take the ids of the samples."""

    @abstractmethod
    def encoded_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that a tensor of this shape takes: exact for fixed-length codecs, else a maximum."""

    @abstractmethod
    def encode(self, x: torch.Tensor, *, key: int = 0) -> torch.Tensor:
        """uint8, 1-D, contiguous, on x's device; x is fp32, bf16 or fp16, any strides.

        Raises:
            CodecError: x has another dtype or no dimension, or is on a device that the forced backend cannot use.
        """

    @abstractmethod
    def decode(
        self, buf: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, key: int = 0
    ) -> torch.Tensor:
        """A fresh, contiguous tensor of `shape` and `dtype` on buf's device, with NaN where values were not finite.

        Raises:
            CodecError: a wrong length, or metadata that no encoder writes. Nothing in `buf` is trusted.
        """

    def has_non_finite(self, buf: torch.Tensor) -> bool:
        """Whether the encoder met NaN or infinity (reads the stream's own flag; CPU buffers only)."""
        return stream.is_flagged(buf)

    def prepare(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Compile or load every kernel that tensors of this shape, dtype and device will need.

        Called before the first step, so that no step waits for a compiler. Encodes and decodes a tensor of
        zeros, since kernels may be specialised on any of the three. If several processes on a machine
        prepare the same codec, one compiles while the others wait and then load the result.

        Raises:
            CodecError: the codec or the forced backend cannot encode such tensors.
        """
        x = torch.zeros(tuple(shape), dtype=dtype, device=device)
        with one_compiles(f"{self.spec} on {device.type}"):
            self.decode(self.encode(x), x.shape, dtype)


class FramedCodec(Codec):
    """A codec with a header, a layout that spec and shape decide, and a module for each backend."""

    def __init__(
        self,
        spec: CodecSpec,
        layout_of: Callable[[Sequence[int]], stream.Layout],
        backend: str = AUTO,
        threads: int = 1,
        *,
        is_keyed: bool = False,
    ) -> None:
        self.spec, self.is_keyed = spec, is_keyed
        self._backend, self._threads = check_backend(backend), threads
        # A run has few shapes, and computing a layout takes as long as launching a kernel.
        self._layout = lru_cache(maxsize=16)(layout_of)

    def encoded_nbytes(self, shape: Sequence[int]) -> int:
        """Exact length of a stream in bytes."""
        return self._layout(tuple(shape)).sections.nbytes

    def encode(self, x: torch.Tensor, *, key: int = 0) -> torch.Tensor:
        """See `Codec.encode`; docs/dev/wire-format.md describes the bytes."""
        check_encodable(x)
        layout = self._layout(tuple(x.shape))
        kernels = kernels_for(self.spec.name, self._backend, x.device, x.numel())
        return kernels.encode(layout, x.detach(), key=key, threads=self._threads)

    def decode(
        self, buf: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, key: int = 0
    ) -> torch.Tensor:
        """See `Codec.decode`; a tile that was not finite is NaN as a whole."""
        check_decodable(dtype)
        layout = self._layout(tuple(shape))
        kernels = kernels_for(self.spec.name, self._backend, buf.device, layout.tiling.num_elements)
        buf = stream.accept(buf, layout.sections.nbytes, self.spec)
        values = kernels.decode(layout, buf, dtype, key=key, threads=self._threads)
        if values is None:
            load(self.spec.name, "reference").decode(layout, buf, dtype, key=key, threads=1)  # says what is wrong
            raise CodecError(f"{self.spec}: damaged stream, but the reference accepts it: please report this")
        return values


@contextmanager
def one_compiles(kernels: str, longest_s: float = _MAX_WAIT_S) -> Iterator[None]:
    """A context for compiling or loading kernels: of several processes that need the same ones, only one compiles.

    The first process enters at once. The others wait until it has left, then enter together and load its cache; if all
    compiled, each would slow the others. After `longest_s` a process enters anyway: the first may have been stopped,
    and compiling twice is slower, not wrong. The lock is the operating system's (flock), so a process that dies while
    holding it releases it. Only processes with the same `kernels` (a name) and the same cache wait for each other.
    """
    cache_of = "\n".join((kernels, str(_INSTALLATION), *(os.environ.get(name, "") for name in _CACHES)))
    name = blake2b(cache_of.encode(), digest_size=8).hexdigest()
    path = Path(tempfile.gettempdir()) / f"tahq-kernels-{os.getuid()}" / f"{name}.lock"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not _try_lock(lock, fcntl.LOCK_EX):
            _wait(lock, kernels, longest_s)
        yield
    finally:
        os.close(lock)  # which unlocks it


def _wait(lock: int, kernels: str, longest_s: float) -> None:
    began_s = time.monotonic()
    while not _try_lock(lock, fcntl.LOCK_SH):
        if time.monotonic() - began_s >= longest_s:
            _log.warning("%s: another process has been compiling it for %.0f s; not waiting longer", kernels, longest_s)
            return
        time.sleep(_POLL_S)
    waited_s = time.monotonic() - began_s
    if waited_s > _LOGGED_WAIT_S:
        _log.info("%s: waited %.1f s for another process to compile it", kernels, waited_s)


def _try_lock(lock: int, mode: int) -> bool:
    try:
        fcntl.flock(lock, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
