"""Which codec each link had in each step of an earlier run, read back from its metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

from tahq.coordinator.link_codecs import Recorded
from tahq.coordinator.link_policy import LinkKey
from tahq.errors import ConfigError


def recorded_codecs(path: Path) -> Recorded:
    """The codecs by step, counted from 1, and by link and direction.

    Raises:
        ConfigError: the file cannot be read, or is not the metrics of a run that says what its codecs were.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        recorded = {int(row["step"]): _codecs(row["links"]) for row in rows}
    except OSError as error:
        raise ConfigError(f"wire.replay: {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"wire.replay: {path} is not the metrics.jsonl of a run that names its codecs "
            f"({type(error).__name__}: {error})"
        ) from error
    if not recorded:
        raise ConfigError(f"wire.replay: {path} has no steps")
    return recorded


def _codecs(links: list[dict[str, Any]]) -> dict[LinkKey, str]:
    return {_key(link): str(link["codec"]) for link in links}


def _key(link: dict[str, Any]) -> LinkKey:
    direction = link["direction"]
    if direction not in ("activations", "gradients"):
        raise ValueError(f"direction {direction!r}")
    return LinkKey(int(link["link"]), direction)
