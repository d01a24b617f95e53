"""Ladders of codecs that a link may use, from the fewest bits to the most.

A ladder holds stateless codecs only: a stateful codec would lose its memory at every change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from tahq.errors import CodecError, ConfigError
from tahq.quant import get_codec
from tahq.quant.spec import EDEN_USEFUL_BITS, AqsgdSpec, CodecSpec, EdenSpec, FixedSpec, RawSpec, TahSpec, WfSpec

_TAH_SHARES = (Fraction(0), Fraction(2, 5), Fraction(4, 5), Fraction(1))


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rungs in ascending order of their length: canonical specs, and bytes of one frame's payload under each."""

    specs: tuple[str, ...]
    nbytes: tuple[int, ...]

    def rung(self, spec: str) -> int | None:
        """The place of a spec on the ladder, however it is written; None if it is not there."""
        canonical = str(CodecSpec.parse(spec))
        return self.specs.index(canonical) if canonical in self.specs else None


def default_ladder(text: str) -> list[str]:
    """The rungs around a codec, it among them, canonical.

    `wf`, `eden`, and `aqsgd` without a cache: one bit less and one more. `fixed`: two bits less and two more.
    `tah`: `high` bits for shares of the tiles from 0 to 1. `raw`: 16 bits and 32.

    Raises:
        ConfigError: an unknown codec, or one that remembers samples.
    """
    spec = refuse_memory(text)
    return [str(rung) for rung in _AROUND[type(spec)](spec)]


def refuse_memory(text: str) -> CodecSpec:
    """The codec that a rung names; ConfigError if it is unknown or remembers samples."""
    spec = CodecSpec.parse(text)
    if isinstance(spec, AqsgdSpec) and spec.has_cache:
        raise ConfigError(
            f"{text!r} remembers the samples that it has sent and cannot be changed from step to step; use "
            "another codec, or aqsgd with cache=none"
        )
    return spec


def ladder_for(specs: Sequence[str], shape: Sequence[int]) -> Ladder:
    """The ladder with these rungs for frames of this shape.

    Args:
        specs: from the fewest bits to the most.
        shape: [B, S, C] of what crosses a cut.

    Raises:
        ConfigError: a rung does not fit the shape, or its frames are not longer than those of the rung below.
    """
    canonical = tuple(str(refuse_memory(spec)) for spec in specs)
    try:
        nbytes = tuple(get_codec(spec).encoded_nbytes(shape) for spec in canonical)
    except CodecError as error:
        raise ConfigError(f"a rung does not fit tensors of shape {list(shape)}: {error}") from error
    for (lower, less), (upper, more) in pairwise(zip(canonical, nbytes, strict=True)):
        if less >= more:
            raise ConfigError(
                f"rungs go from the fewest bits to the most, but {upper} ({more} bytes per frame) comes after {lower} "
                f"({less} bytes)"
            )
    return Ladder(canonical, nbytes)


def _around_bits(least: int, most: int, step: int) -> Callable[[Any], list[CodecSpec]]:
    def rungs(spec: Any) -> list[CodecSpec]:
        wanted = {min(max(most, spec.bits), max(least, spec.bits + change)) for change in (-step, 0, step)}
        return [replace(spec, bits=bits) for bits in sorted(wanted)]

    return rungs


def _around_share(spec: TahSpec) -> list[CodecSpec]:
    if spec.low == spec.high:
        return [spec]
    return [replace(spec, int4=share) for share in sorted({*_TAH_SHARES, spec.int4})]


def _around_raw(spec: RawSpec) -> list[CodecSpec]:
    return [RawSpec("bf16" if spec.dtype == "fp32" else spec.dtype), RawSpec("fp32")]


_AROUND: Mapping[type[CodecSpec], Callable[[Any], list[CodecSpec]]] = {
    WfSpec: _around_bits(1, 8, 1),
    EdenSpec: _around_bits(1, EDEN_USEFUL_BITS, 1),
    AqsgdSpec: _around_bits(2, 8, 1),
    FixedSpec: _around_bits(2, 16, 2),
    TahSpec: _around_share,
    RawSpec: _around_raw,
}
