"""Other names of keys of cluster.yaml, most from earlier versions; they are still read from files and checkpoints."""

from collections.abc import Mapping
from typing import Any

_OF_A_NETWORK = (
    *("rate", "delay", "up", "down", "jitter", "loss", "reorder", "profile", "hosts", "pairs"),
    *("congestion_control", "tcp_slow_start_after_idle", "backend"),
)
RENAMED: Mapping[tuple[str | int, ...], tuple[str, str]] = {
    ("training", "activation_checkpointing"): ("memory", "recompute"),
    ("run", "snapshot_every"): ("run", "checkpoint_every"),
    ("run", "snapshot_buffers"): ("run", "checkpoint_buffers"),
    ("run", "keep_snapshots"): ("run", "keep_checkpoints"),
    ("run", "report_to"): ("run", "trackers"),
    ("training", "report_to"): ("run", "trackers"),
    ("model", "sleep"): ("emulate", "sleep"),
    ("data", "jsonl"): ("data", "records"),
    **{("links", key): ("emulate", key) for key in _OF_A_NETWORK},
}
"""Section and key now, by section and key before, or in transformers."""


def present_path(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The present name of a key, given as the path to it or to a part of its value."""
    return (*RENAMED.get(path[:2], path[:2]), *path[2:])


def with_present_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, perhaps of an earlier version, with present names; where it has both, the present name wins."""
    renamed = dict(config)
    for (old_section, old), (section, name) in RENAMED.items():
        before, target = renamed.get(str(old_section)), renamed.get(section) or {}
        if isinstance(before, Mapping) and old in before and isinstance(target, Mapping):
            renamed[str(old_section)] = {key: value for key, value in before.items() if key != old}
            renamed[section] = {name: before[old]} | dict(renamed.get(section) or {})
    return renamed
