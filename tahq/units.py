"""Quantities as people write them (``100mbit``, ``20ms``, ``64KiB``) and as the code holds them.

Rates are bits per second, decimal (1 mbit = 10**6 bit/s), as tc and every ISP count them;
durations are seconds; sizes are bytes, decimal (kB, MB) or binary (KiB, MiB). Units are read without
regard to case. ``parse_*`` raises ValueError for other text; ``write_*`` is its exact inverse.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    SerializationInfo,
    ValidationInfo,
    field_validator,
)

from tahq.errors import brief

# Decimals, because 50 * 1e-6 is not 5e-5 in binary.
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z/]*)\s*")
_RATES: Final = {"bit": Decimal(1), "kbit": Decimal(10**3), "mbit": Decimal(10**6), "gbit": Decimal(10**9)}
_SECONDS = {"us": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600"}
_DURATIONS: Final = {unit: Decimal(seconds) for unit, seconds in _SECONDS.items()}
_DECIMAL_SIZES: Final = {unit: Decimal(1000**power) for power, unit in enumerate(("b", "kb", "mb", "gb"))}
_BINARY_SIZES: Final = {unit: Decimal(1024**power) for power, unit in enumerate(("kib", "mib", "gib"), start=1)}
_SIZES: Final = _DECIMAL_SIZES | _BINARY_SIZES

WRITTEN_BY_HAND: Final = {"units": "written"}
"""Validation and serialisation context for YAML, where a quantity carries its unit as text."""


def _parse(text: object, table: Mapping[str, Decimal], what: str, example: str) -> float:
    if isinstance(text, bool) or not isinstance(text, str):
        raise ValueError(f"{what} needs a unit, such as {example}; got {brief(repr(text))}")
    match = _NUMBER.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if table is _RATES:
        unit = unit.removesuffix("/s")
    if match is None or unit not in table:
        raise ValueError(f"{what} must be like {example} (units: {', '.join(table)}); got {brief(repr(text))}")
    return float(Decimal(match.group(1)) * table[unit])


def parse_rate(text: object) -> float:
    """Bits per second, above zero, from ``100mbit``, ``1.5gbit``, ``300 Mbit/s``; a float passes unchanged."""
    rate = text if isinstance(text, float) else _parse(text, _RATES, "a rate", "100mbit")
    if not 0 < rate < math.inf:
        raise ValueError(f"a rate must be above zero and finite; got {brief(repr(text))}")
    return rate


def parse_duration(text: object) -> float:
    """Seconds, zero or more, from ``20ms``, ``1.5s``, ``2min``; a float, or a plain 0, passes unchanged."""
    if isinstance(text, int) and not isinstance(text, bool) and text == 0:
        return 0.0
    duration = text if isinstance(text, float) else _parse(text, _DURATIONS, "a duration", "20ms")
    if not 0 <= duration < math.inf:
        raise ValueError(f"a duration must be zero or more, and finite; got {brief(repr(text))}")
    return duration


def parse_size(text: object) -> int:
    """Whole bytes, zero or more, from ``64KiB``, ``1MB``; an int passes unchanged."""
    is_whole = isinstance(text, int) and not isinstance(text, bool)
    size: Any = text if is_whole else _parse(text, _SIZES, "a size", "64KiB")
    if size < 0 or size % 1 != 0:
        raise ValueError(f"a size must be a whole number of bytes, zero or more; got {brief(repr(text))}")
    return int(size)


def write_rate(bits_per_s: float) -> str:
    """``100mbit``: the shortest text that `parse_rate` reads back to the same float."""
    return _write(bits_per_s, _RATES, "bit")


def write_duration(seconds: float) -> str:
    """``20ms``: the shortest text that `parse_duration` reads back to the same float."""
    return _write(seconds, _DURATIONS, "s")


def write_size(nbytes: int) -> str:
    """``256kib``: the shortest text that `parse_size` reads back to the same number."""
    return _write(nbytes, _SIZES, "b")


def _write(value: float, table: Mapping[str, Decimal], base: str) -> str:
    if value == 0:
        return f"0{base}"
    numbers = {unit: _shortest(Decimal(repr(value)) / factor) for unit, factor in table.items()}
    exact = [f"{number}{unit}" for unit, number in numbers.items() if float(Decimal(number) * table[unit]) == value]
    return min(exact, key=len)


def _shortest(number: Decimal) -> str:
    plain = f"{number.normalize():f}"
    return plain if len(plain) <= 20 else f"{number.normalize():e}"


def format_size(nbytes: float) -> str:
    """``1.25 MB``: decimal units, three significant digits."""
    return _format(nbytes, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), "B")


def counted(working: Callable[[str], None], activity: str, total_nbytes: int) -> Callable[[int], None]:
    """A function that adds up bytes and reports them: ``loading weights, 3.1 GB of 12.4 GB``."""
    total, done = format_size(total_nbytes), 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        working(f"{activity}, {format_size(done)} of {total}")

    return add


def format_rate(bits_per_s: float) -> str:
    """``95.6 Mbit/s``: decimal units, three significant digits."""
    return _format(bits_per_s, (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)), "bit/s")


def _format(value: float, units: tuple[tuple[str, float], ...], base: str) -> str:
    for unit, factor in units:
        if value >= factor:
            number = value / factor  # %g would write 1000 and more with an exponent
            return f"{number:.0f} {unit}" if number >= 999.5 else f"{number:.3g} {unit}"
    return f"{value:.0f} {base}"


# -- fields of pydantic models ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bound:
    """Metadata of a field: how messages write its bounds."""

    write: Callable[[Any], str]


def writer_of(annotation: Any, metadata: Iterable[Any] = ()) -> Callable[[Any], str] | None:
    """How the bounds of a pydantic field are written with their unit; None: the field is not a quantity.

    pydantic moves the outermost `Annotated` of a field from its annotation to its metadata.
    """
    for each in (*metadata, *getattr(annotation, "__metadata__", ())):
        if isinstance(each, _Bound):
            return each.write
    return next(filter(None, map(writer_of, getattr(annotation, "__args__", ()))), None)


def _is_by_hand(context: Any) -> bool:
    return isinstance(context, Mapping) and context.get("units") == "written"


def _reads(parse: Callable[[object], float]) -> BeforeValidator:
    def validate(value: object, info: ValidationInfo) -> float:
        # Refused, as a bare integer is: `rate: 1.5` could be anything.
        if isinstance(value, float) and value != 0 and _is_by_hand(info.context):
            raise ValueError(f"a quantity needs a unit, such as 100mbit or 20ms; got {brief(repr(value))}")
        return parse(value)

    return BeforeValidator(validate)


def _writes(write: Callable[[Any], str]) -> PlainSerializer:
    def serialize(value: Any, info: SerializationInfo) -> Any:
        return write(value) if _is_by_hand(info.context) else value

    return PlainSerializer(serialize)


def _size_bound(nbytes: int) -> str:
    """``4KiB``: as `write_size`, in the usual case."""
    text = write_size(nbytes)
    return text[:-3] + text[-3:].upper().replace("I", "i").replace("KB", "kB")


Rate = Annotated[float, _reads(parse_rate), _writes(write_rate), _Bound(write_rate)]
"""A pydantic field holding bits per second; a float from Python or JSON passes unchanged."""

Duration = Annotated[float, _reads(parse_duration), _writes(write_duration), _Bound(write_duration)]
"""A pydantic field holding seconds; a float from Python or JSON passes unchanged."""

Size = Annotated[int, BeforeValidator(parse_size), _writes(write_size), _Bound(_size_bound)]
"""A pydantic field holding bytes; an int passes unchanged."""


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that a value of `annotation` may have; those inside lists and the like are left out."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    elif get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    else:
        yield annotation


class Section(BaseModel):
    """A part of cluster.yaml: frozen, and closed to unknown keys.

    Frozen means that fields cannot be assigned. Lists and dicts inside are shared, not copied: read
    them, never change them.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def set_default(self, key: str, value: object) -> None:
        """Give a key that the file leaves open a default that depends on other keys; for validators only.

        It still counts as left open: `model_fields_set` does not have it.
        """
        object.__setattr__(self, key, value)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        # Python counts True as 1, and pydantic follows; `steps: true` is still a mistake.
        # For a key that takes no number, pydantic itself says what was expected.
        kinds = set(_kinds(cls.model_fields[str(info.field_name)].annotation))
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
            raise ValueError(f"expected a number; got {str(value).lower()}")
        return value
