"""Which implementation of a codec runs: plain torch (`reference`), numba on the CPU (`cpu`) or Triton on CUDA.

All backends of a codec write the same streams and read each other's. A backend is the module
`<package>/<backend>.py`, imported when it is first chosen: importing tahq.quant needs neither numba nor Triton.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch

from tahq.errors import CodecError, ConfigError

AUTO = "auto"
_PACKAGES = {"eden": "gaussian", "wf": "gaussian"}
"""The package with a codec's backends, where it is not named after the codec."""
BACKENDS = ("reference", "cpu", "triton")


class Kernels(Protocol):
    """The two functions of a backend's module; `threads` is how many threads a CPU backend may use."""

    def encode(self, layout: Any, x: torch.Tensor, *, key: int, threads: int) -> torch.Tensor:
        """The stream of x (any strides; fp32, bf16 or fp16; not written): uint8 [nbytes] on its device."""

    def decode(
        self, layout: Any, buf: torch.Tensor, dtype: torch.dtype, *, key: int, threads: int
    ) -> torch.Tensor | None:
        """A contiguous tensor of the layout's shape on buf's device; None if the stream is damaged.

        The buffer has the right length and is aligned; nothing else about it is trusted. The reference raises
        CodecError instead of returning None, and says what is wrong.
        """


def kernels_for(codec: str, backend: str, device: torch.device, num_elements: int) -> Kernels:
    """The backend that encodes and decodes tensors on this device; for empty tensors always the reference.

    Raises:
        CodecError: the chosen backend does not run on this device, or its dependencies are not installed.
    """
    if backend == AUTO:
        backend = _automatic(device.type)
    _check_device(codec, backend, device)
    return load(codec, backend if num_elements else "reference")


def check_backend(backend: str) -> str:
    """The name of a backend, or `auto`; ConfigError for any other text."""
    if backend not in (AUTO, *BACKENDS):
        raise ConfigError(f"backend must be {AUTO}, {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}; got {backend!r}")
    return backend


def interprets_triton() -> bool:
    """Whether Triton interprets its kernels, which then take CPU tensors: a mode for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def load(codec: str, backend: str) -> Kernels:
    """Import the module of a backend; CodecError if a dependency is not installed."""
    try:
        return cast(Kernels, import_module(f"tahq.quant.{_PACKAGES.get(codec, codec)}.{backend}"))
    except ModuleNotFoundError as error:
        raise CodecError(
            f"codec {codec}: backend {backend} cannot be loaded ({error}); install what is missing, "
            f"or use backend {AUTO} or reference"
        ) from error


@cache
def _automatic(device_type: str) -> str:
    if device_type == "cuda":
        return "triton" if find_spec("triton") is not None else "reference"  # Triton exists for Linux only
    return "cpu" if device_type == "cpu" else "reference"


def _check_device(codec: str, backend: str, device: torch.device) -> None:
    runs_on = {"cpu": ("cpu",), "triton": ("cuda", "cpu") if interprets_triton() else ("cuda",)}
    devices = runs_on.get(backend, (device.type,))
    if device.type not in devices:
        raise CodecError(
            f"codec {codec}: backend {backend} takes tensors on {' or '.join(devices)}, got one on {device}; "
            f"use backend {AUTO}, which chooses by device, or reference, which runs on any"
        )
