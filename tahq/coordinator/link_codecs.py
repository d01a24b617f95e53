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
    DirectionState,
    FollowRules,
    LinkKey,
    LinkLoad,
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
        self._options, self._num_links = options, num_links
        self._rules = options.rules or FollowRules({})
        begin = {direction: self._rung(direction, spec) for direction, spec in options.start.items()}
        self._configured = initial_state(self._rules, num_links, begin)
        self._state = restored(self._rules, self._configured, options.saved)
        self._replay(start_step + 1)

    def start_rows(self) -> list[list[int]]:
        """START's rows: links whose codec differs from the configured one."""
        configured = self._configured.links
        return [self._row(key) for key, link in self._state.links.items() if link.rung != configured[key].rung]

    def described(self, record: StepRecord) -> StepRecord:
        """The record with the codecs that were in force in its step."""
        return replace(record, links=[replace(r, codec=self._spec(LinkKey(r.link, r.direction))) for r in record.links])

    def decide(self, record: StepRecord) -> tuple[tuple[CodecChange, ...], list[list[int]]]:
        """The changes after this step, for people and, as rows, for COMMIT."""
        if self._options.rules is None:
            return (), []
        if self._options.replay is not None:
            changes = self._replay(record.step + 1)
        else:
            self._state, changes = tick(self._rules, self._state, step_load(record, self._num_links))
        for change in changes:
            log.info("after step %d: %s", record.step, change)
        return changes, [self._row(LinkKey(change.link, change.direction)) for change in changes]

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

    def _replay(self, step: int) -> tuple[CodecChange, ...]:
        """Take the codecs that the recorded run, if there is one, had in this step."""
        specs = self._options.replay.get(step, {}) if self._options.replay is not None else {}
        links, changes = dict(self._state.links), list[CodecChange]()
        for key, link in self._state.links.items():
            rung = self._rung(key.direction, specs[key]) if key in specs else link.rung
            if rung != link.rung:
                ladder = self._rules.ladders[key.direction].specs
                changes.append(CodecChange(*key, ladder[link.rung], ladder[rung], "replay"))
                links[key] = replace(link, rung=rung)
        self._state = replace(self._state, links=links)
        return tuple(changes)

    def _spec(self, key: LinkKey) -> str:
        if key.link >= self._num_links:
            return RAW
        if key not in self._state.links:
            return self._options.start.get(key.direction, "")
        return self._rules.ladders[key.direction].specs[self._state.links[key].rung]

    def _rung(self, direction: Traffic, spec: str) -> int:
        if self._options.rules is None:
            return 0
        rung = self._rules.ladders[direction].rung(spec)
        if rung is None:
            raise AssertionError(f"{spec} is not on the ladder of {direction}")
        return rung

    def _row(self, key: LinkKey) -> list[int]:
        """[link, direction, index]: the plan's table has raw, then the rungs of activations, then of gradients."""
        below = 1 if key.direction == "activations" else 1 + len(self._rules.ladders["activations"].specs)
        return [key.link, int(DIRECTIONS[key.direction]), below + self._state.links[key].rung]


_RUNGS = ("rung", "room", "floor")
"""Fields kept as codec names, so that a ladder with other rungs can find them."""
_LOSSES = ("loss_average", "num_losses", "num_rising")


def step_load(record: StepRecord, num_links: int) -> StepLoad:
    """A committed step as the policy sees it, without the link of tied embeddings: it is used after the work."""
    compute_s = max((computing_s(stage.timing) for stage in record.stages), default=0.0)
    loads = {LinkKey(link.link, link.direction): _link_load(link) for link in record.links if link.link < num_links}
    return StepLoad(record.step - 1, compute_s, record.loss, not record.skipped, loads)


def _link_load(link: LinkRecord) -> LinkLoad:
    """The load by transmission time; by the time in transit where the transport does not report that."""
    sending_s, uplink = (link.wire_s, link.sender) if link.wire_s > 0 else (link.busy_s, None)
    return LinkLoad(link.payload_bytes, sending_s, link.relative_error, uplink)


def computing_s(timing: Mapping[str, float]) -> float:
    """Seconds that a stage computed, during which links are free to send."""
    return sum(seconds for name, seconds in timing.items() if not name.startswith(_NOT_COMPUTING))


_NOT_COMPUTING = ("wait", "beside:", "commit", "snapshot", "tie")


def restored(rules: FollowRules, configured: PolicyState, saved: Mapping[str, Any]) -> PolicyState:
    """The state kept in a checkpoint, without links and codecs that no longer exist.

    Raises:
        SnapshotError: it is not what `LinkCodecs.saved` returns.
    """
    if not saved:
        return configured
    try:
        links = dict(configured.links)
        for row in saved["links"]:
            key = LinkKey(row["link"], row["direction"])
            if key not in links or row["rung"] not in (specs := rules.ladders[key.direction].specs):
                continue
            rungs = {name: specs.index(row[name]) if row[name] in specs else 0 for name in _RUNGS}
            values = {name: row[name] for name in ("num_slow", "num_room", "patience", "raised_at", "floor_until")}
            links[key] = DirectionState(**rungs, **values)
        return replace(configured, links=links, **{name: saved[name] for name in _LOSSES})
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"the links' codecs in the checkpoint cannot be read ({type(error).__name__}: {error}); resume with "
            "wire.follow=false"
        ) from error
