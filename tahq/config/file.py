"""cluster.yaml and ``--set`` in, one checked `ClusterConfig` out; and that configuration as JSON and YAML.

Every mistake is a `ConfigError` of one line that names where it was made. The JSON form is canonical:
equal configurations give equal text, so its hash tells whether two processes mean the same run.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError

from tahq.config.cluster import ClusterConfig
from tahq.errors import ConfigError, UserError, brief
from tahq.quant.config import PAPER, PAPER_WORD
from tahq.typed_yaml import positions as yaml_positions
from tahq.typed_yaml.mistakes import Origin, Origins, dotted, one_line, with_place
from tahq.typed_yaml.positions import YamlError, parse_yaml
from tahq.units import WRITTEN_BY_HAND, Section


def load_config(path: Path, overrides: Sequence[str] = ()) -> ClusterConfig:
    """Read and check a cluster.yaml.

    Args:
        path: the file.
        overrides: `section.key=value` each, the value in YAML; later ones win, all win over the
            file. Entries of a list are named by index: ``hosts.1.device=cpu``.

    Returns:
        The configuration, not yet resolved.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not make sense; an override that
            cannot be parsed or applied. One line, with file and line or with the override.
    """
    return _drafted(path, overrides).check()


@contextlib.contextmanager
def placed_errors(path: Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Give the place of its key to an error that is raised inside about what the file says.

    `load_config` places its own errors; these are of who uses the configuration afterwards, and whose message begins
    with a key.

    Args:
        path: the file.
        overrides: as of `load_config`.
    """
    try:
        yield
    except UserError as error:
        with contextlib.suppress(ConfigError):  # the file may be gone meanwhile; then the error is told as it is
            error.args = (with_place(str(error), ClusterConfig, _drafted(path, overrides).origins),)
        raise


def _drafted(path: Path, overrides: Sequence[str]) -> "_Draft":
    draft = _Draft.read(path)
    for override in overrides:
        draft.apply(override)
    return draft


@dataclass(slots=True)
class _Draft:
    """A configuration being put together: its plain values, and where each was written."""

    source: str
    values: dict[str, Any]
    known: dict[yaml_positions.Path, Origin]
    changes: dict[yaml_positions.Path, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "_Draft":
        source = os.fspath(path)
        try:
            document = parse_yaml(_read_text(path))
        except YamlError as error:
            raise ConfigError(f"{source}:{error.line}: {error}") from error
        if document.value is None:
            raise ConfigError(f"{source} is empty; the least it needs are the sections model, data and training")
        if not isinstance(document.value, dict):
            line = document.lines[()]
            raise ConfigError(f"{source}:{line}: expected sections such as `model:`, got {brief(repr(document.value))}")
        known = {where: Origin(f"{source}:{line}", line) for where, line in document.lines.items()}
        # The whole file has no line: what is missing from it is missing everywhere.
        known[()] = Origin(source)
        return cls(source, _without_empty_sections(document.value), known)

    def apply(self, override: str) -> None:
        """Change one value, making the sections on its way."""
        label = f"--set {brief(' '.join(override.splitlines()), 200)}"
        where, value = _parse_override(override, label)
        *parents, last = where
        target: Any = self.values
        path: yaml_positions.Path = ()
        for name in parents:
            target, path = _enter(target, path, name, label)
            self.known.setdefault(path, Origin(label))
        step = _step(target, path, last, label)
        target[step] = value
        self._note(label, (*path, step))

    def _note(self, label: str, path: yaml_positions.Path) -> None:
        """Everything at and below `path` was now written by the override."""
        self.known = {where: origin for where, origin in self.known.items() if where[: len(path)] != path}
        self.known[path] = Origin(label)
        self.changes[path] = label

    def check(self) -> ClusterConfig:
        """The configuration, if it is one."""
        try:
            return ClusterConfig.model_validate(self.values, context=WRITTEN_BY_HAND)
        except ValidationError as error:
            raise ConfigError(one_line(error, self.values, ClusterConfig, self.origins)) from error

    @property
    def origins(self) -> Origins:
        """Where each value was written."""
        return Origins(self.source, self.known, self.changes)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; write one, or copy one of launch/examples") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give the YAML file in it") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; is this a YAML file?") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _without_empty_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """`links:` with every key commented out means the defaults, not null."""
    return {name: {} if section is None and name != "hosts" else section for name, section in values.items()}


# -- overrides -----------------------------------------------------------------------------------


def _parse_override(override: str, label: str) -> tuple[list[str], Any]:
    path, equals, text = override.partition("=")
    steps = path.strip().split(".")
    if not equals or not all(steps):
        raise ConfigError(f"{label}: expected section.key=value, such as training.steps=100")
    if not text.strip():
        raise ConfigError(f"{label}: no value after =; write null for none, or '\"\"' for an empty text")
    try:
        return steps, parse_yaml(text).value
    except YamlError as error:
        raise ConfigError(f"{label}: {error} (in the value)") from error


def _enter(target: Any, path: yaml_positions.Path, name: str, label: str) -> tuple[Any, yaml_positions.Path]:
    """One step down towards what an override changes; a section that is not there is made."""
    step = _step(target, path, name, label)
    if isinstance(target, dict):
        target[step] = _with_keys((*path, step), target.get(step))
    return target[step], (*path, step)


def _with_keys(path: yaml_positions.Path, section: Any) -> Any:
    """What an override finds where nothing was written, or a word that stands for keys."""
    if path == ("wire",) and section == PAPER_WORD:
        return dict(PAPER)
    if path == ("wire", "follow") and section is True:
        return {}
    return {} if section is None else section


def _step(target: Any, path: yaml_positions.Path, name: str, label: str) -> str | int:
    """`name` as a key of the mapping or an index of the list that `target` is."""
    if isinstance(target, dict):
        return name
    where = dotted(path)
    if not isinstance(target, list):
        raise ConfigError(f"{label}: {where} is {brief(repr(target))}, which has no keys")
    if not (name.isascii() and name.isdigit() and int(name) < len(target)):
        raise ConfigError(f"{label}: {where} has the entries 0 to {len(target) - 1}; got {name}")
    return int(name)


# -- JSON and YAML -------------------------------------------------------------------------------


def config_json(config: ClusterConfig) -> str:
    """Canonical JSON: sorted keys, no spaces, ASCII, shortest floats, every default written out."""
    return json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)


def config_hash(config: ClusterConfig) -> str:
    """SHA-256 of `config_json`, in hex."""
    return hashlib.sha256(config_json(config).encode()).hexdigest()


def config_from_json(text: str) -> ClusterConfig:
    """The configuration that `config_json` wrote, perhaps in another process of another version.

    Raises:
        ConfigError: not JSON, or not a configuration of this version of tahq.
    """
    source = "the configuration received as JSON"
    values = None
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        message = one_line(error, values, ClusterConfig, Origins(source, {}, {}))
        raise ConfigError(f"{message}; do both ends run the same version of tahq?") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def dump_yaml(config: Section, *, with_none: bool = True) -> str:
    """A cluster.yaml that `load_config` reads back to an equal configuration, every default written out.

    Quantities get the unit that makes them shortest: ``rate: 100mbit``. Works for any section; without `with_none`
    keys that are None are left out.
    """
    values = config.model_dump(mode="json", context=WRITTEN_BY_HAND, exclude_none=not with_none)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


class _Dumper(yaml.SafeDumper):
    """Quotes a text that `parse_yaml` would read as something else, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # "1e-3" is plain text to PyYAML and a number to parse_yaml.
    style = None if yaml_positions.plain_scalar(text) == text else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_float(dumper: yaml.SafeDumper, number: float) -> yaml.ScalarNode:
    # Without a point, PyYAML would put a tag before 1e-08.
    mantissa, e, exponent = repr(number).partition("e")
    point = "" if "." in mantissa else ".0"
    return dumper.represent_scalar("tag:yaml.org,2002:float", f"{mantissa}{point}{e}{exponent}")


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_float)


def resolve(config: ClusterConfig) -> ClusterConfig:
    """Write out what the configuration leaves to this machine and to this version of tahq.

    Codec specs get all their parameters, so that a run goes on as it began even if a default changes;
    where all workers are on this machine, its cores are divided among them, so that a resumed run computes
    with as many threads. What needs the model or the tokenizer is left open. Resolving twice changes nothing.
    """
    changed: dict[str, Any] = {"wire": config.wire.resolved()}
    if isinstance(config.hosts, str) and config.run.threads is None:
        threads = max(1, _num_usable_cores() // config.pipeline.stages)
        changed["run"] = config.run.model_copy(update={"threads": threads})
    return config.model_copy(update=changed)


def _num_usable_cores() -> int:
    return len(os.sched_getaffinity(0))
