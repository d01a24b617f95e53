"""Codecs of one direction by cut and by share of the steps, and the bits that they put on the wire.

A schedule is written as `wf:bits=4`: one codec at all cuts; as `wf:bits=5 / wf:bits=4 / wf:bits=4`: one for each cut,
that nearest to the data first; or as `wf:bits=4 @0.9 none`: another one from that share of the steps on. `none` sends
tensors as they are.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tahq.pipeline.cut_model import CodecPair
from tahq.quant import get_codec

NONE = "none"
SHAPE = (16, 512, 768)
"""[B, S, C] of the boundary tensor whose bits are counted."""


@dataclass(frozen=True, slots=True)
class NaiveCodec:
    """Fixed point of 4 bits with one scale per tensor, from its largest magnitude, or as the authors' removed
    compressor had it, from the maximum of x, not of |x|."""

    of_magnitude: bool = True
    is_stateful: bool = False

    def encode(self, x: torch.Tensor, *, key: int) -> torch.Tensor:
        step = (x.abs() if self.of_magnitude else x).amax() / 7
        return (x / step).round().clamp(-8, 7) * step

    def decode(self, coded: torch.Tensor, shape: torch.Size, dtype: torch.dtype, *, key: int) -> torch.Tensor:
        return coded


EXTRA_CODECS: Mapping[str, Any] = {
    "naive 4-bit": NaiveCodec(),
    "naive 4-bit, max(x)": NaiveCodec(of_magnitude=False),
}


def codec(name: str, backend: str) -> Any:
    """The codec of a spec or a name in EXTRA_CODECS; None for `none`."""
    if name == NONE or name in EXTRA_CODECS:
        return EXTRA_CODECS.get(name)
    found = get_codec(name, backend=backend)
    if found.is_stateful:
        raise ValueError(f"{name} remembers samples, so one codec cannot serve several cuts")
    return found


@cache
def bits_per_element(name: str) -> float:
    """On the wire, headers and scales included."""
    if name == NONE or name in EXTRA_CODECS:
        return 32.0 if name == NONE else 4.0
    return get_codec(name).encoded_nbytes(SHAPE) * 8 / math.prod(SHAPE)


@dataclass(frozen=True, slots=True)
class Schedule:
    """By phase: the share of the steps at which it begins, and its codecs, one or as many as there are cuts."""

    phases: tuple[tuple[float, tuple[str, ...]], ...]

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """See the module; ValueError if shares do not rise."""
        first, *others = re.split(r"\s*@\s*([\d.]+)\s+", text.strip())
        shares = [0.0, *map(float, others[::2])]
        if sorted(set(shares)) != shares or shares[-1] > 1:
            raise ValueError(f"{text}: expected shares of the steps that rise, as in 'wf:bits=4 @0.5 wf:bits=6'")
        names = [tuple(name.strip() for name in each.split(" / ")) for each in (first, *others[1::2])]
        return cls(tuple(zip(shares, names, strict=True)))

    def __str__(self) -> str:
        return " ".join((f"@{share:g} " if share else "") + " / ".join(names) for share, names in self.phases)

    def at(self, step: int, steps: int, cut: int) -> str:
        """The codec's name."""
        names = next(names for share, names in reversed(self.phases) if share * steps <= step)
        return names[cut if len(names) > 1 else 0]

    def bits(self, step: int, steps: int, cut: int) -> float:
        """Bits per element in a step."""
        return bits_per_element(self.at(step, steps, cut))


@dataclass(frozen=True, slots=True)
class Wire:
    """What happens to activations and to their gradients at every cut."""

    activations: Schedule
    gradients: Schedule
    backend: str = "reference"

    @classmethod
    def parse(cls, activations: str = NONE, gradients: str = NONE, backend: str = "reference") -> "Wire":
        return cls(Schedule.parse(activations), Schedule.parse(gradients), backend)

    def codecs(self, step: int, steps: int, num_cuts: int) -> list[CodecPair]:
        """By cut, in a step."""
        both = self.activations, self.gradients
        names = [[each.at(step, steps, cut) for each in both] for cut in range(num_cuts)]
        return [(_codec(forward, self.backend), _codec(backward, self.backend)) for forward, backward in names]

    def uplink_bits(self, step: int, steps: int, stages: int, cuts: int) -> float:
        """Bits per boundary element that the busiest of `stages` stages sends in a step, of a training with `cuts`.

        A stage sends activations at the cut behind it and gradients at the cut before it. Of two stages, between which
        the training's middle cut is taken, the larger direction decides, of more the sum.
        """
        a, g = ([each.bits(step, steps, cut) for cut in range(cuts)] for each in (self.activations, self.gradients))
        if stages == 2:
            return max(a[cuts // 2], g[cuts // 2])
        return max(forward + backward for forward, backward in zip([*a, 0.0], [0.0, *g], strict=True))


_codec = cache(codec)
