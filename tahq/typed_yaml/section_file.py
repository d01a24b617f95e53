"""A YAML file that is one section of typed keys: a cluster.yaml, a sweep, numbers of a cluster, a plan.

Mistakes are one line with file and line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tahq.errors import ConfigError, brief
from tahq.typed_yaml import positions as yaml_positions
from tahq.typed_yaml.mistakes import Origins, SomeModel, validated
from tahq.typed_yaml.positions import MAX_VALUES, Document, YamlError, parse_yaml
from tahq.units import WRITTEN_BY_HAND


@dataclass(frozen=True, slots=True)
class SectionFile:
    """Keys and plain values, and their lines."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[yaml_positions.Path, int]

    def check(self, kind: type[SomeModel], values: Mapping[str, Any] | None = None) -> SomeModel:
        """The typed content; `values` replaces the file's.

        Raises:
            ConfigError: it is invalid.
        """
        origins = Origins(str(self.path), self.lines)
        return validated(kind, dict(self.values if values is None else values), origins, WRITTEN_BY_HAND)


def read_section_file(path: Path, example: str, hint: str = "", max_values: int = MAX_VALUES) -> SectionFile:
    """Read a file.

    Args:
        path: of it.
        example: a key that it could have, for the message when it has none at all.
        hint: added to the message when it does not exist.
        max_values: as of `parse_yaml`.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has no keys.
    """
    document = read_document(path, hint, max_values)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{path}: expected keys such as `{example}:`, got {brief(repr(document.value))}")
    return SectionFile(path, document.value, document.lines)


def read_document(path: Path, hint: str = "", max_values: int = MAX_VALUES) -> Document:
    """Read any YAML file; see `read_section_file`."""
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
