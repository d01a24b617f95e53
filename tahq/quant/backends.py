"""Which implementation of a codec's arithmetic runs: plain torch, numba on the CPU, triton on CUDA.

All backends of a codec write the same streams and read each other's. A backend is one module,
`<codec>/<backend>.py`, imported when it is first chosen: importing tahq.quant needs neither numba nor triton.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Generic, Protocol, TypeVar

import torch

from tahq.errors import CodecError, ConfigError

AUTO = "auto"
BACKENDS = ("reference", "cpu", "triton")
_AUTOMATIC = {"cpu": "cpu", "cuda": "triton"}

L = TypeVar("L")
L_contra = TypeVar("L_contra", contravariant=True)


class Encode(Protocol[L_contra]):
    """The finished stream of x (any strides; fp32, bf16 or fp16; not written): uint8 [nbytes] on its device."""

    def __call__(self, layout: L_contra, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
        """`threads` is how many a CPU backend may use."""


class Decode(Protocol[L_contra]):
    """A contiguous tensor of the layout's shape on buf's device; CodecError for a buffer that is no stream."""

    def __call__(
        self, layout: L_contra, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
    ) -> torch.Tensor:
        """`threads` is how many a CPU backend may use."""


@dataclass(frozen=True, slots=True)
class Kernels(Generic[L]):
    """The two functions that every backend of a codec has; L is the codec's layout."""

    encode: Encode[L]
    decode: Decode[L]


class Dispatch(Generic[L]):
    """The backends of one codec, and the choice among them by device.

    Args:
        codec: the codec's name, which is that of its package.
        reference: the plain implementation, which runs on any device.
        backend: the one that is forced, or `auto`.
        kernels: the backends that the codec has beside the reference.

    Raises:
        ConfigError: no such backend.
    """

    def __init__(
        self,
        codec: str,
        reference: Kernels[L],
        backend: str = AUTO,
        kernels: Collection[str] = ("cpu", "triton"),
    ) -> None:
        self._codec = codec
        self._backend = check_backend(backend)
        self._names = ("reference", *kernels)
        self._loaded = {"reference": reference}

    def kernels(self, device: torch.device, num_elements: int) -> Kernels[L]:
        """What encodes and decodes tensors on this device; of empty ones, always the reference.

        Raises:
            CodecError: the codec does not have the forced backend, it does not run on this device, or what it
                needs is not installed.
        """
        backend = self._backend if self._backend != AUTO else self._automatic(device.type)
        if backend not in self._names:
            raise CodecError(f"codec {self._codec} has no backend {backend}; it has {' and '.join(self._names)}")
        _check_device(self._codec, backend, device)
        if num_elements == 0:
            backend = "reference"
        if backend not in self._loaded:
            self._loaded[backend] = _load(self._codec, backend)
        return self._loaded[backend]

    def _automatic(self, device_type: str) -> str:
        backend = _AUTOMATIC.get(device_type, "reference")
        if backend in self._loaded:
            return backend
        # numba comes with tahq; triton there is for Linux only.
        can_load = backend in self._names and (backend != "triton" or find_spec("triton") is not None)
        return backend if can_load else "reference"


def check_backend(backend: str) -> str:
    """The name of a backend, or `auto`.

    Raises:
        ConfigError: any other text.
    """
    if backend not in (AUTO, *BACKENDS):
        raise ConfigError(f"backend must be {AUTO}, {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}; got {backend!r}")
    return backend


def interprets_triton() -> bool:
    """Whether triton interprets its kernels, which then take CPU tensors: a mode for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _check_device(codec: str, backend: str, device: torch.device) -> None:
    runs_on = {"cpu": ("cpu",), "triton": ("cuda", "cpu") if interprets_triton() else ("cuda",)}
    devices = runs_on.get(backend, (device.type,))
    if device.type not in devices:
        raise CodecError(
            f"codec {codec}: backend {backend} takes tensors on {' or '.join(devices)}, got one on {device}; "
            f"use backend {AUTO}, which looks at the device, or reference, which runs on any"
        )


def _load(codec: str, backend: str) -> Kernels[L]:
    try:
        module = import_module(f"tahq.quant.{codec}.{backend}")
    except ModuleNotFoundError as error:
        raise CodecError(
            f"codec {codec}: backend {backend} cannot be loaded ({error}); install what is missing, "
            f"or use backend {AUTO} or reference"
        ) from error
    return Kernels(module.encode, module.decode)
