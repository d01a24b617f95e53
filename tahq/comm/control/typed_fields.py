"""Whether plain values have the types that a dataclass says its fields have.

Knows the types that control messages are made of: int, float (an int will do), bool, str, None, and
list, dict and unions of these. An int never passes for a bool, nor a bool for an int.
"""

import reprlib
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


@cache
def field_types(cls: type) -> dict[str, Any]:
    """The type of every field of a dataclass, by name."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def check_fields(cls: type, values: object) -> dict[str, Any]:
    """`values` as keyword arguments for `cls`: every field there, none besides, each of its type.

    Raises:
        TypeError: something is missing, unknown or of another type; the message says what.
    """
    types = field_types(cls)
    if not isinstance(values, dict) or values.keys() != types.keys():
        got = sorted(map(str, values)) if isinstance(values, dict) else type(values).__name__
        raise TypeError(f"{cls.__name__} has fields {sorted(types)}; got {reprlib.repr(got)}")
    return {name: _check_field(cls, name, hint, values[name]) for name, hint in types.items()}


def _check_field(cls: type, name: str, hint: Any, value: object) -> object:
    try:
        return conform(hint, value)
    except TypeError:
        expected = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
        raise TypeError(f"{cls.__name__}.{name} is {expected}; got {reprlib.repr(value)}") from None


def conform(hint: Any, value: object) -> object:
    """`value`, ints made floats where `hint` says float; TypeError if it has another type."""
    origin = get_origin(hint)
    if origin is UnionType:
        return _conform_to_any(get_args(hint), value)
    if origin is list and isinstance(value, list):
        (item_hint,) = get_args(hint)
        return [conform(item_hint, item) for item in value]
    if origin is dict and isinstance(value, dict):
        key_hint, item_hint = get_args(hint)
        return {conform(key_hint, key): conform(item_hint, item) for key, item in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is hint:
        return value
    raise TypeError(f"{value!r} is not {hint}")


def _conform_to_any(hints: tuple[Any, ...], value: object) -> object:
    for hint in hints:
        try:
            return conform(hint, value)
        except TypeError:
            continue
    raise TypeError(f"{value!r} is none of {hints}")
