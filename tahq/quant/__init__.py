"""Tensors to bytes and back: codecs and their byte layouts. Knows no network.

A codec is named by a spec, ``name:key=value,…``::

    raw:dtype=fp32                            the values themselves; fp32, fp16, bf16
    fixed:bits=8,group=64,round=nearest       group-wise fixed point of 2 to 16 bits; nearest, stochastic
    tah:group=64,int4=0.8,tau=2,low=3,high=4  TAH-Quant; also alloc, select and adaptive
    aqsgd:bits=4,cache=memory                 AQ-SGD; remembers every sample (memory, file) or none
    eden:bits=3,group=256                     randomised Hadamard, unbiased; up to 5 bits on average, for gradients
    wf:bits=4,group=128,center=on             bits where they reduce a token's error most; for activations

docs/dev/wire-format.md describes the bytes of each.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from tahq.errors import ConfigError
from tahq.quant.aqsgd.codec import AqsgdCodec
from tahq.quant.backends import AUTO, BACKENDS, check_backend
from tahq.quant.codec import Codec, FramedCodec
from tahq.quant.fixed.stream import FixedLayout
from tahq.quant.gaussian.tile_stream import TileLayout
from tahq.quant.raw import RawCodec
from tahq.quant.spec import CodecSpec
from tahq.quant.tah.stream import TahLayout

__all__ = ["AUTO", "BACKENDS", "Codec", "CodecSpec", "get_codec"]


def get_codec(spec: str | CodecSpec, *, backend: str = AUTO, threads: int = 1) -> Codec:
    """The codec that a spec names, such as ``tah``, ``fixed:bits=6`` or a `CodecSpec`.

    Args:
        spec: which codec, with which parameters.
        backend: `auto` chooses by the device of each tensor: on the CPU `cpu`, on CUDA `triton` where it is
            installed, else `reference`. Any of these may be forced. All write and read the same streams.
        threads: how many the `cpu` backend may use for one tensor.

    Raises:
        ConfigError: an unknown codec, parameter or backend, or a value out of range.
    """
    if threads < 1:
        raise ConfigError(f"a codec needs at least one thread; got threads={threads}")
    parsed = CodecSpec.parse(spec) if isinstance(spec, str) else spec
    return _CODECS[parsed.name](parsed, check_backend(backend), threads)


def _framed(layout: Any, is_keyed: Callable[[Any], bool] = lambda spec: False) -> Callable[[Any, str, int], Codec]:
    return lambda spec, backend, threads: FramedCodec(
        spec, partial(layout.of, spec), backend, threads, is_keyed=is_keyed(spec)
    )


_CODECS: dict[str, Callable[[Any, str, int], Codec]] = {
    "raw": lambda spec, backend, threads: RawCodec(spec),
    "fixed": _framed(FixedLayout, lambda spec: spec.round == "stochastic"),
    "tah": _framed(TahLayout),
    "aqsgd": lambda spec, backend, threads: AqsgdCodec(spec),
    "eden": _framed(TileLayout, lambda spec: True),
    "wf": _framed(TileLayout),
}
