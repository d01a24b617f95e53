"""The file that `tahq plan --write` writes: the user's own, with the keys that the plan has chosen.

Values are replaced, and keys added, where PyYAML found their section in the text; everything else stays, comments too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tahq.config.cluster import ClusterConfig
from tahq.config.file import dump_yaml, load_config, yaml_flow
from tahq.errors import UserError
from tahq.typed_yaml.mistakes import read_document
from tahq.units import WRITTEN_BY_HAND
from tahq_launch.command_line import write_text
from tahq_launch.start.resolution import resolve_for_run

_HEAD = "# Planned by tahq plan: "
_BALANCE = "pipeline.balance=counted"
Changes = Mapping[str, Any]
"""Sections, each with its changed keys and their new values; or a whole value, such as the list of `hosts`."""


def write_planned(
    path: Path, given_path: Path, overrides: Sequence[str], planned: ClusterConfig, tokens_per_s: float
) -> None:
    """Write the file at `given_path`, with overrides and plan, to `path`; UserError if that fails.

    Where the plan cannot be written into its text, such as braces around the whole file, every key of the result is
    written anew.
    """
    head, text = f"{_HEAD}{tokens_per_s:,.0f} tokens/s predicted.\n", given_path.read_text(encoding="utf-8")
    if text.startswith(_HEAD):
        text = text.partition("\n")[2]
    changes = _changes(given_path, overrides, planned)
    write_text(path, head + with_changes(text, changes))
    try:
        is_the_plan = resolve_for_run(load_config(path, [_BALANCE])) == planned
    except UserError:
        is_the_plan = False
    if not is_the_plan:
        write_text(path, head + dump_yaml(planned))


def _changes(path: Path, overrides: Sequence[str], planned: ClusterConfig) -> Changes:
    """What the file must say more, or otherwise, to be resolved to the planned configuration."""
    own, given = load_config(path), load_config(path, overrides)
    resolved = resolve_for_run(load_config(path, [*overrides, _BALANCE]))
    before, asked, chosen_from, chosen = map(_values, (own, given, resolved, planned))
    changes: dict[str, Any] = {}
    for section, keys in chosen.items():
        if section == "hosts" and keys != chosen_from["hosts"]:
            changes["hosts"] = _reordered(path, overrides, chosen_from["hosts"], keys)
        elif not isinstance(keys, dict):
            if asked[section] != before[section]:
                changes[section] = asked[section]
        else:
            planned_here = [key for key, value in keys.items() if value != chosen_from[section].get(key)]
            planned_here += ["layers"] * (section == "pipeline")
            # what a profile or a measurement stands for is written where the plan changes it
            with_it = asked[section] if planned_here else keys
            names = {key for key in keys if keys[key] != with_it.get(key) and section in ("links", "emulate")}
            new = {key: keys[key] for key in keys if key in names or key in planned_here}
            new |= {
                key: asked[section].get(key)
                for key in asked[section]
                if key not in new and asked[section].get(key) != before[section].get(key)
            }
            if new:
                changes[section] = new
    return changes


def _values(config: ClusterConfig) -> dict[str, Any]:
    values = config.model_dump(mode="json", context=WRITTEN_BY_HAND)
    values["pipeline"].pop("balance")
    for part in (*values["emulate"]["hosts"].values(), *values["emulate"]["pairs"]):  # null is no exception
        for key in [key for key, value in part.items() if value is None]:
            del part[key]
    return values


def _reordered(path: Path, overrides: Sequence[str], before: Sequence[Any], after: Sequence[Any]) -> Any:
    """The file's own entries in the order of the plan; the whole planned ones if an override has changed them."""
    entries = read_document(path).value.get("hosts")
    if any(override.startswith("host") for override in overrides) or not isinstance(entries, list):
        return after
    return [entries[before.index(host)] for host in after]


def with_changes(text: str, changes: Changes) -> str:
    """The text of a cluster.yaml with changed values, and added keys and sections; comments stay."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode), "it was read as a configuration"
    sections = {key.value: value for key, value in root.value}
    edits: list[tuple[int, int, str]] = []
    added = ""
    for section, change in changes.items():
        node = sections.get(section)
        if node is None:
            added += f"{section}: {yaml_flow(change)}\n"
        elif isinstance(node, yaml.MappingNode) and isinstance(change, Mapping):
            edits += _edits(text, node, change)
        else:
            edits.append(_replaced(text, node, change))
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text + ("" if text.endswith("\n") else "\n") + added


def _edits(text: str, section: yaml.MappingNode, change: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    """Replacements of spans of the text, by which a section gets these values."""
    known = {key.value: value for key, value in section.value}
    edits = [_replaced(text, known[key], value) for key, value in change.items() if key in known]
    new = [f"{key}: {yaml_flow(value)}" for key, value in change.items() if key not in known]
    if not new:
        return edits
    if section.flow_style:
        at, indent = section.end_mark.index - 1, ", "
        return [*edits, (at, at, (indent if known else "") + indent.join(new))]
    last = _end(text, section)
    line_end = text.find("\n", last)
    at = line_end if line_end >= 0 else len(text)
    indent = "\n" + " " * section.value[0][0].start_mark.column
    return [*edits, (at, at, indent + indent.join(new))]


def _replaced(text: str, node: yaml.Node, value: Any) -> tuple[int, int, str]:
    """The span of a value, and its new text; a block becomes one line, behind its key if no comment is between."""
    begin, end, new = node.start_mark.index, _end(text, node), yaml_flow(value)
    before = text[:begin].rstrip()
    return (len(before), end, f" {new}") if before.endswith(":") else (begin, end, new)


def _end(text: str, node: yaml.Node) -> int:
    """Where a value ends: of a block, after its last line that is no comment."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style or not node.value:
        return node.end_mark.index
    last = node.value[-1]
    return _end(text, last[1] if isinstance(last, tuple) else last)
