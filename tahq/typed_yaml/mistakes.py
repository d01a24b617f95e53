"""Typed sections of YAML files, and pydantic's errors about them as one line for their author.

The line names the place (file and line, or the ``--set``), the dotted path, the value, what was expected, and the
nearest known key. The first mistake is reported in full; further ones are named.

A validator of the whole configuration, which finds that two sections contradict each other, raises a ValueError whose
message begins with the key to look at first: ``data.seq_len 512 is longer than model.max_seq_len 256``.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tahq.errors import ConfigError, brief
from tahq.typed_yaml.positions import MAX_VALUES, Document, KeyPath, YamlError, parse_yaml
from tahq.units import WRITTEN_BY_HAND, Section, writer_of

_MAX_NAMED = 4
_KEY = re.compile(r"[a-z_]+(\.[A-Za-z0-9_]+)*")

SomeModel = TypeVar("SomeModel", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Origins:
    """Where each value of a configuration was written.

    Attributes:
        source: the file, for messages.
        known: the line of each value, or the ``--set`` that it came from; a path that is not listed was written where
            its nearest listed parent was.
        changes: the ``--set``s by path: a message about a whole section names those inside it.
    """

    source: str
    known: Mapping[KeyPath, int | str] = field(default_factory=dict)
    changes: Mapping[KeyPath, str] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int:
        """The line of the value at `path`; 0 if it was not written in the file."""
        origin = self._find(path)
        return origin if isinstance(origin, int) else 0

    def report(self, path: KeyPath, message: str) -> str:
        """A mistake at `path` with its place, and the ``--set``s elsewhere that may cause it: below or named by it."""
        origin = self._find(path)
        place = origin if isinstance(origin, str) else f"{self.source}:{origin}" if origin else self.source
        changes = [
            change
            for where, change in self.changes.items()
            if change != place and (_is_below(where, path) or dotted(where) in message)
        ]
        changed = f" (changed by {', '.join(changes)})" if changes else ""
        return f"{place}{changed}: {message}"

    def _find(self, path: KeyPath) -> int | str:
        """Where the value at `path`, or the nearest section around it, was written; 0: nowhere in particular."""
        # The whole file has no line: a key that is missing from it is missing everywhere.
        return next((self.known[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.known), 0)


def validated(kind: type[SomeModel], values: Any, origins: Origins, context: Any = None) -> SomeModel:
    """Check plain values against a model.

    Raises:
        ConfigError: ``cluster.yaml:12: training.micro_bach is not a key of training; did you mean micro_batch?`` and,
            if there is more, `` (and 1 more: data.seq_len in line 7)``.
    """
    try:
        return kind.model_validate(values, context=context)
    except ValidationError as error:
        mistakes = _find_mistakes(error, values, kind, origins)
        first, *others = mistakes
        lines = {path: origins.line(path) for path in others[:_MAX_NAMED]}
        names = [dotted(path) + (f" in line {line}" if line else "") for path, line in lines.items()]
        names += ["…"] if len(others) > _MAX_NAMED else []
        more = f" (and {len(others)} more: {', '.join(names)})" if others else ""
        raise ConfigError(origins.report(first, mistakes[first]) + more) from error


def with_place(message: str, root: type[BaseModel], origins: Origins) -> str:
    """A message that begins with a key, such as ``data.tokenizer: no such folder``, behind the place of that key.

    For mistakes found after the configuration was read, in the model, the tokenizer or the network. Other messages are
    returned unchanged.
    """
    path = _key_at_start(message, root)
    if len(path) < 2 or not (isinstance(path[1], int) or path[1] in _section_at(root, path[:1]).model_fields):
        return message
    return origins.report(path, message)


def _key_at_start(message: str, root: type[BaseModel]) -> KeyPath:
    """The key that a message begins with; () if it begins with another word."""
    key = _KEY.match(message)
    path: KeyPath = tuple(int(step) if step.isdigit() else step for step in key.group().split(".")) if key else ()
    return path if path and path[0] in root.model_fields else ()


def dotted(path: KeyPath) -> str:
    """``hosts.1.device``: as a `--set` would write it."""
    return ".".join(brief(str(step)) for step in path)


def _find_mistakes(error: ValidationError, data: Any, root: type[BaseModel], origins: Origins) -> dict[KeyPath, str]:
    """One message per place, in the order of the file.

    Where a value may be of several kinds, pydantic reports each kind that it is not: expectations at
    one place are joined by "or", and dropped when another kind fitted well enough to fail deeper.
    """
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        path = _real_path(details, data) or _key_at_start(str(details.get("ctx", {}).get("error", "")), root)
        by_path.setdefault(path, []).append(details)
    # Unknown keys first: a misspelt key is also missing under its right name.
    ordered = sorted(by_path, key=lambda path: (by_path[path][0]["type"] != "extra_forbidden", origins.line(path)))
    return {
        path: _message(path, group, data, root)
        for path, group in ((path, by_path[path]) for path in ordered)
        if not (all(each["type"] in _KINDS for each in group) and any(_is_below(other, path) for other in by_path))
    }


def _real_path(details: ErrorDetails, data: Any) -> KeyPath:
    """The error's location without the names of union branches, which are no keys of the file."""
    path: list[str | int] = []
    value, location = data, details["loc"]
    for index, step in enumerate(location):
        is_missing_key = details["type"] == "missing" and index == len(location) - 1
        if isinstance(value, Mapping) and (step in value or is_missing_key):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            continue
        path.append(step)
    return tuple(path)


def _is_below(path: KeyPath, other: KeyPath) -> bool:
    return len(path) > len(other) and path[: len(other)] == other


def _message(path: KeyPath, group: list[ErrorDetails], data: Any, root: type[BaseModel]) -> str:
    details = group[0]
    if details["type"] == "value_error" and not details["loc"]:
        return str(details["ctx"]["error"])
    if details["type"] == "extra_forbidden":
        return _unknown_key(path, root)
    if details["type"] == "missing":
        key = details["loc"][-1]
        if isinstance(key, int):
            return f"{dotted(path)}: expected {key + 1} or more entries; got fewer"
        return f"{dotted(path)} is missing" + ("; a run needs this section" if len(path) == 1 else "")
    value = data
    for step in path:
        value = value[step]
    if details["type"] == "value_error":
        return f"{dotted(path)}: {str(details['ctx']['error']).replace(repr(value), brief(repr(value)))}"
    expected = dict.fromkeys(_expected(each, path, root) for each in group)
    return f"{dotted(path) or 'the top level'}: expected {' or '.join(expected)}; got {_shown(value)}"


_KINDS = {
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
"""Expectations by pydantic's type of error, where a value is of the wrong kind."""

_BOUNDS = {
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "text that is not empty",
    "too_short": "{min_length} or more entries",
    "too_long": "at most {max_length} entries",
}
"""The same where the kind is right and the value is not; filled with the error's context."""

_LIMITS = ("gt", "ge", "lt", "le")
"""Numbers in pydantic's context that have the unit of the value; lengths of lists have none."""


def _expected(details: ErrorDetails, path: KeyPath, root: type[BaseModel]) -> str:
    kind = details["type"]
    if kind not in _BOUNDS:
        return _KINDS.get(kind) or details["msg"]
    *_, last = ("", *(step for step in path if isinstance(step, str)))
    annotated = _section_at(root, path[:-1]).model_fields.get(last)
    write = None if annotated is None else writer_of(annotated.annotation, annotated.metadata)
    ctx = {key: write(value) if write and key in _LIMITS else value for key, value in details["ctx"].items()}
    return _BOUNDS[kind].format(**ctx).replace("'", "")


def _shown(value: Any) -> str:
    """The value as people would write it, shortened."""
    if isinstance(value, Mapping):
        return f"keys and values ({brief(', '.join(value))})" if value else "no keys"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "nothing (null)", True: "true", False: "false"}[value]
    return brief(repr(value))


def _unknown_key(path: KeyPath, root: type[BaseModel]) -> str:
    key, owner = str(path[-1]), dotted(path[:-1])
    known = list(_section_at(root, path[:-1]).model_fields)
    elsewhere = {
        name: f"{section}.{name}"
        for section, annotated in root.model_fields.items()
        for model in _sections(annotated.annotation)
        for name in model.model_fields
    }
    nearest = [*difflib.get_close_matches(key[:100], known, n=1), *([elsewhere[key]] if key in elsewhere else [])]
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
    if instead := getattr(root, "OTHER_NAMES", {}).get(key):  # a name that other programs have
        hint = f"use {instead}"
    if not owner:
        return f"{brief(key)} is not a section of a configuration; {hint}"
    return f"{dotted(path)} is not a key of {owner}; {hint}"


def _section_at(root: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    """The section at `path`, or the nearest around it; in a list of sections that of its entries."""
    model = root
    for step in path:
        if isinstance(step, str) and step in model.model_fields:
            model = next(_sections(model.model_fields[step].annotation), model)
    return model


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The section types within a type, however deep in unions, lists and annotations."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _sections(part)


def read_section(
    kind: type[SomeModel],
    path: Path,
    example: str,
    hint: str = "",
    changes: Mapping[str, Any] | None = None,
    max_values: int = MAX_VALUES,
) -> SomeModel:
    """Read a YAML file that is one section of typed keys, such as a sweep; `changes` replace its values.

    The ConfigError about a file without keys names the `example` of one, that about a missing file gives the `hint`.
    """
    document = read_document(path, hint, max_values)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{path}: expected keys such as `{example}:`, got {brief(repr(document.value))}")
    return validated(kind, document.value | dict(changes or {}), Origins(str(path), document.lines), WRITTEN_BY_HAND)


def read_document(path: Path, hint: str = "", max_values: int = MAX_VALUES) -> Document:
    """Read any YAML file; see `read_section`."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), max_values)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist{f'; {hint}' if hint else ''}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give the YAML file in it") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; is this a YAML file?") from error
    except YamlError as error:
        raise ConfigError(f"{path}:{error.line}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
