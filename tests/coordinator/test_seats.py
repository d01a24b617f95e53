"""The table of seats and the run's phases: transitions, deadlines, and points to go on from."""

import math
from dataclasses import replace

import pytest
from coordinator.conftest import CONFIG_HASH, VERSION, make_hello, make_prepare
from hypothesis import given, settings
from hypothesis import strategies as st

from tahq.comm.control.messages import Commit, Evaluated, Heartbeat, Join, Ready
from tahq.coordinator import recovery, run_state, seats
from tahq.coordinator.context import CoordinatorOptions
from tahq.coordinator.run_state import RunEvent, RunPhase, RunState
from tahq.coordinator.seats import RestorePoint, SeatEvent, SeatPhase, Seats
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError, UserError
from tahq.pipeline.config import TrainingConfig

STEPS = (RunEvent.ALL_GREETED, RunEvent.ALL_READY, RunEvent.LAST_COMMIT, RunEvent.NOTHING_OWED)
MEASURING_STEPS = (RunEvent.ALL_THERE, RunEvent.ALL_MEASURED)


def options(num_stages=3, **changes):
    values = {"config_json": "{}", "config_hash": CONFIG_HASH, "version": VERSION, "training": TrainingConfig(steps=4)}
    limits = {"give_up_s": 40.0, "join_timeout_s": 100.0}
    return CoordinatorOptions(num_stages, 7, None, **(values | limits | changes))


def join_of(stage, **changes):
    return Join(stage, VERSION, **({"host": f"host{stage}", "pid": 5} | changes))


def run_in(phase):
    run = RunState(RestorePoint(0), 0.0)
    for event in MEASURING_STEPS if phase is RunPhase.MEASURING else STEPS:
        if run.phase is not phase:
            run.advance(event, 1.0)
    return run


def happen(table, event, stage, identity, now_s):
    match event:
        case SeatEvent.JOIN:
            table.join(stage, identity, join_of(stage), now_s)
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


# -- seats -----------------------------------------------------------------------------------------


def test_impossible_transition_is_the_workers_fault_or_ours(ready):
    with pytest.raises(RemoteProtocolError, match=r"stage 1 \(host1, pid 5\) said .* while it was ready"):
        ready.advance(1, SeatEvent.HELLO, 9.0)
    with pytest.raises(LocalProtocolError, match="PLAN"):
        ready.advance(1, SeatEvent.PLAN, 9.0)
    assert ready[1].phase is SeatPhase.READY


EVENTS = st.lists(
    st.tuples(st.sampled_from([*SeatEvent, "wait"]), st.integers(0, 2), st.integers(0, 4), st.floats(0, 30)),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
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
            recovery.check_deadlines(start, run, table, math.nextafter(max(filter(None, by_s)), math.inf), "x:1")


def test_neighbour_that_never_makes_its_links_ready_has_a_deadline(ready):
    run = run_in(RunPhase.TRAINING)
    assert recovery.deadline_s(options(), run, ready, ready[1]) is None
    ready[1].relinking_since_s = 5.0
    assert recovery.deadline_s(options(), run, ready, ready[1]) == 105.0


# -- the run ---------------------------------------------------------------------------------------


def test_impossible_transition_of_the_run_is_our_fault():
    with pytest.raises(LocalProtocolError, match="ALL_READY"):
        RunState(RestorePoint(0), 0.0).advance(RunEvent.ALL_READY, 2.0)


@pytest.mark.parametrize("phase", list(RunPhase))
@pytest.mark.parametrize("message", [Ready(0), Evaluated(0, 1, 1.0, 1.0), Heartbeat()])
def test_messages_are_taken_in_their_phases_only(phase, message):
    run = run_in(phase)
    if phase in run_state.WHEN.get(type(message), frozenset(RunPhase)):
        run.check(message, "stage 0")
    else:
        with pytest.raises(RemoteProtocolError, match=f"stage 0 sent {type(message).__name__} while .* {phase.value}"):
            run.check(message, "stage 0")


@pytest.fixture
def at_step_6():
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
    return run, table


def test_decisions_are_kept_since_the_base_and_stages_begin_there_or_at_the_newest_checkpoint(at_step_6):
    run, _ = at_step_6
    assert (run.step, run.base.step, run.newest.step) == (6, 2, 4)
    assert [run.origin_at(step).codecs for step in (4, 2)] == [[[0, 0, 3]], [[0, 0, 1]]]
    assert run.origin_at(3) is None
    assert min(run.decided) == 2
    run.rebase(run.newest)
    assert (run.step, min(run.decided)) == (6, 4)


def test_base_stays_while_a_stage_is_before_the_new_one_and_all_go_back_together(at_step_6):
    run, table = at_step_6
    for position, point in ((6, 4), (2, 2), (4, 4)):
        table[1].position = position
        assert recovery.common_point(run, table).step == point
        assert recovery.can_rebase(run, table, run.newest) == (point == 4)
