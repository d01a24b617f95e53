"""What it takes to bring a lost stage back alone: where it begins, what it is answered, which frames it wants again.

A stage that is lost begins again at the newest complete snapshot, or, on a host that does not have its part of that, at
the base: the newest snapshot of which copies lie on other hosts. It computes the steps since then once more. Its
neighbours send it what they sent then, from their logs; the coordinator answers each of its PREPAREs as it answered the
first one. All others wait at the step that the run is at. Nothing of what they have is touched, so the run goes on as
if nothing had happened, to the bit.

Pure. The position of a stage is the step that it prepares next. A stage at position p wants the training frames of step
p and of all later ones; one that is behind takes them a few steps at a time (`AHEAD`).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tahq.comm.control.messages import Commit, Prepare
from tahq.comm.topology import LinkEnds

AHEAD = 2
"""Steps of frames that a stage which computes steps again is sent, counting the one that it is at."""

NO_END = -1


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """Where a lost stage begins again.

    `snapshot` is its folder as seen from the run's, "" where the run itself began; `files` are its hashes by name;
    `codecs` are START's rows for this step, `saved_codecs` what `LinkCodecs.saved` says.
    """

    step: int
    snapshot: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    codecs: Sequence[Sequence[int]] = ()
    saved_codecs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decided:
    """A step's decision, and by stage the fingerprint of what was computed."""

    commit: Commit
    fingerprints: tuple[str, ...]


class Recovery:
    """What the coordinator knows of a run beside the step that it is at.

    Args:
        point: where it began.
        links: all of them.
        num_stages: stages are 0 … num_stages − 1.
        epoch: of its links.
    """

    def __init__(self, point: RestorePoint, links: Sequence[LinkEnds], num_stages: int, epoch: int) -> None:
        self.point = point
        """The newest complete snapshot."""
        self.base = point
        """The oldest at which a stage may begin: since then frames and decisions are kept."""
        self.epoch = epoch
        self._links = tuple(links)
        self._positions = [point.step] * num_stages
        self._origins = [point] * num_stages
        self._decided: dict[int, Decided] = {}
        self._codecs: dict[int, list[list[int]]] = {}

    def begin_with(self, codecs: list[list[int]]) -> None:
        """START's rows at the point where the run begins."""
        self.point = self.base = replace(self.point, codecs=codecs)
        self._origins = [self.point] * len(self._positions)

    @property
    def step(self) -> int:
        """The step that the run is at; all before it are decided."""
        return self.base.step + len(self._decided)

    @property
    def commits(self) -> tuple[Commit, ...]:
        """The decisions since the base."""
        return tuple(decided.commit for decided in self._decided.values())

    def position(self, stage: int) -> int:
        """The step that a stage prepares next."""
        return self._positions[stage]

    def is_behind(self, stage: int) -> bool:
        """Whether a stage computes steps that are decided."""
        return self._positions[stage] < self.step

    def prepared(self, prepare: Prepare) -> None:
        """A stage has computed a step."""
        self._positions[prepare.stage] = max(self._positions[prepare.stage], prepare.step + 1)

    def decided(self, commit: Commit, prepares: Sequence[Prepare], codecs: list[list[int]]) -> None:
        """The step that the run is at is decided; `codecs` are START's rows for the next one."""
        self._decided[commit.step] = Decided(commit, tuple(map(fingerprint, prepares)))
        if commit.snapshot:
            self._codecs[commit.step + 1] = codecs

    def published(self, step: int, snapshot: str, files: Mapping[str, str], saved: Mapping[str, Any]) -> None:
        """A snapshot is complete: stages whose hosts have it begin there from now on."""
        self.point = RestorePoint(step, snapshot, dict(files), self._codecs.get(step, ()), dict(saved))

    def rebase(self, point: RestorePoint) -> bool:
        """Nobody need begin before this point any more, unless somebody is there yet: then nothing happens, and False.

        What was kept for those before it is forgotten.
        """
        if min(self._positions) < point.step or point.step < self.base.step:
            return False
        self.base = point
        if self.point.step < point.step:
            self.point = point
        self._decided = {number: decided for number, decided in self._decided.items() if number >= point.step}
        self._codecs = {number: rows for number, rows in self._codecs.items() if number > point.step}
        return True

    def begins(self, stage: int, step: int) -> bool:
        """A stage's next worker begins here; False: nobody can, any more."""
        origin = next((point for point in (self.point, self.base) if point.step == step), None)
        if origin is None:
            return False
        self._positions[stage] = step
        self._origins[stage] = origin
        return True

    def origin(self, stage: int) -> RestorePoint:
        """Where a stage's worker has begun."""
        return self._origins[stage]

    def roll_back(self) -> None:
        """All stages begin anew, at a point that all have."""
        if min(self._positions) < self.point.step:
            self.point = self.base
        self._positions = [self.base.step] * len(self._positions)

    def rejoined(self, stage: int, step: int) -> None:
        """A stage has the decisions on so many steps; those that it has not, it prepares again."""
        self._positions[stage] = step

    def lose(self, stage: int) -> None:
        """Its process is gone: the next one says where it begins, at the base or later."""
        self._positions[stage] = self.base.step

    def answer(self, prepare: Prepare) -> tuple[Commit, bool] | None:
        """For a step that is decided: what was decided, and whether the same was computed; None: it is not decided."""
        decided = self._decided.get(prepare.step)
        if decided is None:
            return None
        return decided.commit, decided.fingerprints[prepare.stage] == fingerprint(prepare)

    def links_of(self, stage: int) -> tuple[LinkEnds, ...]:
        """The links that end at a stage."""
        return tuple(ends for ends in self._links if stage in (ends.lower, ends.upper))

    def wanted(self, ends: LinkEnds, receiver: int, evaluating: int | None) -> list[int]:
        """The row of RELINK about what one end of a link wants of the other.

        Args:
            ends: the link.
            receiver: one of its stages.
            evaluating: the step whose evaluation is under way; None: none is.
        """
        since = self._positions[receiver]
        evaluations_since = self.step if evaluating is None else evaluating
        return [ends.link, since, evaluations_since, self._through(since)]

    def through(self, stage: int) -> int:
        """The last step whose frames a stage takes by now, or NO_END."""
        return self._through(self._positions[stage])

    def _through(self, position: int) -> int:
        last = position + AHEAD - 1
        return last if last < self.step - 1 else NO_END


def other_end(ends: LinkEnds, stage: int) -> int:
    """The stage at the other end of a link."""
    return ends.upper if ends.lower == stage else ends.lower


def fingerprint(prepare: Prepare) -> str:
    """What a stage computed in a step, as far as PREPARE tells: equal if it was computed alike, to the bit."""
    told = (prepare.norm2, prepare.finite, prepare.loss_sum, prepare.tokens, prepare.batch_digest)
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def for_one_again(commit: Commit, *, evaluate: bool, snapshot: bool) -> Commit:
    """A decision as a stage hears it that computes the step again: with what is still owed of it."""
    return replace(commit, evaluate=commit.evaluate and evaluate, snapshot=commit.snapshot and snapshot)
