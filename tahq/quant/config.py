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
    """When bits are raised because training quality drops, whatever the bandwidth. NaN always raises them.

    Example: `wire.follow.guard: {max_error: 0.4, hold: 100}`
    """

    max_error: float | None = Field(default=0.5, gt=0)
    """Relative error of a sent tensor, ‖x̂ − x‖/‖x‖, above which its link gets more bits; `null`: not measured."""
    measure_every: int = Field(default=20, ge=1)
    """Steps between measurements of it, each on one micro-batch."""
    loss_rise: float | None = Field(default=0.1, gt=0)
    """Share by which three losses in a row must exceed their moving average, for every link to get more bits;
    `null`: ignored."""
    hold: int = Field(default=50, ge=1)
    """Steps for which bits raised here are not lowered again."""


class FollowConfig(Section):
    """The codecs that each direction of each link may use, and how soon it changes.

    Example: `wire.follow: {activations: ["wf:bits=2", "wf:bits=3", wf], raise_after: 10}`
    """

    activations: Rungs | None = None
    """Codecs from the fewest bits to the most, `wire.activations` among them. Not set: a few around it."""
    gradients: Rungs | None = None
    """The same, backward."""
    raise_after: int = Field(default=5, ge=1)
    """Steps in a row in which more bits would have fitted, before they are taken."""
    lower_after: int = Field(default=1, ge=1)
    """Steps in a row in which a link was the bottleneck, before it gets fewer bits."""
    guard: GuardConfig = GuardConfig()
    """Raises bits when training quality drops."""


class WireConfig(Section):
    """Which codec packs what crosses from one stage to the next.

    `wire: auto` is the same as no section. `wire: paper` is TAH-Quant's pair, `tah` and `fixed:bits=8`.

    Example: `wire: {activations: "wf:bits=6", gradients: "eden:bits=1.5"}`
    """

    activations: str = FLOOR.activations
    """Codec of the forward direction. Not set: chosen before the first step, never below this default."""
    gradients: str = FLOOR.gradients
    """Codec of the backward direction; the same holds."""
    backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    """What computes the codecs: `triton` on CUDA, `cpu` (numba), or `reference` (torch). All write the same bytes."""
    threads: int = Field(default=1, ge=1)
    """Threads of the `cpu` backend for one tensor, in each worker."""
    follow: FollowConfig | None = None
    """Bits that follow the bandwidth from step to step; `true` takes all defaults."""
    all_reduce: str = FP8
    """Codec of gradients that replicas sum; `fp8`: 8.25 bits."""
    all_reduce_inside: str | None = None
    """The same between hosts of one site. Not set: as `all_reduce`."""
    replay: str | None = Field(default=None, min_length=1)
    """metrics.jsonl of a run with `follow`, whose codec changes are repeated."""

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
