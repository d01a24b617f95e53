"""Chooses each link's codec, per direction and step: bits that follow the bandwidth.

Pure: `tick` takes the state before a step and what was measured during it, and returns the next state. Invariants:

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

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tahq.coordinator.observer import CodecChange, Traffic
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
"""Steps over which the loss is averaged (exponentially), and before the average is used."""
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
    """One step as the policy sees it.

    Attributes:
        step: its index, from 0; the decision holds from `step + 1` on.
        compute_s: compute time of the slowest stage, waiting left out.
        loss: nats per token; NaN: unknown.
        finite: whether the step was applied.
        links: their traffic; a missing link was idle.
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
        raised_at: step of the last raise for room; None: none, or it has proved right.
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
    """Every link at the rung of the run's start; `num_links` are the cuts of the pipeline, `start` has the rungs."""
    keys = [LinkKey(link, direction) for link in range(num_links) for direction in rules.ladders]
    return PolicyState({key: DirectionState(start[key.direction]) for key in keys})


def tick(rules: FollowRules, state: PolicyState, load: StepLoad) -> tuple[PolicyState, tuple[CodecChange, ...]]:
    """Decide about the next step.

    Args:
        rules: the parameters.
        state: after the step before.
        load: the step that was just computed.

    Returns:
        The state from the next step on, and the changes.
    """
    state, alarm = _watch_loss(rules, state, load)
    is_warm = state.steps_seen >= WARM_UP_STEPS and load.compute_s > 0
    links, traffic, changes = dict(state.links), dict(load.links), list[CodecChange]()
    for key in sorted(links):
        before, specs = links[key], rules.ladders[key.direction].specs
        room = _room(rules, key, before.rung, traffic, load.compute_s) if is_warm else None
        reason: Literal["bottleneck", "room", "guard"] = "room"
        if detail := alarm or _alarm(rules, traffic.get(key)):
            after, reason = _raised(before, len(specs) - 1, load.step + 1 + rules.hold), "guard"
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


def _raised(link: DirectionState, top: int, until: int) -> DirectionState:
    """One rung higher, and held there until this step."""
    rung = min(link.rung + 1, top)
    return replace(link, rung=rung, floor=rung, floor_until=until, num_slow=0, num_room=0)


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
