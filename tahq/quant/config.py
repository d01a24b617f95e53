"""The `wire:` section of cluster.yaml: which codec packs each direction, and whether its bits follow the bandwidth."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from tahq.errors import ConfigError
from tahq.quant.ladder import default_ladder, refuse_memory
from tahq.quant.quality import FLOOR
from tahq.quant.spec import EDEN_USEFUL_BITS, AqsgdSpec, CodecSpec, EdenSpec
from tahq.units import Section

_log = logging.getLogger(__name__)
PAPER_WORD = "paper"
PAPER: Mapping[str, str] = MappingProxyType({"activations": "tah", "gradients": "fixed:bits=8"})
"""The codecs that `wire: paper` selects: TAH-Quant's pair, with 8-bit gradients."""
FP8 = "fp8"
"""E4M3 in blocks of 128 with a scale, for `all_reduce`."""
WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType({PAPER_WORD: PAPER, "auto": {}})
"""Words in place of the section."""


@cache
def _warn_of_wasted_bits(spec: CodecSpec) -> None:
    """Once per process and spec, as a configuration is read several times."""
    if isinstance(spec, EdenSpec) and spec.bits > EDEN_USEFUL_BITS:
        _log.warning(
            "%s wastes bits: above %d bits the error hardly falls, as the unbiased rounding of eden's 8-bit scale "
            "costs 4 %%; use fixed:bits=%d,round=stochastic, which is unbiased too, or eden:bits=%d",
            spec,
            EDEN_USEFUL_BITS,
            math.ceil(spec.bits),
            EDEN_USEFUL_BITS,
        )


@contextmanager
def _as_value_error(prefix: str = "") -> Iterator[None]:
    """Raise ConfigErrors as ValueErrors, which pydantic collects and reports with file and line."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(f"{prefix}{error}") from error


def _stateless(text: str) -> str:
    with _as_value_error():
        _warn_of_wasted_bits(refuse_memory(text))
    return text


Rungs = Annotated[list[Annotated[str, AfterValidator(_stateless)]], Field(min_length=1, max_length=32)]
"""Codecs of a ladder, from the fewest bits to the most."""


class GuardConfig(Section):
    """When bits are raised because training quality drops, whatever the bandwidth.

    Attributes:
        max_error: ‖x̂ − x‖/‖x‖ of a tensor above which its link and direction are raised; None: ignored.
        measure_every: steps between measurements of it, on one micro-batch.
        loss_rise: share by which the loss may exceed its moving average, step after step; None: ignored.
        hold: steps for which bits raised here are not lowered again.
    """

    max_error: float | None = Field(default=0.5, gt=0)
    measure_every: int = Field(default=20, ge=1)
    loss_rise: float | None = Field(default=0.1, gt=0)
    hold: int = Field(default=50, ge=1)


class FollowConfig(Section):
    """Bits that follow the bandwidth: the codecs to choose from, and how fast to change.

    Attributes:
        activations: rungs; None: those around `wire.activations`.
        gradients: rungs; None: those around `wire.gradients`.
        raise_after: consecutive steps in which more bits would have fitted.
        lower_after: consecutive steps in which a link was the bottleneck.
        guard: raises bits for training quality.
    """

    activations: Rungs | None = None
    gradients: Rungs | None = None
    raise_after: int = Field(default=5, ge=1)
    lower_after: int = Field(default=1, ge=1)
    guard: GuardConfig = GuardConfig()


class WireConfig(Section):
    """The codec of each direction, and its backend; docs/dev/wire-format.md has the specs.

    The word `paper` in place of the section means TAH activations and 8-bit fixed-point gradients, `auto` that nothing
    is set: the default is the floor of `tahq.quant.quality`. `follow` may be true or false.
    """

    activations: str = FLOOR.activations
    gradients: str = FLOOR.gradients
    backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    threads: int = Field(default=1, ge=1)
    follow: FollowConfig | None = None
    all_reduce: str = FP8
    """Codec of gradients that replicas sum (`pipeline.replicas`): `fp8`, or any that keeps no memory of samples."""
    all_reduce_inside: str | None = None
    """The same between hosts of one site; None: `all_reduce`."""
    replay: str | None = Field(default=None, min_length=1)
    """metrics.jsonl of an earlier run whose codec changes are repeated, instead of measuring."""

    @model_validator(mode="before")
    @classmethod
    def _expand_words(cls, value: Any) -> Any:
        if isinstance(value, str) and value in WORDS:
            return dict(WORDS[value])
        if isinstance(value, str):
            raise ValueError(f"expected keys and values, or one of the words {', '.join(WORDS)}; got {value!r}")
        if isinstance(value, Mapping) and isinstance(value.get("follow"), bool):
            return {**value, "follow": {} if value["follow"] else None}
        return value

    @field_validator("activations", "gradients")
    @classmethod
    def _known_codec(cls, text: str) -> str:
        with _as_value_error():
            _warn_of_wasted_bits(CodecSpec.parse(text))
        return text

    @field_validator("all_reduce", "all_reduce_inside")
    @classmethod
    def _known_codec_of_sums(cls, text: str | None) -> str | None:
        return text if text in (None, FP8) else _stateless(text)

    @field_validator("gradients")
    @classmethod
    def _gradients_are_not_remembered(cls, text: str) -> str:
        spec = CodecSpec.parse(text)
        if isinstance(spec, AqsgdSpec) and spec.has_cache:
            raise ValueError(
                f"AQ-SGD remembers activations, not gradients; got {text!r}: use fixed:bits=8 as its authors do, or "
                f"aqsgd:bits={spec.bits},cache=none for its quantiser alone"
            )
        return text

    @model_validator(mode="after")
    def _is_on_its_ladders(self) -> Self:
        if self.follow is None:
            if self.replay is not None:
                raise ValueError("wire.replay repeats changes on the ladders of wire.follow: set wire.follow too")
            return self
        for name, spec in self.specs().items():
            rungs = _stateless_ladder(name, spec, getattr(self.follow, name))
            if str(CodecSpec.parse(spec)) not in rungs:
                raise ValueError(
                    f"wire.{name} is where a run begins and must be one of wire.follow.{name}; {spec!r} is not among "
                    f"{', '.join(rungs)}"
                )
        return self

    def resolved(self) -> "WireConfig":
        """A copy with all parameters of the codecs, and all rungs, written out."""
        changed: dict[str, Any] = {name: str(CodecSpec.parse(spec)) for name, spec in self.specs().items()}
        if self.follow is not None:
            changed["follow"] = self.follow.model_copy(update=self.rungs())
        return self.model_copy(update=changed)

    def rungs(self) -> dict[str, list[str]]:
        """The codecs that each direction may have, canonical, from the fewest bits to the most."""
        if self.follow is None:
            return {name: [str(CodecSpec.parse(spec))] for name, spec in self.specs().items()}
        given = {name: getattr(self.follow, name) for name in self.specs()}
        return {name: _stateless_ladder(name, spec, given[name]) for name, spec in self.specs().items()}

    def specs(self) -> dict[str, str]:
        """The codecs by the key that names them."""
        return {"activations": self.activations, "gradients": self.gradients}


def _stateless_ladder(name: str, spec: str, rungs: list[str] | None) -> list[str]:
    """The given rungs, or those around `spec`; ValueError if that codec cannot change during a run."""
    with _as_value_error(f"wire.{name}: "):
        return default_ladder(spec) if rungs is None else [str(CodecSpec.parse(rung)) for rung in rungs]
