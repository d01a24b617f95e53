"""A row of the table: a fault, and what must hold in spite of it."""

import json
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.outcome import Outcome, assert_same_bits
from chaos.scene import Scene
from chaos.starting import launched

Figures = dict[str, Any]
"""Measurements by name: numbers, text or None; durations in seconds."""


@dataclass(frozen=True, slots=True)
class Row:
    """A fault, and what a try `shows`, that is, what must hold in spite of it; both in words.

    `attempt` makes it happen once and raises AssertionError if something does not hold; it takes about `takes_s`.
    `is_quick` rows are in the short form. `needs` of the machine: namespaces, tcp-reset, time-namespaces.
    """

    name: str
    fault: str
    shows: str
    attempt: "Callable[[Attempt], Figures]"
    takes_s: float
    is_quick: bool = False
    needs: tuple[str, ...] = ()

    @property
    def times(self) -> int:
        """Tries in a committed result."""
        return 3 if self.takes_s > 120 else 20


@dataclass
class Calm:
    """Undisturbed runs in a folder, one of each configuration."""

    folder: Path
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def of(self, config: Mapping[str, Any]) -> Outcome:
        """The outcome of this configuration without a fault; timeouts make no difference to it."""
        timeouts = ("peer_timeout", "give_up", "join_timeout")
        run = {key: value for key, value in config["run"].items() if key not in timeouts}
        key = json.dumps({**config, "run": run}, sort_keys=True)
        if key not in self.outcomes:
            self.folder.mkdir(parents=True, exist_ok=True)
            with launched(Path(tempfile.mkdtemp(prefix="calm-", dir=self.folder)), config) as scene:
                self.outcomes[key] = scene.finish(300.0)
        return self.outcomes[key]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a row: its `number`, from 0, seeds every draw; its `folder` is empty; the short form scales down."""

    row: str
    number: int
    folder: Path
    calm: Calm
    scale: float = 1.0

    @property
    def dice(self) -> random.Random:
        """Random numbers that depend on row and number alone."""
        return random.Random(f"{self.row} {self.number}")

    def finish(
        self,
        scene: Scene,
        config: Mapping[str, Any],
        began_s: float,
        ended_s: float | None = None,
        timeout_s: float = 240,
    ) -> Figures:
        """Wait for the end of a run, compare it bit for bit with the undisturbed run, and measure the fault's effect.

        The fault began and ended (None: at once) at these values of `time.time`.
        """
        outcome = scene.finish(timeout_s)
        assert_same_bits(outcome, self.calm.of(config))
        assert outcome.steps_lost == 0
        return {
            "restarts": scene.restarts,
            "detected_s": scene.detected_s(began_s),
            "stall_s": scene.stall_s(began_s),
            "recovery_s": scene.recovery_s(began_s if ended_s is None else ended_s),
            "steps_lost": outcome.steps_lost,
        }
