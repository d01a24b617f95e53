"""A cap as people write it: a rate (``20mbit``), or a share of the rate that a host has (``60%``).

Held as bits per second, or as the text of the share, which says by itself that it is none.
"""

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, SerializationInfo, ValidationInfo

from tahq.units import WRITTEN_BY_HAND, parse_rate, write_rate

LEAST_CAP_BITS_PER_S = 1e5
"""At less, heartbeats would wait long for the shortest message, of 4 KiB."""

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


def parse_cap(value: object) -> float | str:
    """Bits per second from ``20mbit``, or ``60%``; a float passes unchanged.

    Raises:
        ValueError: it is neither, a share not in 0 to 100 %, or a rate below 100 kbit/s.
    """
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        percent = Decimal(match.group(1))
        if not 0 < percent <= 100:
            raise ValueError(f"a share must be above 0 % and at most 100 %; got {value!r}")
        return f"{percent.normalize():f}%"
    try:
        rate = parse_rate(value)
    except ValueError as error:
        raise ValueError(f"a cap must be a rate, such as 20mbit, or a share, such as 60%: {error}") from error
    if rate < LEAST_CAP_BITS_PER_S:
        raise ValueError(f"a cap must be at least {write_rate(LEAST_CAP_BITS_PER_S)}; got {value!r}")
    return rate


def cap_bits_per_s(cap: float | str, rate_bits_per_s: float | None) -> float | None:
    """What a cap comes to on a line of this rate; None: a share of a rate that nobody knows."""
    if not isinstance(cap, str):
        return cap
    return None if rate_bits_per_s is None else float(Decimal(cap.removesuffix("%")) / 100) * rate_bits_per_s


def _validate(value: object, info: ValidationInfo) -> float | str:
    if isinstance(value, float) and info.context == WRITTEN_BY_HAND:
        raise ValueError(f"a quantity needs a unit, such as 20mbit or 60%; got {value!r}")
    return parse_cap(value)


def _serialize(value: Any, info: SerializationInfo) -> Any:
    return write_rate(value) if isinstance(value, float) and info.context == WRITTEN_BY_HAND else value


Cap = Annotated[float | str, BeforeValidator(_validate), PlainSerializer(_serialize)]
"""A pydantic field holding bits per second, or the text of a share."""
