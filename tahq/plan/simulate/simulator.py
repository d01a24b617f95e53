"""Discrete-event simulation of one step: a schedule, executed against given costs.

Resources, each of which serves one thing at a time:
- a stage's compute loop, which runs its row in order and never waits for a send; those that share a GPU advance at
  equal speeds, of which the sum is that of a stage that has it alone;
- a stage's uplink and its downlink, each shared by activations and gradients;
- the path from one stage to another, where a cut gives it a rate: what waits for it holds up no other path;
- a stage's two codec lanes, which encode and decode beside compute.

Uplinks, paths and downlinks are lines of `tahq.comm.network_model`. A transfer is cut through: its bytes leave the
sender's uplink one after another and enter the path at once and the receiver's downlink one latency later. A free
uplink takes a piece of the frame that goes first: the one queued first; where one direction is preferred, the first of
those; where no order is kept, as under plain TCP, of the link whose turn it is. A piece is sent to its end. A host
acknowledges what it receives: where its uplink is busy, the next piece there waits for these bytes. A frame of a
relayed cut crosses the relaying host's downlink and then its uplink, piece by piece, each beside all else there.

Queues before downlinks and paths hold `Costs.queue_s`. Flow and congestion control keep in the sender what does not
fit: its uplink takes a piece of another link, or none until something has been delivered.

The simulation is exact for this model and has no randomness: equal inputs give equal timelines.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tahq.comm.link.frame import Direction
from tahq.comm.link.outbound import Rank, rank_of
from tahq.comm.network_model import Line, transmission_s
from tahq.errors import ScheduleError
from tahq.pipeline.schedule.grid import Cell, render
from tahq.pipeline.schedule.schedule import Action, ActionKind, Schedule, schedule_dependencies
from tahq.plan.simulate.costs import Costs, HostCosts, uniform_costs

Event = Callable[[float], None]


@dataclass(slots=True)
class Transfer:
    """A frame that crosses a cut; times are seconds from the start of the step.

    queued_s: encoded and given to the sender's uplink. start_s, sent_s: first byte into, last byte out of
    the uplink. delivered_s: last byte out of the receiver's downlink.
    """

    cut: int
    direction: Direction
    micro_batch: int
    source: int
    target: int
    nbytes: float
    queued_s: float = 0.0
    start_s: float = 0.0
    sent_s: float = 0.0
    delivered_s: float = 0.0
    is_leg: bool = False
    """Whether it is a piece on its way to the relay or from there."""


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """An action on its stage's compute loop."""

    stage: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """One step, simulated: actions in order of their end, transfers of delivery; times are seconds from its start.

    `step_time_s` ends with the commit's arrival.
    """

    actions: tuple[ActionSpan, ...]
    transfers: tuple[Transfer, ...]
    step_time_s: float
    num_stages: int


def simulate(schedule: Schedule, costs: Costs) -> StepTimeline:
    """Run one step of a valid schedule, the actions in the order of its rows; ScheduleError if it deadlocks."""
    return _Simulation(schedule, costs).run()


def draw_grid(what: Schedule | StepTimeline, width: int | None = None) -> str:
    """Draw one row per stage, time from left to right, in lines of at most `width` characters (None: any number).

    A schedule is drawn without communication and backwards twice as wide as forwards, a simulated step to scale, a
    column being its shortest action.
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
        self._ready: list[set[Action]] = [set() for _ in schedule.actions]
        """Results by the stage where they are."""
        devices = costs.devices or range(schedule.num_stages)
        by_number = {number: _Device() for number in devices}
        self._devices = [by_number[number] for number in devices]
        """By stage."""
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
            raise ScheduleError(f"schedule {name} deadlocks with {', '.join(stuck)}")
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
        if self._ready[stage].issuperset(self._needs[action]):
            self._is_computing[stage] = True
            self._position[stage] += 1
            seconds, device = self._costs.compute_s[action.chunk, action.kind], self._devices[stage]
            device.advance(now)
            device.left_s[stage] = seconds, lambda end_s: self._finish(stage, action, now, end_s)
            self._expect(device, now)

    def _expect(self, device: "_Device", now: float) -> None:
        """Schedule the end of the action that ends first on a device, unless another begins there before."""
        device.num_changes += 1
        number = device.num_changes

        def end(end_s: float) -> None:
            if device.num_changes == number:
                device.advance(end_s)
                _, finish = device.left_s.pop(stage)
                self._expect(device, end_s)
                finish(end_s)

        if device.left_s:
            stage = min(device.left_s, key=lambda each: device.left_s[each][0])
            self._at(now + len(device.left_s) * device.left_s[stage][0], end)

    def _finish(self, stage: int, action: Action, start_s: float, end_s: float) -> None:
        self._actions.append(ActionSpan(stage, action, start_s, end_s))
        self._is_computing[stage] = False
        self._ready[stage].add(action)
        self._pass_on(action, end_s)
        self._start_next(stage, end_s)

    def _pass_on(self, action: Action, now: float) -> None:
        """Encode an action's result, send it and decode it, if the next chunk is on another stage."""
        forward = action.kind is ActionKind.F
        peer, placement = action.chunk + (1 if forward else -1), self._schedule.placement
        first = 0 if forward else self._schedule.num_frozen
        if action.kind is ActionKind.W or not first <= peer < self._schedule.num_chunks:
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
            self._ready[target].add(action)
            self._start_next(target, now)

        encoded_s = self._lane_end_s("encode", source, now, encode_s)
        self._at(encoded_s, lambda time_s: self._network.send(transfer, time_s, deliver))

    def _lane_end_s(self, lane: str, stage: int, now: float, seconds: float) -> float:
        """When a codec lane is done with a frame that comes now."""
        self._lane_free_s[lane, stage] = max(now, self._lane_free_s[lane, stage]) + seconds
        return self._lane_free_s[lane, stage]


@dataclass(slots=True)
class _Device:
    """What computes: seconds left of the action of each stage that is computing on it, and what follows its end."""

    left_s: dict[int, tuple[float, Event]] = field(default_factory=dict)
    now_s: float = 0.0
    num_changes: int = 0

    def advance(self, now: float) -> None:
        """Compute until now."""
        if self.left_s:
            done_s = (now - self.now_s) / len(self.left_s)
            self.left_s = {stage: (left - done_s, then) for stage, (left, then) in self.left_s.items()}
        self.now_s = now


@dataclass(slots=True)
class _Queued:
    """A transfer in an uplink's queue, and how many of its pieces have left."""

    transfer: Transfer
    deliver: Callable[[], None]
    num_pieces: int
    num_sent: int = 0


@dataclass(slots=True)
class _Link:
    """What waits on a host for one receiver (a heap by rank), the bytes under way to it, the turn of its last piece."""

    waiting: list[tuple[Rank, _Queued]] = field(default_factory=list)
    under_way: float = 0.0
    turn: int = 0


@dataclass(slots=True)
class _Uplink:
    """A host's links by receiver, whether a piece is leaving, and the bytes that came since the last piece left."""

    links: dict[int, _Link] = field(default_factory=dict)
    is_busy: bool = False
    to_acknowledge: float = 0.0


class SimulatedNetwork:
    """Moves frames between stages; `at` schedules an event at a time."""

    def __init__(self, costs: Costs, at: Callable[[float, Event], None]) -> None:
        self._costs, self._at = costs, at
        relays = [costs.relay] if isinstance(costs.relay, HostCosts) else []
        self._hosts = [*costs.hosts, *relays]
        self._relay = costs.relay if isinstance(costs.relay, int) else len(costs.hosts)
        self._uplinks = [_Uplink() for _ in self._hosts]
        self._paths: dict[tuple[int, int], Line] = defaultdict(Line)
        """By source and target."""
        self._downlinks = [Line(host.downlink_bits_per_s) for host in self._hosts]
        self._under_way: dict[int, float] = defaultdict(float)
        """Bytes by receiver, from all senders."""
        self._held_up: set[int] = set()
        """Hosts of which something waits for room in a queue."""
        self._num_queued = self._num_turns = 0

    def send(self, transfer: Transfer, now: float, deliver: Callable[[], None]) -> None:
        """Queue a frame on its source's uplink; `deliver` is called when its last byte is there and its times known."""
        if self._costs.cuts[transfer.cut].is_relayed:
            self._send_by_relay(transfer, now, deliver)
        else:
            self._send_leg(transfer, now, deliver)

    def _send_by_relay(self, transfer: Transfer, now: float, deliver: Callable[[], None]) -> None:
        """Send a frame's pieces to the relay, and each from there once it has come."""
        transfer.queued_s, most = now, self._costs.piece_nbytes or transfer.nbytes
        num_pieces = max(1, math.ceil(transfer.nbytes / most)) if most else 1

        def send_piece(number: int) -> None:
            nbytes = min(most, transfer.nbytes - number * most)
            first = replace(transfer, target=self._relay, nbytes=nbytes, is_leg=True)
            second = replace(transfer, source=self._relay, nbytes=nbytes, is_leg=True)

            def arrive() -> None:
                if number == 0:
                    transfer.start_s = first.start_s
                if number == num_pieces - 1:
                    transfer.sent_s, transfer.delivered_s = first.sent_s, second.delivered_s
                    deliver()

            self._send_leg(first, now, lambda: self._send_leg(second, first.delivered_s, arrive))

        for number in range(num_pieces):
            send_piece(number)

    def _send_leg(self, transfer: Transfer, now: float, deliver: Callable[[], None]) -> None:
        transfer.queued_s = now
        piece_nbytes = self._costs.piece_nbytes
        num_pieces = max(1, math.ceil(transfer.nbytes / piece_nbytes)) if piece_nbytes else 1
        self._num_queued += 1
        uplink = self._uplinks[transfer.source]
        link = uplink.links.setdefault(transfer.target, _Link())
        rank = rank_of(transfer.direction, self._num_queued, self._costs.first or "oldest")
        heapq.heappush(link.waiting, (rank, _Queued(transfer, deliver, num_pieces)))
        if not uplink.is_busy:
            self._send_piece(transfer.source, now)

    def _send_piece(self, stage: int, now: float) -> None:
        uplink, link = self._uplinks[stage], self._next_link(stage)
        uplink.is_busy = link is not None
        if link is None:
            return
        queued = link.waiting[0][1]
        transfer, is_last = queued.transfer, queued.num_sent == queued.num_pieces - 1
        full = float(self._costs.piece_nbytes or 0)
        nbytes = transfer.nbytes - full * queued.num_sent if is_last else full
        acknowledging = self._costs.acknowledged * uplink.to_acknowledge
        uplink.to_acknowledge = 0.0
        sent_s = now + transmission_s(acknowledging + nbytes, self._hosts[stage].uplink_bits_per_s)
        if queued.num_sent == 0:
            transfer.start_s = now
        queued.num_sent += 1
        if is_last:
            heapq.heappop(link.waiting)
            transfer.sent_s = sent_s
        self._num_turns += 1
        link.turn = self._num_turns
        link.under_way += nbytes
        self._under_way[transfer.target] += nbytes
        self._travel(transfer, nbytes, now, sent_s, queued.deliver if is_last else None)
        self._at(sent_s, lambda time_s: self._send_piece(stage, time_s))

    def _next_link(self, stage: int) -> _Link | None:
        """The link whose piece an uplink takes now; None if it has to wait."""
        waiting = [(target, link) for target, link in self._uplinks[stage].links.items() if link.waiting]
        ready = [link for target, link in waiting if self._has_room(target, link)]
        if len(ready) < len(waiting):
            self._held_up.add(stage)
        takes_turns = self._costs.first is None
        return min(ready, key=lambda link: (link.turn if takes_turns else 0, link.waiting[0][0]), default=None)

    def _has_room(self, target: int, link: _Link) -> bool:
        """Whether the queues before a receiver would still take a piece; an empty one takes a piece of any size."""
        if self._costs.queue_s == math.inf or not link.under_way:
            return True
        transfer = link.waiting[0][1].transfer
        queue_s = self._costs.queue_s + self._latency_s(transfer)
        allowed = queue_s * self._hosts[target].downlink_bits_per_s / 8
        return self._under_way[target] <= allowed and link.under_way <= queue_s * self._path_bits_per_s(transfer) / 8

    def _travel(
        self, transfer: Transfer, nbytes: float, first_s: float, last_s: float, deliver: Callable[[], None] | None
    ) -> None:
        """Carry a piece over path and downlink; `deliver` after the last one."""
        path = self._paths[transfer.source, transfer.target]
        path.rate_bits_per_s = self._path_bits_per_s(transfer)
        first_s, last_s = path.serve(nbytes, first_s, last_s)
        latency_s = self._latency_s(transfer)

        def arrive(now: float) -> None:
            _, delivered_s = self._downlinks[transfer.target].serve(nbytes, first_s + latency_s, now)
            receiver = self._uplinks[transfer.target]
            receiver.to_acknowledge += nbytes if receiver.is_busy else 0.0
            if self._costs.queue_s < math.inf:
                self._at(delivered_s, lambda time_s: self._make_room(transfer, nbytes, time_s))
            if deliver is not None:
                transfer.delivered_s = delivered_s
                self._at(delivered_s, lambda _: deliver())

        self._at(last_s + latency_s, arrive)

    def _make_room(self, transfer: Transfer, nbytes: float, now: float) -> None:
        """Take a piece out of the queues, and let uplinks that waited for room go on."""
        self._under_way[transfer.target] -= nbytes
        self._uplinks[transfer.source].links[transfer.target].under_way -= nbytes
        for stage in sorted(self._held_up):
            link = self._uplinks[stage].links.get(transfer.target)
            if link is not None and link.waiting:
                self._held_up.discard(stage)
                if not self._uplinks[stage].is_busy:
                    self._send_piece(stage, now)

    def _latency_s(self, transfer: Transfer) -> float:
        return self._costs.cuts[transfer.cut].latency_s / (1 + transfer.is_leg)

    def _path_bits_per_s(self, transfer: Transfer) -> float:
        cut = self._costs.cuts[transfer.cut]
        return cut.forward_bits_per_s if transfer.direction is Direction.FORWARD else cut.backward_bits_per_s
