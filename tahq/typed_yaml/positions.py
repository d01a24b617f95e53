"""YAML to plain values, with the line of each.

PyYAML's parser does the reading; the meaning of scalars is decided here, by the core schema of YAML
1.2, because that of YAML 1.1 has traps for people who write configurations: `off` and `no` are text
(1.1: false), `1e-3` is a number (1.1: text), `012` is twelve, `12:30` and `2024-01-01` are text. Keys
are always text. Refused, with the line: the same key twice, merge keys, tags, more than one document, and
aliases that would make a value contain itself or grow without bound.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a document to a value."""

MAX_VALUES = 100_000
"""In a file that people write."""


class YamlError(ValueError):
    """Text that is not the YAML expected here; `line` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Document:
    """Plain dicts, lists, str, int, float, bool and None, and the line of every value (in a mapping: of its key)."""

    value: Any
    lines: Mapping[KeyPath, int]


def parse_yaml(text: str, max_values: int = MAX_VALUES) -> Document:
    """Read one YAML document of at most `max_values` values, counting those that aliases repeat.

    Raises:
        YamlError: not YAML, or something that this module refuses.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        reader = _Reader(max_values)
        value = None if node is None else reader.read(node, (), ())
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(line, f"the character U+{ord(text[error.position]):04X} is not allowed in YAML") from error
    except RecursionError:
        raise YamlError(1, "nested too deeply") from None
    return Document(value, reader.lines)


def _syntax_error(error: yaml.MarkedYAMLError) -> YamlError:
    mark = error.problem_mark or error.context_mark
    problem = " ".join(str(error.problem or error.context).split())
    if problem.startswith("but "):
        problem = f"{error.context}, {problem}"
    if r"'\t'" in problem:
        problem = "a tab cannot indent in YAML; use spaces"
    return YamlError(mark.line + 1 if mark else 1, f"not valid YAML: {problem}")


@dataclass(slots=True)
class _Reader:
    """Makes values of nodes and notes their lines."""

    max_values: int
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def read(self, node: Node, path: KeyPath, above: tuple[Node, ...]) -> Any:
        """The value of `node` at `path`, inside the nodes `above`."""
        line = _line(node)
        self.lines.setdefault(path, line)
        if any(node is outer for outer in above):
            raise YamlError(line, "an alias makes a value contain itself")
        if len(self.lines) > self.max_values:
            raise YamlError(line, f"more than {self.max_values} values")
        kind = "map" if isinstance(node, MappingNode) else "seq" if isinstance(node, SequenceNode) else None
        if node.tag not in {f"tag:yaml.org,2002:{name}" for name in ([kind] if kind else _SCALARS)}:
            raise YamlError(line, f"the tag {node.tag} is not supported; leave it out")
        if kind == "map":
            return self._mapping(node, path, (*above, node))
        if kind == "seq":
            return [self.read(item, (*path, index), (*above, node)) for index, item in enumerate(node.value)]
        # Quoted, or a block of lines: text, whatever it looks like.
        return str(node.value) if isinstance(node, ScalarNode) and node.style else plain_scalar(str(node.value))

    def _mapping(self, node: Node, path: KeyPath, above: tuple[Node, ...]) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = _key(key_node), _line(key_node)
            if key in value:
                raise YamlError(line, f"{key} is given twice; the first is in line {self.lines[(*path, key)]}")
            self.lines[(*path, key)] = line
            value[key] = self.read(value_node, (*path, key), above)
        return value


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _key(node: Node) -> str:
    if not isinstance(node, ScalarNode):
        raise YamlError(_line(node), "a key must be text")
    if node.value == "<<" and node.style is None:
        raise YamlError(_line(node), "merge keys (<<) are not supported; write the keys out")
    return str(node.value)


_SCALARS = ("str", "null", "bool", "int", "float", "timestamp", "value", "merge")
"""Tags that PyYAML gives by itself; others were written out."""

_READINGS: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"~|null|Null|NULL|"), lambda text: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]{1,300}"), int),
    (re.compile(r"0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}"), lambda text: int(text, 0)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)"), lambda text: -math.inf if text.startswith("-") else math.inf),
    (re.compile(r"\.(nan|NaN|NAN)"), lambda text: math.nan),
)
"""The core schema of YAML 1.2 (§10.3.2); the first that matches counts."""


def plain_scalar(text: str) -> Any:
    """The meaning of an unquoted scalar: None, bool, int, float, or the text itself."""
    for pattern, read in _READINGS:
        if pattern.fullmatch(text):
            return read(text)
    return text
