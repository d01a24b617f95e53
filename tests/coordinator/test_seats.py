"""The table of seats and the run's phases: transitions, deadlines, points to go on from, copies of checkpoints."""

import itertools
import math
from dataclasses import replace

import pytest
from coordinator.conftest import CONFIG_HASH, VERSION, make_hello, make_prepare
from hypothesis import given, settings
from hypothesis import strategies as st

from tahq.comm.control import messages as say
from tahq.comm.control.messages import Commit, Copied, Join
from tahq.coordinator import copies, recovery
from tahq.coordinator.context import CoordinatorOptions
from tahq.coordinator.joining import seats
from tahq.coordinator.joining.seats import RestorePoint, SeatEvent, SeatPhase, Seats
from tahq.coordinator.run_state import RunEvent, RunPhase, RunState
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError, UserError
from tahq.pipeline.config import TrainingConfig

STEPS = (RunEvent.ALL_GREETED, RunEvent.ALL_READY, RunEvent.LAST_COMMIT, RunEvent.NOTHING_OWED)
MEASURING_STEPS = (RunEvent.ALL_THERE, RunEvent.ALL_MEASURED)


def options(num_stages=3, **changes):
    values = {"config_json": "{}", "config_hash": CONFIG_HASH, "version": VERSION, "training": TrainingConfig(steps=4)}
    limits = {"give_up_s": 40.0, "join_timeout_s": 100.0}
    return CoordinatorOptions(num_stages, 7, None, **(values | limits | changes))


def run_in(phase):
    run = RunState(RestorePoint(0), 0.0)
    for event in MEASURING_STEPS if phase is RunPhase.MEASURING else STEPS:
        if run.phase is not phase:
            run.advance(event, 1.0)
    return run


def happen(table, event, stage, identity, now_s):
    match event:
        case SeatEvent.JOIN:
            table.join(stage, identity, Join(stage, VERSION, f"host{stage}", 5), now_s)
        case SeatEvent.HELLO:
            table.advance(stage, event, now_s).hello = make_hello(stage)
        case SeatEvent.LEAVE:
            table.leave(stage, now_s, position=0)
        case SeatEvent.REJOIN:
            if table.find(identity) is not None:
                raise LocalProtocolError("holds a stage")
            seat = table.advance(stage, event, now_s)
            seat.identity, seat.hello, seat.lost_since_s = identity, make_hello(stage), None
        case SeatEvent.PLAN | SeatEvent.READY:
            table.advance(stage, event, now_s)


@pytest.fixture
def ready():
    """A table whose stage 1 is ready."""
    table = Seats(3, RestorePoint(4))
    for event in (SeatEvent.JOIN, SeatEvent.HELLO, SeatEvent.PLAN, SeatEvent.READY):
        happen(table, event, 1, b"who", 1.0)
    return table


SEAT_MOVES = """
EMPTY    JOIN   ASSIGNED
ASSIGNED HELLO  GREETED
GREETED  PLAN   PLANNED
PLANNED  READY  READY
EMPTY    REJOIN READY
"""
RUN_MOVES = """
JOINING    ALL_GREETED  CONNECTING
CONNECTING ALL_READY    TRAINING
TRAINING   LAST_COMMIT  FINISHING
FINISHING  NOTHING_OWED OVER
JOINING    TURNED_BACK  JOINING
CONNECTING TURNED_BACK  CONNECTING
TRAINING   TURNED_BACK  TRAINING
FINISHING  TURNED_BACK  TRAINING
JOINING    ALL_THERE    MEASURING
MEASURING  ALL_MEASURED OVER
"""


def moves(text):
    return {(phase, event): following for phase, event, following in map(str.split, text.strip().splitlines())}


@pytest.mark.parametrize(("phase", "event"), [*itertools.product(SeatPhase, SeatEvent)])
def test_every_event_in_every_phase_of_a_seat_moves_it_or_is_the_workers_fault_or_ours(phase, event):
    table = Seats(3)
    table[1].phase, table[1].host, table[1].pid = phase, "host1", 5
    following = "EMPTY" if event is SeatEvent.LEAVE else moves(SEAT_MOVES).get((phase.name, event.name))
    if following is not None:
        assert table.advance(1, event, 9.0).phase is SeatPhase[following]
        assert table[1].since_s == 9.0
        return
    error = RemoteProtocolError if event in (SeatEvent.HELLO, SeatEvent.READY) else LocalProtocolError
    with pytest.raises(error, match=r"stage 1 .*while it was" if error is RemoteProtocolError else event.name):
        table.advance(1, event, 9.0)
    assert (table[1].phase, table[1].since_s) == (phase, 0.0)


@pytest.mark.parametrize(("phase", "event"), [*itertools.product(RunPhase, RunEvent)])
def test_every_event_in_every_phase_of_the_run_moves_it_or_is_our_fault(phase, event):
    run = run_in(phase)
    is_over = phase is RunPhase.OVER
    following = moves(RUN_MOVES).get((phase.name, event.name))
    if event is RunEvent.ENDED and not is_over:
        following = "OVER"
    if following is not None:
        assert run.advance(event, 9.0) is run.phase is RunPhase[following]
    else:
        with pytest.raises(LocalProtocolError, match=event.name):
            run.advance(event, 9.0)
        assert run.phase is phase


EVENTS = st.lists(
    st.tuples(st.sampled_from([*SeatEvent, "wait"]), st.integers(0, 2), st.integers(0, 4), st.floats(0, 30)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.sampled_from([RunPhase.JOINING, RunPhase.CONNECTING, RunPhase.TRAINING, RunPhase.FINISHING]))
def test_invariants_hold_whatever_happens(events, phase):
    """One holder per stage, phases follow the table, none is ready without HELLO, and every wait has a deadline."""
    table, run, now_s = Seats(3), run_in(phase), 1.0
    for event, stage, who, later_s in events:
        now_s += later_s
        before = table[stage].phase
        try:
            happen(table, event, stage, f"worker-{who}".encode(), now_s)
        except (RemoteProtocolError, LocalProtocolError):
            assert table[stage].phase is before
        else:
            assert event == "wait" or table[stage].phase is seats.TRANSITIONS[before, event]
        check_invariants(table)
        check_deadlines(run, table, now_s)


def check_invariants(table):
    identities = [seat.identity for seat in table.held]
    assert len(set(identities)) == len(identities)
    assert sorted([*table.missing, *(seat.stage for seat in table.held)]) == [0, 1, 2]
    for seat in table:
        assert (seat.phase in (SeatPhase.EMPTY, SeatPhase.ASSIGNED)) == (seat.hello is None)
        assert seat.is_held == bool(seat.identity)
        assert seat.is_held or seat.lost_since_s is not None


def check_deadlines(run, table, now_s):
    """Every seat that is not READY has a deadline; if nothing happens until then, the run is given up."""
    start = options()
    by_s = [recovery.deadline_s(start, run, table, seat) for seat in table]
    for seat, deadline_s in zip(table, by_s, strict=True):
        if seat.phase is not SeatPhase.READY:
            assert deadline_s <= now_s + max(start.give_up_s, start.join_timeout_s)
    if table.before(SeatPhase.READY) and (run.phase is not RunPhase.JOINING or table.before(SeatPhase.GREETED)):
        with pytest.raises((UserError, PeerLostError), match="stage"):
            recovery.check_deadlines(
                start, run, table, math.nextafter(max(filter(math.isfinite, by_s)), math.inf), "x:1"
            )


def test_neighbour_that_never_makes_its_links_ready_has_a_deadline(ready):
    run = run_in(RunPhase.TRAINING)
    assert recovery.deadline_s(options(), run, ready, ready[1]) == math.inf
    ready[1].relinking_since_s = 5.0
    assert recovery.deadline_s(options(), run, ready, ready[1]) == 105.0


WITH_STEPS = {RunPhase.TRAINING, RunPhase.FINISHING}
TAKEN_IN = {
    say.Hello: WITH_STEPS | {RunPhase.JOINING, RunPhase.CONNECTING},
    say.Ready: WITH_STEPS | {RunPhase.CONNECTING},
    **dict.fromkeys((say.Prepare, say.Evaluated, say.Snapshotted, say.Copied, say.Traced), WITH_STEPS),
    **{kind: {RunPhase.MEASURING} for kind in (say.ComputeMeasured, say.PathsMeasured)},
    **{kind: set(RunPhase) for kind in (say.Join, say.Heartbeat, say.Failed, say.StopRequest, say.LinkState)},
}


@pytest.mark.parametrize(("kind", "phase"), [*itertools.product(TAKEN_IN, RunPhase)])
def test_messages_are_taken_in_their_phases_only(kind, phase):
    run, message = run_in(phase), object.__new__(kind)
    if phase in TAKEN_IN[kind]:
        run.check(message, "stage 0")
    else:
        with pytest.raises(RemoteProtocolError, match=f"stage 0 sent {kind.__name__} while the run was {phase.value}"):
            run.check(message, "stage 0")


def test_decisions_are_kept_since_the_base_and_stages_begin_there_or_at_the_newest_checkpoint():
    """A run at step 6, with checkpoints after 2 and 4 steps; that after 2 is the base."""
    run, table = run_in(RunPhase.TRAINING), Seats(3)
    for step in range(6):
        prepares = [make_prepare(step, stage) for stage in range(3)]
        after = RestorePoint(step + 1, codecs=[[0, 0, step]])
        run.decide(Commit(step, True, 1.0, False, step in (1, 3), False), prepares, after, 1.0)
        for seat in table:
            seat.position = step + 1
        if step in (2, 4):
            run.published(replace(run.owed.pop(step), snapshot=f"step-{step}", files={"a": "b"}))
            if step == 2:
                run.rebase(run.newest)
    assert (run.step, run.base.step, run.newest.step, min(run.decided)) == (6, 2, 4, 2)
    assert [run.origin_at(step).codecs for step in (4, 2)] == [[[0, 0, 3]], [[0, 0, 1]]]
    assert run.origin_at(3) is None
    # the base stays while a stage is before the new one, and all go back together
    for position, point in ((6, 4), (2, 2), (4, 4)):
        table[1].position = position
        assert recovery.common_point(run, table).step == point
        assert recovery.can_rebase(run, table, run.newest) == (point == 4)
        # a stage at step 4 may still wait for the weights of the step before
        assert recovery.can_rebase(run, table, run.newest, shares_updates=True) == (position == 6)
    run.rebase(run.newest)
    assert (run.step, min(run.decided)) == (6, 4)


# -- copies ----------------------------------------------------------------------------------------


class World:
    """A table of greeted workers, and the run's checkpoints, of which one after 5 steps is complete."""

    def __init__(self, hosts="abc", silent=(), **changes):
        self.options = options(num_stages=len(hosts), **({"copies": 1} | changes))
        self.run, self.seats = RunState(RestorePoint(0), 0.0), Seats(len(hosts))
        for stage, host in enumerate(hosts):
            self.join(stage, host, serves=stage not in silent)
        self.publish(5)

    def join(self, stage, host, *, serves=True, generation=0):
        address = f"10.0.0.{stage}:7{generation:03d}" if serves else ""
        self.seats.join(stage, f"worker-{stage}-{generation}".encode(), Join(stage, "0", host, 100 + stage), 0.0)
        self.seats.advance(stage, SeatEvent.HELLO, 0.0).hello = make_hello(stage, address=address)

    def publish(self, step):
        files = {f"stage-{seat.stage:03d}-{step}.safetensors": f"{step}{seat.stage}" for seat in self.seats}
        self.run.newest = RestorePoint(step, f"snapshots/step-{step:08d}", files)
        copies.published(self.run, self.seats)

    def due(self):
        return copies.due(self.options, self.run, self.seats)

    def carry_out(self, orders=None, *, and_settle=False):
        """Every holder does as it is told; returns (holder's stage, copied stage) of each order."""
        told = []
        for identity, order in orders or self.due():
            assert not self.is_complete
            holder = self.seats.find(identity)
            copies.copied(self.seats[order.stage], holder, Copied(order.step, order.stage, holder.stage))
            told.append((holder.stage, order.stage))
        if and_settle:  # what is copied is the base
            assert self.is_complete
            self.run.rebase(self.run.copying)
            copies.rebased(self.run, self.seats)
        return told

    @property
    def is_complete(self):
        return copies.is_complete(self.options, self.run, self.seats)

    def lacks(self, stage):
        return copies.lacks(self.run, self.seats, stage)

    def leave(self, stage):
        self.seats.leave(stage, 1.0, position=self.run.base.step)


@pytest.mark.parametrize(
    ("hosts", "changes", "told"),
    [
        ("abc", {}, [(1, 0), (2, 1), (1, 2)]),
        ("aabb", {}, [(2, 0), (2, 1), (1, 2), (1, 3)]),
        ("aaa", {"copies_within_host": True}, [(1, 0), (2, 1), (1, 2)]),
        ("aaa", {}, []),
        ("abc", {"copies": 0}, []),
    ],
)
def test_each_stage_is_copied_to_its_nearest_neighbour_on_another_host(hosts, changes, told):
    world = World(hosts, **changes)
    assert world.carry_out() == told
    assert world.is_complete
    assert world.due() == []


def test_order_names_file_and_source_and_a_newer_checkpoint_waits_until_the_one_before_is_copied():
    world = World()
    orders = world.due()
    assert [(who, order.stage, order.file, order.address) for who, order in orders] == [
        (b"worker-1-0", 0, "stage-000-5.safetensors", "10.0.0.0:7000"),
        (b"worker-2-0", 1, "stage-001-5.safetensors", "10.0.0.1:7000"),
        (b"worker-1-0", 2, "stage-002-5.safetensors", "10.0.0.2:7000"),
    ]
    world.publish(10)
    world.publish(15)
    assert world.run.copying.step == 5
    world.carry_out(orders)
    world.carry_out(and_settle=True)
    assert world.run.copying.step == 15
    assert {order.step for _, order in world.due()} == {15}


def test_holder_that_was_started_again_is_asked_again():
    world = World()
    world.carry_out()
    world.leave(1)
    world.join(1, "b", generation=1)
    assert not world.is_complete
    assert world.carry_out() == [(1, 0), (2, 1), (1, 2)]
    assert world.is_complete


def test_copy_that_failed_is_tried_again_with_the_next_checkpoint():
    world = World()
    world.due()
    copies.copied(world.seats[0], world.seats[1], Copied(5, 0, 1, "the disk is full"))
    assert world.due() == []
    world.publish(10)
    assert sorted((order.step, order.stage) for _, order in world.due()) == [(10, 0), (10, 1), (10, 2)]


def test_checkpoint_whose_part_is_lost_is_skipped():
    world = World()
    world.carry_out(and_settle=True)
    world.publish(10)
    world.seats[1].position = 5
    copies.began(world.run, world.seats[1])  # on another host: its part of step 10 is gone
    assert world.run.copying is None
    assert not world.is_complete
    world.publish(15)
    assert world.run.copying.step == 15


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=8))
def test_all_that_can_be_copied_is_and_never_to_its_own_host(places):
    hosts, silent = [host for host, _ in places], [stage for stage, (_, serves) in enumerate(places) if not serves]
    serving = {host for host, serves in places if serves}
    copied = {stage for stage, (host, serves) in enumerate(places) if serves and serving - {host}}
    for lost in sorted(set(hosts)):  # with everything that was on it
        world = World(hosts, silent)
        told = world.carry_out(and_settle=True)
        assert all(world.seats[holder].host != world.seats[stage].host for holder, stage in told)
        assert {stage for _, stage in told} == copied
        for stage in [seat.stage for seat in world.seats if seat.host == lost]:
            world.leave(stage)
        for stage in world.seats.missing:
            assert bool(world.lacks(stage)) == (stage not in copied)
