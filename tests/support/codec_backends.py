"""Which codecs there are with which backends, what can run here, and where its tensors live.

A new codec is one line in KERNELS if it has kernels, a new backend one name in its line.
"""

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch

from tahq.quant import get_codec
from tahq.quant.backends import interprets_triton
from tahq.quant.codec import Codec

KERNELS = {"tah": ("cpu", "triton"), "fixed": ("cpu", "triton"), "eden": ("cpu", "triton"), "wf": ("cpu", "triton")}
"""Backends beside the reference, by codec; a codec that is not here has the reference only."""
ALL_BACKENDS = ("reference", "cpu", "triton")


def can_run(backend: str) -> bool:
    """CUDA's kernels run on CUDA, or interpreted by triton 3.9, which is slow and has to be asked for."""
    if backend != "triton":
        return True
    if find_spec("triton") is None:
        return False
    return torch.cuda.is_available() or (interprets_triton() and _triton_version() >= (3, 9))


def _triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("triton").split(".")[:2])


def device_of(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")


def is_slow(backend: str) -> bool:
    """Triton's kernels take a second to interpret, or to compile for each spec, dtype and kind of shape."""
    return backend == "triton"


def backends_of(spec: str) -> tuple[str, ...]:
    return ("reference", *KERNELS.get(spec.partition(":")[0], ()))


def params(cases: Iterable[tuple], backend: int) -> list:
    """Parameters of a test without those whose backend, which stands at this place, cannot run here.

    `test_backends.py` skips one test in their stead. What runs on CUDA is marked `gpu` and `slow`; tests/gpu, which
    compiles less, is for everyday use.
    """
    return [pytest.param(*case, marks=_marks(case[backend])) for case in cases if can_run(case[backend])]


def _marks(backend: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu] if device_of(backend).type == "cuda" else []


def every_codec_and_backend(specs: Iterable[str], *, kernels_only: bool = False) -> pytest.MarkDecorator:
    """`spec` and `backend` over all that a codec has."""
    first = 1 if kernels_only else 0
    cases = [(spec, backend) for spec in specs for backend in backends_of(spec)[first:]]
    return pytest.mark.parametrize(("spec", "backend"), params(cases, 1))


every_backend = pytest.mark.parametrize("backend", params([(backend,) for backend in ALL_BACKENDS], 0))


def encode(codec: Codec, x: torch.Tensor, backend: str, key: int = 0) -> torch.Tensor:
    """The stream, on the CPU, of a tensor from anywhere, written where the backend runs."""
    return codec.encode(x.to(device_of(backend)), key=key).cpu()


def decode(
    codec: Codec, buf: torch.Tensor, shape: Sequence[int], backend: str, dtype: torch.dtype, key: int = 0
) -> torch.Tensor:
    """The values, on the CPU, of a stream that is read where the backend runs."""
    return codec.decode(buf.to(device_of(backend)), shape, dtype, key=key).cpu()


def streams(spec: str, backends: Iterable[str], x: torch.Tensor, key: int = 0) -> dict[str, torch.Tensor]:
    """What each of the backends makes of x."""
    return {backend: encode(get_codec(spec, backend=backend), x, backend, key) for backend in backends}
