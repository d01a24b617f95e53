"""Codec specs as users write them, ``name:key=value,…``: typed values with one canonical text.

Invariants: a spec that exists is valid; `CodecSpec.parse(str(spec)) == spec`; two texts that mean the
same codec parse to equal specs, whatever their order and whichever defaults they leave out.
Nothing here needs torch.
"""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from decimal import Decimal
from difflib import get_close_matches
from fractions import Fraction
from typing import ClassVar

from tahq.errors import ConfigError

MIN_GROUP = 8
MAX_GROUP = 256
EDEN_USEFUL_BITS = 5
"""More bits hardly reduce the error of `eden`: the unbiased rounding of its 8-bit scale costs 4 %."""
_ALLOCATION_TILES = "group, token, or a number of channels that is a multiple of 8"


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """One codec with all of its parameters; each subclass below is one codec."""

    name: ClassVar[str] = ""
    optional: ClassVar[frozenset[str]] = frozenset()
    """Parameters that the canonical text leaves out at their default: texts older than the parameter stay canonical."""

    @staticmethod
    def parse(text: str) -> "CodecSpec":
        """Read ``tah``, ``tah:group=32,tau=inf``, ``fixed:bits=6``; parameters left out take their defaults.

        Raises:
            ConfigError: an unknown codec or parameter, or a value out of range.
        """
        name, colon, rest = text.strip().partition(":")
        spec = _SPECS.get(name)
        if spec is None:
            raise ConfigError(f"codec spec {text!r}: no codec {name!r}{_nearest(name, list(_SPECS))}")
        return spec(**_parameters(text, spec, rest.split(",") if colon else []))

    def __str__(self) -> str:
        """All parameters, except those in `optional` at their default."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        defaults = {field.name: field.default for field in fields(self) if field.name in self.optional}
        written = (f"{key}={_write(value)}" for key, value in values.items() if defaults.get(key) != value)
        return f"{self.name}:{','.join(written)}"

    def parameters(self) -> dict[str, str]:
        """Every parameter as it is written in a spec, by name, defaults included."""
        return {field.name: _write(getattr(self, field.name)) for field in fields(self)}

    def brief(self) -> str:
        """The shortest text that reads back as this spec: its name, and parameters that differ from the defaults."""
        usual = type(self)().parameters()
        changed = ",".join(f"{key}={value}" for key, value in self.parameters().items() if value != usual[key])
        return f"{self.name}:{changed}" if changed else self.name

    def _require(self, holds: bool, parameter: str, expected: str) -> None:
        if not holds:
            got = _write(getattr(self, parameter))
            raise ConfigError(f"codec {self.name}: {parameter} must be {expected}; got {got}")

    def _require_group(self, group: int) -> None:
        is_power = group > 0 and group & (group - 1) == 0
        self._require(is_power and MIN_GROUP <= group <= MAX_GROUP, "group", "a power of two from 8 to 256")


@dataclass(frozen=True, slots=True)
class RawSpec(CodecSpec):
    """The values themselves, in fp32 or rounded to a narrower floating-point type."""

    name: ClassVar[str] = "raw"
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        self._require(self.dtype in ("fp32", "fp16", "bf16"), "dtype", "fp32, fp16 or bf16")


@dataclass(frozen=True, slots=True)
class FixedSpec(CodecSpec):
    """Fixed point: `bits` per element and one fp16 scale for every `group` channels."""

    name: ClassVar[str] = "fixed"
    bits: int = 8
    group: int = 64
    round: str = "nearest"

    def __post_init__(self) -> None:
        self._require(2 <= self.bits <= 16, "bits", "a whole number from 2 to 16")
        self._require_group(self.group)
        self._require(self.round in ("nearest", "stochastic"), "round", "nearest or stochastic")


@dataclass(frozen=True, slots=True)
class TahSpec(CodecSpec):
    """TAH-Quant: `high` bits for the share `int4` of each sample's tiles, `low` bits for the others.

    `int4` is exact (0.8 is 4/5), so that a stream's length is. A tile whose largest magnitude exceeds
    `tau` times its second largest is transformed: 0 transforms every tile that is not zero, inf none.

    Bits are given to allocation tiles of `alloc` channels: `group` (each tile by itself), `token` (all of a
    token's channels), or a number, a multiple of the group that divides the channels. `select` says which tiles
    get `high` bits: those of `high` entropy (the paper's rule) or of `low`. With `adaptive` off as many
    get `low` bits, spread evenly, whatever the data.
    """

    name: ClassVar[str] = "tah"
    optional: ClassVar[frozenset[str]] = frozenset({"alloc", "select", "adaptive"})
    group: int = 64
    int4: Fraction = Fraction(4, 5)
    tau: float = 2.0
    low: int = 3
    high: int = 4
    alloc: str = "group"
    select: str = "high"
    adaptive: str = "on"

    def __post_init__(self) -> None:
        self._require_group(self.group)
        self._require(0 <= self.int4 <= 1, "int4", "a share from 0 to 1")
        self._require(self.tau >= 0, "tau", "0 or above, or inf")
        self._require(2 <= self.low <= 8, "low", "a whole number from 2 to 8")
        self._require(self.low <= self.high <= 8, "high", f"a whole number from low ({self.low}) to 8")
        is_number = re.fullmatch(r"[1-9][0-9]{0,8}", self.alloc, re.ASCII) and int(self.alloc) % MIN_GROUP == 0
        self._require(bool(is_number) or self.alloc in ("group", "token"), "alloc", _ALLOCATION_TILES)
        self._require(self.select in ("high", "low"), "select", "high or low")
        self._require(self.adaptive in ("on", "off"), "adaptive", "on or off")


@dataclass(frozen=True, slots=True)
class AqsgdSpec(CodecSpec):
    """AQ-SGD: fp16 at a sample's first visit, then `bits` per element for the change since the last visit.

    `cache` says where each end remembers every sample as last sent or received: in `memory`, in a memory-mapped
    `file`, or not at all (`none`: the quantiser alone, every time).
    """

    name: ClassVar[str] = "aqsgd"
    bits: int = 4
    cache: str = "memory"

    def __post_init__(self) -> None:
        self._require(2 <= self.bits <= 8, "bits", "a whole number from 2 to 8")
        self._require(self.cache in ("memory", "file", "none"), "cache", "memory, file or none")

    @property
    def has_cache(self) -> bool:
        """Whether anything is remembered."""
        return self.cache != "none"


@dataclass(frozen=True, slots=True)
class EdenSpec(CodecSpec):
    """Randomised Hadamard transform, Gaussian-optimal levels, unbiased: `bits` per value on average, for gradients."""

    name: ClassVar[str] = "eden"
    bits: Fraction = Fraction(3)
    group: int = 256

    def __post_init__(self) -> None:
        self._require(1 <= self.bits <= 8, "bits", "a number from 1 to 8")
        self._require_group(self.group)


@dataclass(frozen=True, slots=True)
class WfSpec(CodecSpec):
    """Water-filling: Hadamard transform, `bits` per value on average, allocated where they reduce a token's error most.

    With `center` on, each channel's mean over the tensor is sent separately, and the differences to it are coded.
    """

    name: ClassVar[str] = "wf"
    bits: Fraction = Fraction(4)
    group: int = 128
    center: str = "on"

    def __post_init__(self) -> None:
        self._require(1 <= self.bits <= 8, "bits", "a number from 1 to 8")
        self._require_group(self.group)
        self._require(self.center in ("on", "off"), "center", "on or off")


_SPECS: dict[str, type[CodecSpec]] = {
    spec.name: spec for spec in (RawSpec, FixedSpec, TahSpec, AqsgdSpec, EdenSpec, WfSpec)
}


def _parameters(text: str, spec: type[CodecSpec], items: list[str]) -> dict[str, object]:
    types = {field.name: field.type for field in fields(spec)}
    given: dict[str, object] = {}
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ConfigError(f"codec spec {text!r}: {item!r} is not key=value, as in {spec()}")
        if key not in types:
            raise ConfigError(f"codec spec {text!r}: no parameter {key!r}{_nearest(key, list(types))}")
        if key in given:
            raise ConfigError(f"codec spec {text!r}: {key} is given twice; leave one")
        given[key] = _read(text, key, value, types[key])
    return given


def _nearest(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def _read(text: str, key: str, value: str, wanted: object) -> object:
    pattern, convert, what = _READERS[wanted]
    if re.fullmatch(pattern, value, re.ASCII) is None:
        raise ConfigError(f"codec spec {text!r}: {key} must be {what}; got {value!r}")
    try:
        return convert(value)
    except ZeroDivisionError:
        raise ConfigError(f"codec spec {text!r}: {key} divides by zero; got {value!r}") from None


# No pattern lets through an exponent: Fraction("1e999999999") would compute for minutes.
_READERS: dict[object, tuple[str, Callable[[str], object], str]] = {
    int: (r"[0-9]{1,9}", int, "a whole number"),
    str: (r"[a-z0-9_]{1,32}", str, "a word"),
    float: (r"[0-9]{1,400}(\.[0-9]{1,400})?|inf", float, "a number or inf"),
    Fraction: (r"[0-9]{1,400}(\.[0-9]{1,400})?|[0-9]{1,400}/[0-9]{1,400}", Fraction, "a number such as 0.8 or 4/5"),
}


_LARGEST_FLOAT = sys.float_info.max


def _write(value: object) -> str:
    """Shortest text that reads back as the same value: 4/5 as 0.8, 1/3 as 1/3, 2.0 as 2."""
    if isinstance(value, Fraction):
        if abs(value) > _LARGEST_FLOAT:
            return str(value)
        decimal = _decimal(float(value))
        return decimal if Fraction(decimal) == value else str(value)
    return _decimal(value) if isinstance(value, float) else str(value)


def _decimal(value: float) -> str:
    return f"{Decimal(repr(value)):f}".removesuffix(".0") if math.isfinite(value) else str(value)
