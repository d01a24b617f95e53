"""cluster.yaml and ``--set`` in, one checked `ClusterConfig` out; and that configuration as JSON and YAML.

Every mistake is a `ConfigError` of one line that names its place. The JSON form is canonical:
equal configurations give equal text, so processes compare its hash to check that they belong to one run.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tahq.comm.config import MachineConfig, num_invited
from tahq.comm.network_config import nearest
from tahq.config.cluster import ClusterConfig
from tahq.errors import ConfigError, UserError, brief
from tahq.pipeline.checkpoint.renamed_keys import RENAMED, present_path, with_present_names
from tahq.quant.config import WORDS
from tahq.typed_yaml.mistakes import Origins, dotted, read_document, validated, with_place
from tahq.typed_yaml.positions import KeyPath, YamlError, parse_yaml, plain_scalar
from tahq.units import WRITTEN_BY_HAND, Section


def load_config(path: Path, overrides: Sequence[str] = ()) -> ClusterConfig:
    """Read and check a cluster.yaml; the configuration is not resolved yet.

    Overrides are `section.key=value` each, the value in YAML; later ones win, all win over the file. Entries of a list
    are named by index: ``hosts.1.device=cpu``.

    Raises:
        ConfigError: the first mistake, with file and line or with the override.
    """
    values, origins = _read(path, overrides)
    return validated(ClusterConfig, values, origins, WRITTEN_BY_HAND)


def invited_hosts(path: Path, overrides: Sequence[str] = ()) -> int:
    """How many machines a valid cluster.yaml waits for (`hosts: {invited: 3}`); 0: it names its hosts."""
    return num_invited(_read(path, overrides)[0].get("hosts"))


@contextlib.contextmanager
def placed_errors(path: Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Add the place of its key to an error raised inside whose message begins with a key of the file.

    `load_config` places its own errors; these are raised later, by code that uses the configuration.
    """
    try:
        yield
    except UserError as error:
        with contextlib.suppress(ConfigError):  # the file is gone: raise the error without a place
            error.args = (with_place(str(error), ClusterConfig, _read(path, overrides)[1]),)
        raise


def _read(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Origins]:
    """The plain values of the file with the overrides applied, and where each was written."""
    document = read_document(path, "write one, or copy one of launch/examples")
    value = document.value
    if value is None:
        raise ConfigError(f"{path} is empty; the least it needs are the sections model and data")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}:{document.lines[()]}: expected sections such as `model:`, got {brief(repr(value))}")
    # `links:` with every key commented out means the defaults, not null; `adapter: null` means none
    values = {name: {} if each is None and name not in ("hosts", "adapter") else each for name, each in value.items()}
    values = with_present_names(values)
    known: dict[KeyPath, int | str] = {present_path(path): line for path, line in document.lines.items()}
    for key, line in document.lines.items():  # a section may have nothing but keys that were moved
        known.setdefault(present_path(key)[:1], line)
    changes: dict[KeyPath, str] = {}
    for override in overrides:
        label = f"--set {brief(' '.join(override.splitlines()), 200)}"
        where = _apply(override, label, values, known)
        # Everything at and below this path was now written by the override.
        known = {each: origin for each, origin in known.items() if each[: len(where)] != where}
        known[where] = changes[where] = label
        for moved in _move_other_names(where, values):
            known[moved] = changes[moved] = label
    origins = Origins(os.fspath(path), known, changes)
    return _with_host_defaults(values, known, origins), origins


def _move_other_names(where: KeyPath, values: dict[str, Any]) -> list[tuple[str, str]]:
    """Move keys that an override of a whole section has under other names; returns their present paths.

    They replace everything that moved from this section to the same one, as before the keys moved.
    """
    given = values[str(where[0])]
    renamed = {old: path for (section, old), path in RENAMED.items() if (section,) == where}
    moved = [path for old, path in renamed.items() if isinstance(given, dict) and old in given]
    for target in {section for section, _ in moved if (section,) != where}:
        if isinstance(values.get(target), dict):
            values[target] = _without(values[target], [key for section, key in renamed.values() if section == target])
    values.update(with_present_names(values))
    return moved


_OF_EACH_HOST = ("address", "local", "ssh", "advertise", "public_key")
_OF_SSH = ("ssh_options", "python", "workdir", "env")


def _with_host_defaults(values: dict[str, Any], known: dict[KeyPath, int | str], origins: Origins) -> dict[str, Any]:
    """The values with `host_defaults`, the keys that a file gives once for all hosts, in each entry without them.

    Those that only a host with ssh takes go to such hosts only. A value that an entry refuses is reported where it was
    written.
    """
    section = "host_defaults"
    if section not in values:
        return values
    defaults, hosts = values[section], values.get("hosts")
    if not isinstance(defaults, dict):
        raise ConfigError(
            origins.report((section,), f"{section}: expected keys of a host; got {brief(repr(defaults))}")
        )
    if not isinstance(hosts, list):
        raise ConfigError(
            origins.report(
                (section,), f"{section} is for the machines of a list; hosts is {brief(repr(hosts or 'local'))}"
            )
        )
    allowed = [key for key in MachineConfig.model_fields if key not in _OF_EACH_HOST]
    for key in defaults:
        if key not in allowed:
            why = (
                "it differs by host: set it in the entries of hosts" if key in _OF_EACH_HOST else nearest(key, allowed)
            )
            why = why.removeprefix("; ") or f"known are {', '.join(allowed)}"
            raise ConfigError(
                origins.report((section, key), f"{section}.{brief(key)} is not a key of {section}; {why}")
            )
    merged = []
    for number, host in enumerate(hosts):
        taken = defaults if not isinstance(host, dict) or host.get("ssh") else _without(defaults, _OF_SSH)
        merged.append({**taken, **host} if isinstance(host, dict) else host)
        for path, line in list(known.items()):
            if path[:1] == (section,) and len(path) > 1 and path[1] not in host:
                known["hosts", number, *path[1:]] = line
    return {**_without(values, (section,)), "hosts": merged}


def _without(values: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _apply(override: str, label: str, values: dict[str, Any], known: dict[KeyPath, int | str]) -> KeyPath:
    """Change one value, creating the sections around it that do not exist; returns its path."""
    names, value = _parse_override(override, label)
    target: Any = values
    path: KeyPath = ()
    for name in names[:-1]:
        step = _step(target, path, name, label)
        path = (*path, step)
        if isinstance(target, dict):
            target[step] = _with_keys(path, target.get(step))
        target = target[step]
        known.setdefault(path, label)
    step = _step(target, path, names[-1], label)
    target[step] = value
    return (*path, step)


def _parse_override(override: str, label: str) -> tuple[list[str], Any]:
    path, equals, text = override.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"{label}: expected section.key=value, such as training.steps=100")
    if not text.strip():
        raise ConfigError(f"{label}: no value after =; write null for none, or '\"\"' for an empty text")
    try:
        return [str(step) for step in present_path(tuple(names))], parse_yaml(text).value
    except YamlError as error:
        raise ConfigError(f"{label}: {error} (in the value)") from error


def _with_keys(path: KeyPath, section: Any) -> Any:
    """The section that an override changes, as keys: none if it is empty, those that a word such as `paper` means."""
    if path == ("wire",) and isinstance(section, str) and section in WORDS:
        return dict(WORDS[section])
    return {} if section is None or (path, section) == (("wire", "follow"), True) else section


def _step(target: Any, path: KeyPath, name: str, label: str) -> str | int:
    """`name` as a key of the mapping or an index of the list that `target` is."""
    if isinstance(target, dict):
        return name
    if not isinstance(target, list):
        raise ConfigError(f"{label}: {dotted(path)} is {brief(repr(target))}, which has no keys")
    if not (name.isascii() and name.isdigit() and int(name) < len(target)):
        raise ConfigError(f"{label}: {dotted(path)} has the entries 0 to {len(target) - 1}; got {name}")
    return int(name)


def config_json(config: ClusterConfig) -> str:
    """Canonical JSON: sorted keys, no spaces, ASCII, shortest floats, every default written out."""
    return json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)


def config_hash(config: ClusterConfig) -> str:
    """SHA-256 of `config_json`, in hex."""
    return hashlib.sha256(config_json(config).encode()).hexdigest()


def config_from_json(text: str) -> ClusterConfig:
    """The configuration that `config_json` wrote, perhaps in another version; ConfigError if it does not fit."""
    source = "the configuration received as JSON"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error}") from error
    try:
        return validated(ClusterConfig, values, Origins(source))
    except ConfigError as error:
        raise ConfigError(f"{error}; do both ends run the same version of tahq?") from error


def dump_yaml(config: Section, *, with_none: bool = True, with_unset: bool = True) -> str:
    """A cluster.yaml that `load_config` reads back to an equal configuration, every default written out.

    Quantities get the unit that makes them shortest: ``rate: 100mbit``. Works for any section; without `with_none`
    keys that are None are left out, without `with_unset` those that are open.
    """
    values = config.model_dump(
        mode="json", context=WRITTEN_BY_HAND, exclude_none=not with_none, exclude_unset=not with_unset
    )
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def yaml_flow(value: Any) -> str:
    """A plain value on one line, as `parse_yaml` reads it back."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


class _Dumper(yaml.SafeDumper):
    """Quotes a text that `parse_yaml` would read as something else, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # "1e-3" is plain text to PyYAML and a number to parse_yaml.
    style = None if plain_scalar(text) == text else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_float(dumper: yaml.SafeDumper, number: float) -> yaml.ScalarNode:
    # Without a point, PyYAML would put a tag before 1e-08.
    mantissa, e, exponent = repr(number).partition("e")
    point = "" if "." in mantissa else ".0"
    return dumper.represent_scalar("tag:yaml.org,2002:float", f"{mantissa}{point}{e}{exponent}")


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_float)


def resolve(config: ClusterConfig) -> ClusterConfig:
    """Fill in what the configuration leaves to this machine and to this version of tahq.

    Codec specs get all their parameters, so that a run continues as it began even if a default changes;
    where all workers are on this machine, its cores are divided among them, so that a resumed run computes
    with as many threads. What needs the model or the tokenizer is left open. Resolving twice changes nothing.
    """
    changed: dict[str, Any] = {"wire": config.wire.resolved()}
    if isinstance(config.hosts, str) and config.run.threads is None:
        threads = max(1, len(os.sched_getaffinity(0)) // config.pipeline.num_workers)
        changed["run"] = config.run.model_copy(update={"threads": threads})
    return config.model_copy(update=changed)
