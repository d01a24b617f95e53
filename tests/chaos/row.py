"""A row of the table: a fault, and what a run must show all the same."""

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

Figures = dict[str, float | int | str | None]
"""What was measured, by name; durations in seconds."""


@dataclass(frozen=True, slots=True)
class Row:
    """A fault and what it must show.

    Attributes:
        name: short, of small letters, digits and dashes.
        fault: what happens, in words.
        shows: what must hold, in words.
        attempt: makes it happen once; raises AssertionError if what must hold does not.
        takes_s: about how long an attempt takes.
        is_quick: whether the short form of `make test` has it.
        needs: what the machine must have: namespaces, tcp-reset, time-namespaces.
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
        """How often a committed result has it."""
        return 3 if self.takes_s > 120 else 20


@dataclass
class Calm:
    """Undisturbed runs, one of each configuration, kept for as long as the session lasts.

    Args:
        folder: where they run.
    """

    folder: Path
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def of(self, config: Mapping[str, Any]) -> Outcome:
        """The outcome of this configuration where nothing happens.

        How long silence is borne makes no difference to it.
        """
        run = {
            key: value for key, value in config["run"].items() if key not in ("peer_timeout", "give_up", "join_timeout")
        }
        key = json.dumps({**config, "run": run}, sort_keys=True)
        if key not in self.outcomes:
            self.folder.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="calm-", dir=self.folder))
            with launched(folder, config) as scene:
                self.outcomes[key] = scene.finish(300.0)
        return self.outcomes[key]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a row.

    Attributes:
        row: its name.
        number: from 0; the seed of all that is drawn.
        folder: empty, for whatever it writes.
        calm: undisturbed runs to compare with.
        scale: of the long form 1; the short form makes do with less of what takes long.
    """

    row: str
    number: int
    folder: Path
    calm: Calm
    scale: float = 1.0

    @property
    def dice(self) -> random.Random:
        """Numbers that depend on row and number alone."""
        return random.Random(f"{self.row} {self.number}")

    def compare(
        self, scene: Scene, outcome: Outcome, config: Mapping[str, Any], began_s: float, ended_s: float
    ) -> Figures:
        """Hold a run to the undisturbed one, to the bit, and say what the fault came to.

        Args:
            scene: the run.
            outcome: what it left.
            config: its configuration.
            began_s: when the fault began, as `time.time`.
            ended_s: when it ended.
        """
        assert_same_bits(outcome, self.calm.of(config))
        assert outcome.steps_lost == 0
        return {
            "restarts": scene.restarts,
            "detected_s": scene.detected_s(began_s),
            "stall_s": scene.stall_s(began_s),
            "recovery_s": scene.recovery_s(ended_s),
            "steps_lost": outcome.steps_lost,
        }
