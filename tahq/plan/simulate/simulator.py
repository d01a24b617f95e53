"""Discrete-event simulation of one step: a schedule, executed against given costs.

Resources, each of which serves one thing at a time:
- a stage's compute loop, which runs its row in order and never waits for a send;
- a stage's uplink and its downlink, each shared by activations and gradients (`network.py`);
- the path from one stage to another, where a cut gives it a rate: what waits for it holds up no other path;
- a stage's two codec lanes, which encode and decode beside compute.

The simulation is exact for this model and has no randomness: equal inputs give equal timelines.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass

from tahq.comm.link.frame import Direction
from tahq.errors import ScheduleError
from tahq.pipeline.schedule.grid import Cell, render
from tahq.pipeline.schedule.schedule import Action, ActionKind, Schedule, schedule_dependencies
from tahq.plan.simulate.costs import Costs, uniform_costs
from tahq.plan.simulate.network import Event, SimulatedNetwork, TransferSpan


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """An action on its stage's compute loop; encoding and decoding included where they run there."""

    stage: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """One step, simulated; times are seconds from its start.

    Attributes:
        actions: in order of their end.
        transfers: in order of delivery.
        step_time_s: from the start of the step to the commit's arrival.
        num_stages: rows of the picture.
    """

    actions: tuple[ActionSpan, ...]
    transfers: tuple[TransferSpan, ...]
    step_time_s: float
    num_stages: int

    def span(self, action: Action) -> ActionSpan:
        """When an action was computed; KeyError if it never was."""
        for span in self.actions:
            if span.action == action:
                return span
        raise KeyError(str(action))

    def busy_s(self, stage: int) -> float:
        """Seconds that a stage computes."""
        return sum(span.end_s - span.start_s for span in self.actions if span.stage == stage)


def simulate(schedule: Schedule, costs: Costs) -> StepTimeline:
    """Run one step of a schedule.

    Args:
        schedule: a valid one; its actions run in the order of its rows.
        costs: seconds, bytes, rates and latency.

    Returns:
        Every action and transfer with its times, in seconds.

    Raises:
        ScheduleError: a cost is missing, or the schedule deadlocks.
    """
    costs.check(schedule)
    return _Simulation(schedule, costs).run()


def draw_grid(what: Schedule | StepTimeline, width: int | None = None) -> str:
    """Draw one row per stage, time from left to right, backwards twice as wide as forwards where not simulated.

    Args:
        what: a schedule (drawn without any communication) or a simulated step (drawn to scale, a
            column being its shortest action).
        width: longest line in characters; None: as wide as needed.
    """
    timeline = _simulate_slots(what) if isinstance(what, Schedule) else what
    shortest_s = min((span.end_s - span.start_s for span in timeline.actions), default=0.0)
    free = [0] * timeline.num_stages
    cells = []
    for span in sorted(timeline.actions, key=lambda span: (span.stage, span.start_s)):
        # rounding to columns must neither swallow an action nor let two overlap
        start = max(free[span.stage], round(span.start_s / shortest_s) if shortest_s else 0)
        end = max(start + 1, round(span.end_s / shortest_s) if shortest_s else 0)
        free[span.stage] = end
        cells.append(Cell(span.stage, start, end, str(span.action)))
    return render(cells, [f"stage {stage}  " for stage in range(timeline.num_stages)], width)


def _simulate_slots(schedule: Schedule) -> StepTimeline:
    """One slot for a forward, two for a backward (two matrix products to one), none for the wire."""
    return simulate(schedule, uniform_costs(schedule.num_chunks, schedule.num_stages, forward_s=1, backward_s=2))


class _Simulation:
    """The state of one step under way; events are pairs of a time and what happens then."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        stages = range(schedule.num_stages)
        self._schedule = schedule
        self._costs = costs
        self._needs = schedule_dependencies(schedule)
        self._events: list[tuple[float, int, Event]] = []
        self._num_events = 0
        self._position = [0 for _ in stages]
        self._computing = [False for _ in stages]
        self._ready: set[tuple[Action, int]] = set()
        self._lane_free_s: dict[tuple[str, int], float] = defaultdict(float)
        self._network = SimulatedNetwork(costs, self._at)
        self._actions: list[ActionSpan] = []
        self._transfers: list[TransferSpan] = []

    def run(self) -> StepTimeline:
        for stage in range(self._schedule.num_stages):
            self._start_next(stage, 0.0)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        self._check_finished()
        end_s = max((span.end_s for span in self._actions), default=0.0)
        return StepTimeline(
            actions=tuple(self._actions),
            transfers=tuple(self._transfers),
            step_time_s=end_s + self._costs.commit_s,
            num_stages=self._schedule.num_stages,
        )

    def _at(self, time_s: float, event: Event) -> None:
        # the number breaks ties in the order of asking: first come, first served
        heapq.heappush(self._events, (time_s, self._num_events, event))
        self._num_events += 1

    # -- compute ---------------------------------------------------------------------------------

    def _start_next(self, stage: int, now: float) -> None:
        """Start the stage's next action if it is free and everything that the action needs is here."""
        row = self._schedule.actions[stage]
        if self._computing[stage] or self._position[stage] == len(row):
            return
        action = row[self._position[stage]]
        if not all((need, stage) in self._ready for need in self._needs[action]):
            return
        self._computing[stage] = True
        self._position[stage] += 1
        seconds = self._costs.compute_s[action.chunk, action.kind]
        self._at(now + seconds, lambda end: self._finish(stage, action, now, end))

    def _finish(self, stage: int, action: Action, start_s: float, end_s: float) -> None:
        self._actions.append(ActionSpan(stage, action, start_s, end_s))
        self._computing[stage] = False
        self._ready.add((action, stage))
        transfer = self._transfer_of(action)
        if transfer is not None:
            self._encode(action, transfer, end_s)
        self._start_next(stage, end_s)

    # -- between stages --------------------------------------------------------------------------

    def _transfer_of(self, action: Action) -> TransferSpan | None:
        """The frame that an action's result travels in, its times still open; None if it stays here."""
        forward = action.kind is ActionKind.F
        peer = action.chunk + 1 if forward else action.chunk - 1
        if action.kind is ActionKind.W or not 0 <= peer < self._schedule.num_chunks:
            return None
        source, target = self._schedule.placement[action.chunk], self._schedule.placement[peer]
        if source == target:
            return None
        cut = min(action.chunk, peer)
        direction = Direction.FORWARD if forward else Direction.BACKWARD
        costs = self._costs.cuts[cut]
        nbytes = costs.forward_nbytes if forward else costs.backward_nbytes
        return TransferSpan(cut, direction, action.micro_batch, source, target, nbytes, 0.0, 0.0, 0.0, 0.0)

    def _codec_s(self, transfer: TransferSpan) -> tuple[float, float]:
        """Seconds to encode and to decode a frame."""
        cut = self._costs.cuts[transfer.cut]
        if transfer.direction is Direction.FORWARD:
            return cut.forward_encode_s, cut.forward_decode_s
        return cut.backward_encode_s, cut.backward_decode_s

    def _encode(self, action: Action, transfer: TransferSpan, now: float) -> None:
        encoded_s = self._use_lane("encode", transfer.source, now, self._codec_s(transfer)[0])
        self._at(encoded_s, lambda time_s: self._send(action, transfer, time_s))

    def _use_lane(self, lane: str, stage: int, now: float, seconds: float) -> float:
        self._lane_free_s[lane, stage] = max(now, self._lane_free_s[lane, stage]) + seconds
        return self._lane_free_s[lane, stage]

    def _send(self, action: Action, transfer: TransferSpan, now: float) -> None:
        self._network.send(transfer, now, lambda done: self._deliver(action, done))

    def _deliver(self, action: Action, transfer: TransferSpan) -> None:
        self._transfers.append(transfer)
        decoded_s = self._use_lane("decode", transfer.target, transfer.delivered_s, self._codec_s(transfer)[1])
        self._at(decoded_s, lambda time_s: self._arrive(action, transfer.target, time_s))

    def _arrive(self, action: Action, stage: int, now: float) -> None:
        self._ready.add((action, stage))
        self._start_next(stage, now)

    def _check_finished(self) -> None:
        rows = self._schedule.actions
        stuck = [(stage, at) for stage, at in enumerate(self._position) if at < len(rows[stage])]
        if stuck:
            waits = ", ".join(f"stage {stage} at {rows[stage][at]}" for stage, at in stuck)
            raise ScheduleError(f"schedule {self._schedule.name} deadlocks with {waits}; validate() draws where")
