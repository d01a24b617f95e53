"""The codecs in force on each link: bits that follow the bandwidth, or the record of another run, or never change.

A decision made when a step is committed holds from the next step on. COMMIT tells both ends of a link, so they agree; a
checkpoint keeps the codecs in force after it.

The policy is pure: `tick` takes the state before a step and what was measured during it, and returns the next state.
Invariants:

- a link's rung depends on measurements of that link and direction, on the host's other traffic, and on what all stages
  share: the compute time, the loss, and whether all values were finite;
- a host can send during its compute time; a link may use the part that the host's other links leave, and at least an
  equal part;
- bits are lowered when sending takes longer than that, at once to the most bits that fit at the measured rate, or to
  the fewest there are; they are raised when more bits would have fitted with room to spare in each of several steps.
  Between the two limits nothing changes, so measurements within a seventh of each other never make a link oscillate;
- after a raise that had to be taken back soon, the link waits twice as long before the next attempt;
- the guard raises bits and holds them, whatever the bandwidth.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from tahq.comm.link.frame import Direction
from tahq.coordinator.observer import CodecChange, StepRecord, Traffic
from tahq.errors import SnapshotError
from tahq.quant.ladder import Ladder

FULL = 1.0
"""Share of the available time that sending may take; above it the link is the bottleneck."""
FITS = 0.9
"""Target share when bits are lowered."""
ROOM = 0.75
"""Highest share that more bits may take before they are chosen."""
WARM_UP_STEPS = 1
"""Steps after a start that are ignored: kernels and TCP are cold."""
LOSS_WINDOW = 20
"""Steps over which the loss is averaged (exponentially), and steps before the average is used."""
RISING_STEPS = 3
"""Consecutive steps above the average that count as a rise."""
MOST_PATIENCE = 16


class LinkKey(NamedTuple):
    """One direction of one link."""

    link: int
    direction: Traffic


@dataclass(frozen=True, slots=True)
class FollowRules:
    """The policy's parameters: ladders by direction; the rest as in `wire.follow`."""

    ladders: Mapping[Traffic, Ladder]
    raise_after: int = 5
    lower_after: int = 1
    max_error: float | None = 0.5
    loss_rise: float | None = 0.1
    hold: int = 50


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """The traffic of one link in one direction during a step.

    `sending_s` grows with the bytes. Links with the same `uplink` share it, and their times add up; None: the host's
    other traffic is in `sending_s` already. `error` is the relative error of a tensor, where it was measured.
    """

    payload_bytes: int
    sending_s: float
    error: float | None = None
    uplink: int | None = None


@dataclass(frozen=True, slots=True)
class StepLoad:
    """One step (from 0) as the policy sees it; the decision holds from the next step on.

    `compute_s` is that of the slowest stage, waiting left out; `loss` in nats per token, NaN: unknown; `finite`: the
    step was applied. A link that is missing in `links` was idle.
    """

    step: int
    compute_s: float
    loss: float
    finite: bool
    links: Mapping[LinkKey, LinkLoad]


@dataclass(frozen=True, slots=True)
class DirectionState:
    """One link and direction.

    Attributes:
        rung: in force.
        num_slow: consecutive steps in which it was the bottleneck.
        num_room: consecutive steps in which more bits would have fitted.
        room: the highest rung that would have fitted in all of those.
        patience: factor on `raise_after`.
        raised_at: step of the last raise for room; None: there was none, or it has proved right.
        floor: not to be lowered below this rung
        floor_until: before this step.
    """

    rung: int
    num_slow: int = 0
    num_room: int = 0
    room: int = 0
    patience: int = 1
    raised_at: int | None = None
    floor: int = 0
    floor_until: int = 0


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The policy's state between steps."""

    links: Mapping[LinkKey, DirectionState]
    steps_seen: int = 0
    loss_average: float = 0.0
    num_losses: int = 0
    num_rising: int = 0


def initial_state(rules: FollowRules, num_links: int, start: Mapping[Traffic, int]) -> PolicyState:
    """Every link (there are `num_links` cuts of the pipeline) at its direction's rung of `start`."""
    keys = [LinkKey(link, direction) for link in range(num_links) for direction in rules.ladders]
    return PolicyState({key: DirectionState(start[key.direction]) for key in keys})


def tick(rules: FollowRules, state: PolicyState, load: StepLoad) -> tuple[PolicyState, tuple[CodecChange, ...]]:
    """The state from the next step on, and the changes, after a step that was just computed."""
    state, alarm = _watch_loss(rules, state, load)
    is_warm = state.steps_seen >= WARM_UP_STEPS and load.compute_s > 0
    links, traffic, changes = dict(state.links), dict(load.links), list[CodecChange]()
    for key in sorted(links):
        before, specs = links[key], rules.ladders[key.direction].specs
        room = _room(rules, key, before.rung, traffic, load.compute_s) if is_warm else None
        reason: Literal["bottleneck", "room", "guard"] = "room"
        if detail := alarm or _alarm(rules, traffic.get(key)):
            rung, until = min(before.rung + 1, len(specs) - 1), load.step + 1 + rules.hold
            after, reason = replace(before, rung=rung, floor=rung, floor_until=until, num_slow=0, num_room=0), "guard"
        elif room is None:
            after = replace(before, num_slow=0, num_room=0)
        elif room.share(before.rung) > FULL:
            after, reason, detail = _slow(rules, before, load.step, room), "bottleneck", room.words
        else:
            after, detail = _roomy(rules, before, load.step, room), room.words
        links[key] = after
        if after.rung != before.rung:
            changes.append(CodecChange(*key, specs[before.rung], specs[after.rung], reason, detail))
            if room is not None:  # links after it on the same uplink account for it
                traffic[key] = replace(traffic[key], sending_s=room.seconds(after.rung))
    return replace(state, links=links, steps_seen=state.steps_seen + 1), tuple(changes)


@dataclass(frozen=True, slots=True)
class _Room:
    """How long sending takes, would take on other rungs, and may take."""

    nbytes: tuple[int, ...]
    rung: int
    sending_s: float
    budget_s: float
    words: str

    def seconds(self, rung: int) -> float:
        """Sending time on this rung, at the measured goodput."""
        return self.sending_s * self.nbytes[rung] / self.nbytes[self.rung]

    def share(self, rung: int) -> float:
        """Sending time as a share of the budget."""
        return self.seconds(rung) / self.budget_s


def _room(
    rules: FollowRules, key: LinkKey, rung: int, links: Mapping[LinkKey, LinkLoad], compute_s: float
) -> _Room | None:
    """The link's room; None if nothing was sent."""
    own = links.get(key)
    if own is None or own.sending_s <= 0:
        return None
    others = [load for other, load in links.items() if other != key]
    beside = [load.sending_s for load in others if own.uplink is not None and load.uplink == own.uplink]
    budget_s = max(compute_s - sum(beside), compute_s / (1 + len(beside)))
    goodput = 8e-6 * own.payload_bytes / own.sending_s
    words = f"sending took {own.sending_s:.3g} s at {goodput:.3g} Mbit/s, computing {compute_s:.3g} s"
    words += f", the host's other links {sum(beside):.3g} s" if beside else ""
    return _Room(rules.ladders[key.direction].nbytes, rung, own.sending_s, budget_s, words)


def _slow(rules: FollowRules, link: DirectionState, step: int, room: _Room) -> DirectionState:
    link = replace(link, num_slow=link.num_slow + 1, num_room=0)
    floor = link.floor if step + 1 < link.floor_until else 0
    if link.num_slow < rules.lower_after or link.rung <= floor:
        return link
    fitting = [rung for rung in range(floor, link.rung) if room.share(rung) <= FITS]
    soon = link.raised_at is not None and step - link.raised_at <= _wait(rules, link)
    patience = min(MOST_PATIENCE, 2 * link.patience) if soon else link.patience
    return replace(link, rung=max(fitting, default=floor), num_slow=0, patience=patience, raised_at=None)


def _roomy(rules: FollowRules, link: DirectionState, step: int, room: _Room) -> DirectionState:
    if link.raised_at is not None and step - link.raised_at > _wait(rules, link):
        link = replace(link, raised_at=None, patience=1)
    link = replace(link, num_slow=0)
    above = range(link.rung + 1, len(room.nbytes))
    fitting = max((rung for rung in above if room.share(rung) <= ROOM), default=link.rung)
    if fitting == link.rung:
        return replace(link, num_room=0)
    least = fitting if link.num_room == 0 else min(link.room, fitting)
    link = replace(link, num_room=link.num_room + 1, room=least)
    if link.num_room < _wait(rules, link):
        return link
    return replace(link, rung=least, num_room=0, raised_at=step)


def _wait(rules: FollowRules, link: DirectionState) -> int:
    """Steps with room before bits are raised; a raise that is taken back within as many steps was too early."""
    return rules.raise_after * link.patience


def _alarm(rules: FollowRules, traffic: LinkLoad | None) -> str:
    """Why this link must be raised; empty: it need not be."""
    if rules.max_error is None or traffic is None or traffic.error is None or traffic.error <= rules.max_error:
        return ""
    return f"relative error {traffic.error:.3g}, above the limit of {rules.max_error:g}"


def _watch_loss(rules: FollowRules, state: PolicyState, load: StepLoad) -> tuple[PolicyState, str]:
    """The state after this step's loss, and why all links must be raised; empty: they need not be."""
    if not load.finite:
        return state, "NaN or infinity"
    if not math.isfinite(load.loss):
        return state, ""
    average, count = state.loss_average, state.num_losses
    limit = average * (1 + rules.loss_rise) if rules.loss_rise is not None and count >= LOSS_WINDOW else math.inf
    rising = state.num_rising + 1 if load.loss > limit else 0
    weight = max(1 / (count + 1), 2 / (LOSS_WINDOW + 1))  # the plain mean of few losses, later an exponential one
    mean = load.loss if count == 0 else average + weight * (load.loss - average)
    alarm = f"loss {load.loss:.4g}, {average:.4g} on average before" if rising == RISING_STEPS else ""
    seen = replace(state, loss_average=mean, num_losses=count + 1, num_rising=0 if alarm else rising)
    return seen, alarm


# -- the links of a run ---------------------------------------------------------------------------

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
        sums: codecs of the shards that replicas send each other, by link.
    """

    start: Mapping[Traffic, str] = field(default_factory=dict)
    rules: FollowRules | None = None
    replay: Recorded | None = None
    saved: Mapping[str, Any] = field(default_factory=dict)
    sums: Mapping[int, str] = field(default_factory=dict)


class LinkCodecs:
    """The codecs of a run's links (`num_links` cuts of the pipeline), from step to step.

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
            return self._options.sums.get(key.link, RAW)
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
    """A committed step as the policy sees it, without the link of tied embeddings: it is used after the work.

    Links are loaded by transmission time, or by the time in transit where the transport does not report that.
    """
    compute_s, loads = max((computing_s(stage.timing) for stage in record.stages), default=0.0), {}
    for link in record.links:
        sending_s, uplink = (link.wire_s, link.sender) if link.wire_s > 0 else (link.busy_s, None)
        if link.link < num_links:
            error = None if record.has_overflowed else link.relative_error
            load = LinkLoad(link.payload_bytes, sending_s, error, uplink)
            loads[LinkKey(link.link, link.direction)] = load
    return StepLoad(record.step - 1, compute_s, record.loss, not record.skipped or record.has_overflowed, loads)


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
