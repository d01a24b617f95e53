"""pydantic's errors about a configuration, as one line for its author.

The line names the place (file and line, or the ``--set``), the dotted path, what was got, what was
expected, and the nearest known key. The first mistake is told in full; further ones are named.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tahq.errors import brief
from tahq.typed_yaml.positions import Path
from tahq.units import Section, writer_of

_MAX_NAMED = 4
_KEY = re.compile(r"[a-z_]+(\.[A-Za-z0-9_]+)+")


class DisagreementError(ValueError):
    """Raised by a validator when two sections contradict each other; `path` is the key to look at first."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: `place` for people, and the line in the file, 0 where there is none."""

    place: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class Origins:
    """Where each value of a configuration was written.

    A path that is not listed was written where its nearest listed parent was. `changes` are the
    `--set`s, by path: a message about a whole section names those inside it.
    """

    source: str
    known: Mapping[Path, Origin]
    changes: Mapping[Path, str]

    def find(self, path: Path) -> Origin:
        """Where the value at `path`, or the nearest thing around it, was written."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.known:
                return self.known[path[:length]]
        return Origin(self.source)

    def changes_behind(self, mistake: "Mistake") -> list[str]:
        """The `--set`s, beside the mistake's own place, that it may be due to: below it or named by it."""
        place = self.find(mistake.path).place
        return [
            change
            for where, change in self.changes.items()
            if change != place and (_is_below(where, mistake.path) or dotted(where) in mistake.message)
        ]


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong: where in the configuration, and what about it."""

    path: Path
    message: str
    is_unknown_key: bool = False


def dotted(path: Path) -> str:
    """``hosts.1.device``: as a `--set` would write it."""
    return ".".join(brief(str(step)) for step in path)


def one_line(error: ValidationError, data: Any, root: type[BaseModel], origins: Origins) -> str:
    """All that `error` says about `data`, in one line.

    Args:
        error: raised by `root.model_validate(data)`.
        data: plain dicts and lists.
        root: the model of the whole configuration.
        origins: where the values of `data` were written.

    Returns:
        ``cluster.yaml:12: training.micro_bach is not a key of training; did you mean micro_batch?``
        and, where there is more, `` (and 1 more: data.seq_len in line 7)``.
    """
    mistakes = find_mistakes(error, data, root)
    # Unknown keys first: a misspelt key is also missing under its right name.
    mistakes.sort(key=lambda mistake: (not mistake.is_unknown_key, origins.find(mistake.path).line))
    return _told_in_full(mistakes[0], origins) + _named(mistakes[1:], origins)


def _told_in_full(mistake: Mistake, origins: Origins) -> str:
    changes = origins.changes_behind(mistake)
    changed = f" (changed by {', '.join(changes)})" if changes else ""
    return f"{origins.find(mistake.path).place}{changed}: {mistake.message}"


def _named(mistakes: list[Mistake], origins: Origins) -> str:
    if not mistakes:
        return ""
    names = [dotted(m.path) + _in_line(origins.find(m.path)) for m in mistakes[:_MAX_NAMED]]
    more = ", …" if len(mistakes) > _MAX_NAMED else ""
    return f" (and {len(mistakes)} more: {', '.join(names)}{more})"


def _in_line(origin: Origin) -> str:
    return f" in line {origin.line}" if origin.line else ""


def with_place(message: str, root: type[BaseModel], origins: Origins) -> str:
    """A message that begins with a key, such as ``data.tokenizer: no such folder``, behind the place of that key.

    For mistakes found after the configuration was read, in the model, the tokenizer or the network. Other messages are
    returned unchanged.
    """
    key = _KEY.match(message)
    path: Path = tuple(int(step) if step.isdigit() else step for step in key.group().split(".")) if key else ()
    if len(path) < 2 or path[0] not in root.model_fields or not _is_inside(root, path):
        return message
    return _told_in_full(Mistake(path, message), origins)


def _is_inside(root: type[BaseModel], path: Path) -> bool:
    """Whether the second step is a key of the section, or an entry of the list, that the first one names."""
    return isinstance(path[1], int) or path[1] in _section_at(root, path[:1]).model_fields


def find_mistakes(error: ValidationError, data: Any, root: type[BaseModel]) -> list[Mistake]:
    """One mistake a place.

    Where a value may be of several kinds, pydantic reports each kind that it is not: expectations at
    one place are joined by "or", and dropped when another kind fitted well enough to fail deeper.
    """
    by_path: dict[Path, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_path.setdefault(_real_path(details, data), []).append(details)
    return [
        Mistake(path, _message(path, group, data, root), group[0]["type"] == "extra_forbidden")
        for path, group in by_path.items()
        if not (_is_other_kind(group) and any(_is_below(other, path) for other in by_path))
    ]


def _real_path(details: ErrorDetails, data: Any) -> Path:
    """The error's location without the names of union branches, which are no keys of the file."""
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, DisagreementError):
        return cause.path
    path: list[str | int] = []
    value = data
    location = details["loc"]
    for index, step in enumerate(location):
        if isinstance(value, Mapping) and (step in value or _is_missing_key(details, index)):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            continue
        path.append(step)
    return tuple(path)


def _is_missing_key(details: ErrorDetails, index: int) -> bool:
    return details["type"] == "missing" and index == len(details["loc"]) - 1


def _is_below(path: Path, other: Path) -> bool:
    return len(path) > len(other) and path[: len(other)] == other


def _is_other_kind(group: list[ErrorDetails]) -> bool:
    return all(details["type"] in _KINDS for details in group)


def _message(path: Path, group: list[ErrorDetails], data: Any, root: type[BaseModel]) -> str:
    details = group[0]
    if details["type"] == "extra_forbidden":
        return _unknown_key(path, root)
    if details["type"] == "missing":
        return _missing(path, details)
    if details["type"] == "value_error":
        cause = details["ctx"]["error"]
        if isinstance(cause, DisagreementError) or not path:
            return str(cause)
        got = repr(_value_at(data, path))
        return f"{dotted(path)}: {str(cause).replace(got, brief(got))}"
    expected = list(dict.fromkeys(_expected(each, _writer_at(root, path)) for each in group))
    return f"{dotted(path) or 'the top level'}: expected {' or '.join(expected)}; got {_shown(_value_at(data, path))}"


def _missing(path: Path, details: ErrorDetails) -> str:
    key = details["loc"][-1]
    if isinstance(key, int):
        return f"{dotted(path)}: expected {key + 1} or more entries; got fewer"
    return f"{dotted(path)} is missing" + ("; a run needs this section" if len(path) == 1 else "")


_KINDS: dict[str, str] = {
    "string_type": "text (put it in quotes)",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "none_required": "null",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
}
"""What was expected, by pydantic's type of error, where a value is of the wrong kind."""

_BOUNDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "literal_error": lambda ctx: str(ctx["expected"]).replace("'", ""),
    "greater_than": lambda ctx: f"more than {ctx['gt']}",
    "greater_than_equal": lambda ctx: f"{ctx['ge']} or more",
    "less_than": lambda ctx: f"less than {ctx['lt']}",
    "less_than_equal": lambda ctx: f"at most {ctx['le']}",
    "string_too_short": lambda ctx: "text that is not empty",
    "too_short": lambda ctx: f"{ctx['min_length']} or more entries",
    "too_long": lambda ctx: f"at most {ctx['max_length']} entries",
}
"""The same where the kind is right and the value is not."""


_LIMITS = ("gt", "ge", "lt", "le")
"""Which of pydantic's figures have the unit of the value; lengths of lists have none."""


def _expected(details: ErrorDetails, write: Callable[[Any], str] | None) -> str:
    kind = details["type"]
    if kind in _BOUNDS:
        ctx = details["ctx"]
        return _BOUNDS[kind]({key: write(ctx[key]) if write and key in _LIMITS else ctx[key] for key in ctx})
    return _KINDS.get(kind) or details["msg"]


def _writer_at(root: type[BaseModel], path: Path) -> Callable[[Any], str] | None:
    """What writes the quantity at `path` with its unit; None: what is there is none."""
    *_, last = ("", *(step for step in path if isinstance(step, str)))
    field = _section_at(root, path[:-1]).model_fields.get(last)
    return None if field is None else writer_of(field.annotation, field.metadata)


def _shown(value: Any) -> str:
    """The value as people would write it, shortened."""
    if isinstance(value, Mapping):
        return f"keys and values ({brief(', '.join(value))})" if value else "no keys"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "nothing (null)", True: "true", False: "false"}[value]
    return brief(repr(value))


def _value_at(data: Any, path: Path) -> Any:
    for step in path:
        data = data[step]
    return data


# -- unknown keys --------------------------------------------------------------------------------


def _unknown_key(path: Path, root: type[BaseModel]) -> str:
    *parents, key = path
    known = _fields_at(root, tuple(parents))
    hint = _hint(str(key)[:100], known, _all_keys(root))
    owner = dotted(tuple(parents))
    if not owner:
        return f"{brief(str(key))} is not a section of a configuration{hint}"
    return f"{dotted(path)} is not a key of {owner}{hint}"


def _hint(key: str, known: list[str], elsewhere: Mapping[str, str]) -> str:
    nearest = difflib.get_close_matches(key, known, n=1)
    if nearest:
        return f"; did you mean {nearest[0]}?"
    if key in elsewhere and elsewhere[key] != key:
        return f"; did you mean {elsewhere[key]}?"
    return f"; known are {', '.join(known)}"


def _fields_at(root: type[BaseModel], path: Path) -> list[str]:
    """Keys of the section at `path`; those of the host list's entries where an index leads to one."""
    return list(_section_at(root, path).model_fields)


def _section_at(root: type[BaseModel], path: Path) -> type[BaseModel]:
    """The section at `path`, or the nearest around it."""
    model = root
    for step in path:
        if isinstance(step, str) and step in model.model_fields:
            model = next(_sections(model.model_fields[step].annotation), model)
    return model


def _all_keys(root: type[BaseModel]) -> dict[str, str]:
    """Where each key belongs, as `section.key`, for a key that is written into the wrong section."""
    keys: dict[str, str] = {}
    for name, field in root.model_fields.items():
        for section in _sections(field.annotation):
            keys |= {key: f"{name}.{key}" for key in section.model_fields}
    return keys


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The section types within a type, however deep in unions, lists and annotations."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _sections(part)
