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
from tahq.plan.simulate.network import Event, SimulatedNetwork, Transfer


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """An action on its stage's compute loop."""

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
    transfers: tuple[Transfer, ...]
    step_time_s: float
    num_stages: int


def simulate(schedule: Schedule, costs: Costs) -> StepTimeline:
    """Run one step of a valid schedule, the actions in the order of its rows.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    return _Simulation(schedule, costs).run()


def draw_grid(what: Schedule | StepTimeline, width: int | None = None) -> str:
    """Draw one row per stage, time from left to right, backwards twice as wide as forwards where not simulated.

    Args:
        what: a schedule (drawn without any communication) or a simulated step (drawn to scale, a
            column being its shortest action).
        width: longest line in characters; None: as wide as needed.
    """
    timeline = what
    if isinstance(timeline, Schedule):
        stages = timeline.num_stages
        timeline = simulate(timeline, uniform_costs(timeline.num_chunks, stages, forward_s=1, backward_s=2))
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


class _Simulation:
    """The state of one step under way; events are pairs of a time and what happens then."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._costs = schedule, costs
        self._needs = schedule_dependencies(schedule)
        self._events: list[tuple[float, int, Event]] = []
        self._num_events = 0
        self._position = [0] * schedule.num_stages
        self._is_computing = [False] * schedule.num_stages
        self._ready: set[tuple[Action, int]] = set()
        """Results by the stage where they are."""
        self._lane_free_s: dict[tuple[str, int], float] = defaultdict(float)
        self._network = SimulatedNetwork(costs, self._at)
        self._actions: list[ActionSpan] = []
        self._transfers: list[Transfer] = []

    def run(self) -> StepTimeline:
        rows = self._schedule.actions
        for stage in range(len(rows)):
            self._start_next(stage, 0.0)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        stuck = [
            f"stage {stage} at {rows[stage][at]}" for stage, at in enumerate(self._position) if at < len(rows[stage])
        ]
        if stuck:
            name = self._schedule.name
            raise ScheduleError(f"schedule {name} deadlocks with {', '.join(stuck)}; validate() draws where")
        end_s = max((span.end_s for span in self._actions), default=0.0)
        return StepTimeline(tuple(self._actions), tuple(self._transfers), end_s + self._costs.commit_s, len(rows))

    def _at(self, time_s: float, event: Event) -> None:
        # the number breaks ties in the order of asking: first come, first served
        heapq.heappush(self._events, (time_s, self._num_events, event))
        self._num_events += 1

    def _start_next(self, stage: int, now: float) -> None:
        """Start the stage's next action if it is free and everything that the action needs is here."""
        row = self._schedule.actions[stage]
        if self._is_computing[stage] or self._position[stage] == len(row):
            return
        action = row[self._position[stage]]
        if all((need, stage) in self._ready for need in self._needs[action]):
            self._is_computing[stage] = True
            self._position[stage] += 1
            seconds = self._costs.compute_s[action.chunk, action.kind]
            self._at(now + seconds, lambda end_s: self._finish(stage, action, now, end_s))

    def _finish(self, stage: int, action: Action, start_s: float, end_s: float) -> None:
        self._actions.append(ActionSpan(stage, action, start_s, end_s))
        self._is_computing[stage] = False
        self._ready.add((action, stage))
        self._pass_on(action, end_s)
        self._start_next(stage, end_s)

    def _pass_on(self, action: Action, now: float) -> None:
        """Encode an action's result, send it and decode it, if the next chunk is on another stage."""
        forward = action.kind is ActionKind.F
        peer, placement = action.chunk + (1 if forward else -1), self._schedule.placement
        if action.kind is ActionKind.W or not 0 <= peer < self._schedule.num_chunks:
            return
        source, target = placement[action.chunk], placement[peer]
        if source == target:
            return
        number = min(action.chunk, peer)
        cut = self._costs.cuts[number]
        if forward:
            direction, nbytes = Direction.FORWARD, cut.forward_nbytes
            encode_s, decode_s = cut.forward_encode_s, cut.forward_decode_s
        else:
            direction, nbytes = Direction.BACKWARD, cut.backward_nbytes
            encode_s, decode_s = cut.backward_encode_s, cut.backward_decode_s
        transfer = Transfer(number, direction, action.micro_batch, source, target, nbytes)

        def deliver() -> None:
            self._transfers.append(transfer)
            self._at(self._lane_end_s("decode", target, transfer.delivered_s, decode_s), arrive)

        def arrive(now: float) -> None:
            self._ready.add((action, target))
            self._start_next(target, now)

        encoded_s = self._lane_end_s("encode", source, now, encode_s)
        self._at(encoded_s, lambda time_s: self._network.send(transfer, time_s, deliver))

    def _lane_end_s(self, lane: str, stage: int, now: float, seconds: float) -> float:
        """When a codec lane is done with a frame that comes now."""
        self._lane_free_s[lane, stage] = max(now, self._lane_free_s[lane, stage]) + seconds
        return self._lane_free_s[lane, stage]
