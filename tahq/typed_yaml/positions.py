"""YAML to plain values, with the line that each of them stands on.

PyYAML's parser does the reading; what its scalars mean is decided here, by the core schema of YAML
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

Path = tuple[str | int, ...]
"""Keys and list indices from the top of a document to a value."""

MAX_VALUES = 100_000
"""Of a file that people write."""

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"(true|True|TRUE)|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]{1,300}")
_BASED_INT = re.compile(r"0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")


class YamlError(ValueError):
    """Text that is not the YAML expected here; `line` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Document:
    """What a text holds: plain dicts, lists, str, int, float, bool and None.

    `lines` gives the line of every value: for one in a mapping, that of its key.
    """

    value: Any
    lines: Mapping[Path, int]


def parse_yaml(text: str, max_values: int = MAX_VALUES) -> Document:
    """Read one YAML document.

    Args:
        text: of it.
        max_values: more are refused, those that aliases repeat counted again.

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
    lines: dict[Path, int] = field(default_factory=dict)

    def read(self, node: Node, path: Path, above: tuple[Node, ...]) -> Any:
        """The value of `node`, which stands at `path` inside the nodes `above`."""
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        if any(node is outer for outer in above):
            raise YamlError(line, "an alias makes a value contain itself")
        if len(self.lines) > self.max_values:
            raise YamlError(line, f"more than {self.max_values} values")
        if isinstance(node, MappingNode):
            return self._mapping(node, path, (*above, node))
        if isinstance(node, SequenceNode):
            _check_tag(node, "seq")
            return [self.read(item, (*path, index), (*above, node)) for index, item in enumerate(node.value)]
        return _scalar(node)

    def _mapping(self, node: MappingNode, path: Path, above: tuple[Node, ...]) -> dict[str, Any]:
        _check_tag(node, "map")
        value: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = _key(key_node)
            line = key_node.start_mark.line + 1
            if key in value:
                raise YamlError(line, f"{key} is given twice; the first is in line {self.lines[(*path, key)]}")
            self.lines[(*path, key)] = line
            value[key] = self.read(value_node, (*path, key), above)
        return value


def _key(node: Node) -> str:
    line = node.start_mark.line + 1
    if not isinstance(node, ScalarNode):
        raise YamlError(line, "a key must be text")
    if node.value == "<<" and node.style is None:
        raise YamlError(line, "merge keys (<<) are not supported; write the keys out")
    return str(node.value)


def _check_tag(node: Node, *allowed: str) -> None:
    """Refuse a tag that is written out: `!!python/object` and the like; nothing here needs one."""
    implicit = {f"tag:yaml.org,2002:{name}" for name in allowed}
    if node.tag not in implicit:
        raise YamlError(node.start_mark.line + 1, f"the tag {node.tag} is not supported; leave it out")


_IMPLICIT_SCALARS = ("str", "null", "bool", "int", "float", "timestamp", "value", "merge")


def _scalar(node: Node) -> Any:
    _check_tag(node, *_IMPLICIT_SCALARS)
    text = str(node.value)
    # Quoted, or a block of lines: text, whatever it looks like.
    return text if isinstance(node, ScalarNode) and node.style else plain_scalar(text)


_READINGS: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (_NULL, lambda text: None),
    (_BOOL, lambda text: text.lower() == "true"),
    (_INT, int),
    (_BASED_INT, lambda text: int(text, 0)),
    (_FLOAT, float),
    (_INFINITY, lambda text: -math.inf if text.startswith("-") else math.inf),
    (_NAN, lambda text: math.nan),
)
"""The core schema of YAML 1.2 (§10.3.2); of several that match, the first is meant."""


def plain_scalar(text: str) -> Any:
    """What an unquoted scalar means: None, bool, int, float, or the text itself."""
    for pattern, read in _READINGS:
        if pattern.fullmatch(text):
            return read(text)
    return text
