"""Tensors to bytes and back: codecs and their byte layouts. Knows no network.

A codec is named by a spec, ``name:key=value,…``::

    raw:dtype=fp32                            the values themselves; fp32, fp16, bf16
    fixed:bits=8,group=64,round=nearest       group-wise fixed point of 2 to 16 bits; nearest, stochastic
    tah:group=64,int4=0.8,tau=2,low=3,high=4  TAH-Quant

docs/wire-format.md describes the bytes of each.
"""

from collections.abc import Callable
from typing import Any

from tahq.quant.codec import Codec
from tahq.quant.fixed_codec import FixedCodec
from tahq.quant.raw_codec import RawCodec
from tahq.quant.spec import CodecSpec
from tahq.quant.tah_codec import TahCodec

__all__ = ["Codec", "CodecSpec", "get_codec"]

_CODECS: dict[str, Callable[[Any], Codec]] = {"raw": RawCodec, "fixed": FixedCodec, "tah": TahCodec}


def get_codec(spec: str | CodecSpec) -> Codec:
    """The codec that a spec names, such as ``tah``, ``fixed:bits=6`` or a `CodecSpec`.

    Raises:
        ConfigError: an unknown codec or parameter, or a value out of range.
    """
    parsed = CodecSpec.parse(spec) if isinstance(spec, str) else spec
    return _CODECS[parsed.name](parsed)
