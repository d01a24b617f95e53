"""A YAML file that is one section of typed keys, other than cluster.yaml: a sweep, numbers of a cluster, a plan.

Mistakes are one line with file and line, as in cluster.yaml.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tahq.errors import ConfigError, brief
from tahq.typed_yaml import positions as yaml_positions
from tahq.typed_yaml.mistakes import Origin, Origins, one_line
from tahq.typed_yaml.positions import MAX_VALUES, YamlError, parse_yaml
from tahq.units import WRITTEN_BY_HAND, Section

SomeSection = TypeVar("SomeSection", bound=Section)


@dataclass(frozen=True, slots=True)
class SectionFile:
    """Keys and plain values, and the line that each stands on."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[yaml_positions.Path, int]

    def with_values(self, values: Mapping[str, Any]) -> "SectionFile":
        """The same file as if it said this."""
        return dataclasses.replace(self, values=values)

    def check(self, kind: type[SomeSection]) -> SomeSection:
        """What it says, typed.

        Raises:
            ConfigError: it does not make sense.
        """
        try:
            return kind.model_validate(self.values, context=WRITTEN_BY_HAND)
        except ValidationError as error:
            source = str(self.path)
            known = {where: Origin(f"{source}:{line}", line) for where, line in self.lines.items()}
            # The whole file has no line: what is missing from it is missing everywhere.
            origins = Origins(source, known | {(): Origin(source)}, {})
            raise ConfigError(one_line(error, dict(self.values), kind, origins)) from error


def read_section_file(path: Path, example: str, hint: str = "", max_values: int = MAX_VALUES) -> SectionFile:
    """Read a file.

    Args:
        path: of it.
        example: a key that it could have, for the message when it has none at all.
        hint: added to the message when it cannot be read.
        max_values: as of `parse_yaml`.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has no keys.
    """
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"), max_values)
    except YamlError as error:
        raise ConfigError(f"{path}:{error.line}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}{f'; {hint}' if hint else ''}") from error
    if not isinstance(document.value, dict):
        raise ConfigError(f"{path}: expected keys such as `{example}:`, got {brief(repr(document.value))}")
    return SectionFile(path, document.value, document.lines)
