"""The codecs in force on each link; they change by policy, by the record of another run, or never.

A decision made when a step is committed holds from the next step on. COMMIT tells both ends of a link, so they agree; a
checkpoint keeps the codecs in force after it.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tahq.comm.link.frame import Direction
from tahq.coordinator.link_policy import (
    FollowRules,
    LinkKey,
    LinkLoad,
    LinkState,
    PolicyState,
    StepLoad,
    initial_state,
    tick,
)
from tahq.coordinator.observer import CodecChange, LinkRecord, StepRecord, Traffic
from tahq.errors import SnapshotError

RAW = "raw:dtype=fp32"
"""The codec of the gradients of tied embeddings, and index 0 of the plan's table."""
DIRECTIONS: Mapping[Traffic, Direction] = {"activations": Direction.FORWARD, "gradients": Direction.BACKWARD}

log = logging.getLogger(__name__)

Recorded = Mapping[int, Mapping[LinkKey, str]]
"""Spec of each link and direction, by the step that it held in, counted from 1 as metrics.jsonl does."""


@dataclass(frozen=True, slots=True)
class CodecOptions:
    """The links' codecs.

    Attributes:
        start: canonical spec by direction, as configured; empty: unknown.
        rules: when to change them; None: never.
        replay: the recorded run whose changes are repeated; None: the policy decides.
        saved: the state kept in a checkpoint, as `LinkCodecs.saved` returned it.
    """

    start: Mapping[Traffic, str] = field(default_factory=dict)
    rules: FollowRules | None = None
    replay: Recorded | None = None
    saved: Mapping[str, Any] = field(default_factory=dict)


class LinkCodecs:
    """The codecs of a run's links, from step to step.

    Args:
        options: the codecs to begin with, and what changes them.
        num_links: cuts of the pipeline.
        start_step: steps behind the point where it begins.

    Raises:
        SnapshotError: the checkpoint's state is not what `saved` returns.
    """

    def __init__(self, options: CodecOptions, num_links: int, start_step: int) -> None:
        self._options = options
        self._num_links = num_links
        self._rules = options.rules or FollowRules({})
        begin = {direction: self._rung(direction, spec) for direction, spec in options.start.items()}
        self._configured = initial_state(self._rules, num_links, begin)
        self._state = restored(self._rules, self._configured, options.saved)
        self._adopt(self._replayed(start_step + 1))

    def start_rows(self) -> list[list[int]]:
        """START's rows: links whose codec differs from the configured one."""
        configured = self._configured.links
        return [
            self._row(key, link.rung) for key, link in self._state.links.items() if link.rung != configured[key].rung
        ]

    def described(self, record: StepRecord) -> StepRecord:
        """The record with the codecs that were in force in its step."""
        return replace(record, links=[replace(r, codec=self._spec(r.link, r.direction)) for r in record.links])

    def decide(self, record: StepRecord) -> tuple[tuple[CodecChange, ...], list[list[int]]]:
        """The changes after this step, for people and, as rows, for COMMIT."""
        if self._options.rules is None:
            return (), []
        changes = self._replay(record) if self._options.replay is not None else self._follow(record)
        for change in changes:
            log.info("after step %d: %s", record.step, change)
        keys = [LinkKey(change.link, change.direction) for change in changes]
        return changes, [self._row(key, self._state.links[key].rung) for key in keys]

    def saved(self) -> dict[str, Any]:
        """The codecs in force and the policy's state, in plain values, for a checkpoint."""
        if self._options.rules is None:
            return {}
        links = [
            {**asdict(link), "link": key.link, "direction": key.direction}
            | {name: self._rules.ladders[key.direction].specs[getattr(link, name)] for name in _RUNGS}
            for key, link in self._state.links.items()
        ]
        return {"links": links, **{name: getattr(self._state, name) for name in _LOSSES}}

    def _follow(self, record: StepRecord) -> tuple[CodecChange, ...]:
        decision = tick(self._rules, self._state, step_load(record, self._num_links))
        self._state = decision.state
        return decision.changes

    def _replay(self, record: StepRecord) -> tuple[CodecChange, ...]:
        before = self._state.links
        self._adopt(self._replayed(record.step + 1))
        return tuple(
            CodecChange(*key, self._at(key, before[key].rung), self._at(key, link.rung), "replay")
            for key, link in self._state.links.items()
            if link.rung != before[key].rung
        )

    def _replayed(self, step: int) -> Mapping[LinkKey, str]:
        return self._options.replay.get(step, {}) if self._options.replay is not None else {}

    def _adopt(self, specs: Mapping[LinkKey, str]) -> None:
        links = {
            key: replace(link, rung=self._rung(key.direction, specs[key])) if key in specs else link
            for key, link in self._state.links.items()
        }
        self._state = replace(self._state, links=links)

    def _spec(self, number: int, direction: Traffic) -> str:
        key = LinkKey(number, direction)
        if number >= self._num_links:
            return RAW
        return (
            self._at(key, self._state.links[key].rung)
            if key in self._state.links
            else self._options.start.get(direction, "")
        )

    def _at(self, key: LinkKey, rung: int) -> str:
        return self._rules.ladders[key.direction].specs[rung]

    def _rung(self, direction: Traffic, spec: str) -> int:
        if self._options.rules is None:
            return 0
        rung = self._rules.ladders[direction].rung(spec)
        if rung is None:
            raise AssertionError(f"{spec} is not on the ladder of {direction}")
        return rung

    def _row(self, key: LinkKey, rung: int) -> list[int]:
        """[link, direction, index]: the plan's table has raw, then the rungs of activations, then of gradients."""
        below = 1 if key.direction == "activations" else 1 + len(self._rules.ladders["activations"].specs)
        return [key.link, int(DIRECTIONS[key.direction]), below + rung]


_RUNGS = ("rung", "room", "floor")
"""Fields kept as codec names, so that a ladder with other rungs can find them."""
_LOSSES = ("loss_average", "num_losses", "num_rising")


def step_load(record: StepRecord, num_links: int) -> StepLoad:
    """A committed step as the policy sees it, without the link of tied embeddings: it is used after the work."""
    cuts = [link for link in record.links if link.link < num_links]
    compute_s = max((computing_s(stage.timing) for stage in record.stages), default=0.0)
    links = {LinkKey(link.link, link.direction): _link_load(link) for link in cuts}
    return StepLoad(record.step - 1, compute_s, record.loss, not record.skipped, links)


def _link_load(link: LinkRecord) -> LinkLoad:
    """The load by transmission time; by the time in transit where the transport does not report that."""
    if link.wire_s > 0:
        return LinkLoad(link.payload_bytes, link.wire_s, link.relative_error, uplink=link.sender)
    return LinkLoad(link.payload_bytes, link.busy_s, link.relative_error)


def computing_s(timing: Mapping[str, float]) -> float:
    """Seconds that a stage computed, during which links are free to send."""
    return sum(seconds for name, seconds in timing.items() if not name.startswith(_NOT_COMPUTING))


_NOT_COMPUTING = ("wait", "beside:", "commit", "snapshot", "tie")


def restored(rules: FollowRules, configured: PolicyState, saved: Mapping[str, Any]) -> PolicyState:
    """The state kept in a checkpoint, without links and codecs that do not exist any more.

    Raises:
        SnapshotError: it is not what `LinkCodecs.saved` returns.
    """
    if not saved:
        return configured
    try:
        known = {LinkKey(row["link"], row["direction"]): row for row in saved["links"]}
        links = {
            key: _restored_link(rules, key, link, known[key]) if key in known else link
            for key, link in configured.links.items()
        }
        return replace(configured, links=links, **{name: saved[name] for name in _LOSSES})
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"the links' codecs in the checkpoint cannot be read ({type(error).__name__}: {error}); resume with "
            "wire.follow=false"
        ) from error


def _restored_link(rules: FollowRules, key: LinkKey, link: LinkState, row: Mapping[str, Any]) -> LinkState:
    specs = rules.ladders[key.direction].specs
    if row["rung"] not in specs:
        return link
    rungs = {name: specs.index(row[name]) if row[name] in specs else 0 for name in _RUNGS}
    values = {name: row[name] for name in ("num_slow", "num_room", "patience", "raised_at", "floor_until")}
    return LinkState(**rungs, **values)
