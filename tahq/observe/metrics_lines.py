"""metrics.jsonl read again, line by line, with the number of a line that is not as expected."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tahq.errors import UserError

Value = TypeVar("Value")

WRONG = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What is raised on the way from a line to a value if it is not the line of a step, or not JSON."""


def read_lines(metrics: Path, value_of: Callable[[Any], Value], what: str) -> list[Value]:
    """A value of each line that is complete, in order.

    A last line without a newline is left out: it is being written, or was cut by a kill or a full disk (`metrics.py`).

    Args:
        metrics: the file.
        value_of: makes the value of a line's JSON; raises one of `WRONG` if it is not as it should be.
        what: every line should have, for the message.

    Raises:
        UserError: the file cannot be read, or one of its lines; with its number, from 1.
    """
    try:
        lines = metrics.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise UserError(f"cannot read {metrics}: {error.strerror}") from error
    values = []
    for number, line in enumerate(lines, start=1):
        try:
            values.append(value_of(json.loads(line)))
        except WRONG as error:
            raise UserError(
                f"{metrics}:{number} does not have {what} ({_reason(error)}); was it written by this tahq?"
            ) from error
    return values


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON from character {error.colno} on: {error.msg}"
    return f"no key {error}" if isinstance(error, KeyError) else str(error)
