"""Which codec each link had in each step of an earlier run, read back from its metrics.jsonl."""

from pathlib import Path
from typing import Any

from tahq.coordinator.link_codecs import Recorded
from tahq.coordinator.link_policy import LinkKey
from tahq.errors import ConfigError, UserError
from tahq.observe.metrics_lines import read_lines


def recorded_codecs(path: Path) -> Recorded:
    """The codecs by step, counted from 1, and by link and direction; a last line that is not complete is left out.

    Raises:
        ConfigError: the file cannot be read, or is not the metrics of a run that says what its codecs were.
    """
    try:
        recorded = dict(read_lines(path, _step, "the codecs of a step"))
    except UserError as error:
        raise ConfigError(f"wire.replay: {error}") from error
    if not recorded:
        raise ConfigError(f"wire.replay: {path} has no steps")
    return recorded


def _step(row: dict[str, Any]) -> tuple[int, dict[LinkKey, str]]:
    return int(row["step"]), _codecs(row["links"])


def _codecs(links: list[dict[str, Any]]) -> dict[LinkKey, str]:
    return {_key(link): str(link["codec"]) for link in links}


def _key(link: dict[str, Any]) -> LinkKey:
    direction = link["direction"]
    if direction not in ("activations", "gradients"):
        raise ValueError(f"direction {direction!r}")
    return LinkKey(int(link["link"]), direction)
