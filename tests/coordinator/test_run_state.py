"""The life of a run as two tables."""

import itertools

import pytest

from tahq.comm.control.messages import Evaluated, Heartbeat, Ready
from tahq.coordinator.run_state import TRANSITIONS, WHEN, Ending, Event, Phase, RunState
from tahq.errors import LocalProtocolError, RemoteProtocolError

WAY = (Event.ALL_GREETED, Event.ALL_READY, Event.LAST_COMMIT, Event.NOTHING_OWED)
WAY_OF_MEASURING = (Event.ALL_THERE, Event.ALL_MEASURED)


def state_in(phase):
    state = RunState(0.0)
    for event in WAY_OF_MEASURING if phase is Phase.MEASURING else WAY:
        if state.phase is not phase:
            state.advance(event, 1.0)
    return state


def test_way_leads_through_all_phases():
    state = RunState(0.0)
    way = [state.phase, *(state.advance(event, 1.0) for event in WAY)]
    assert way == [phase for phase in Phase if phase is not Phase.MEASURING]


def test_way_of_measuring_has_no_steps():
    state = RunState(0.0)
    way = [state.phase, *(state.advance(event, 1.0) for event in WAY_OF_MEASURING)]
    assert way == [Phase.JOINING, Phase.MEASURING, Phase.OVER]


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)))
def test_only_what_the_table_has_can_happen(phase, event):
    state = state_in(phase)
    if (phase, event) in TRANSITIONS:
        assert state.advance(event, 2.0) is TRANSITIONS[phase, event]
        assert state.phase_since_s == 2.0
    else:
        with pytest.raises(LocalProtocolError, match=event.name):
            state.advance(event, 2.0)


def test_every_phase_but_the_last_can_end():
    assert {phase for phase, event in TRANSITIONS if event is Event.ENDED} == set(Phase) - {Phase.OVER}


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("message", [Ready(0), Evaluated(0, 1, 1.0, 1.0)])
def test_messages_come_in_their_phases(phase, message):
    state = state_in(phase)
    if phase in WHEN[type(message)]:
        state.check(message, "stage 0")
    else:
        with pytest.raises(RemoteProtocolError, match=f"stage 0 sent {type(message).__name__} while .* {phase.value}"):
            state.check(message, "stage 0")


@pytest.mark.parametrize("phase", list(Phase))
def test_heartbeats_may_always_come(phase):
    state_in(phase).check(Heartbeat(), "stage 0")
    assert Heartbeat not in WHEN


def test_first_stop_request_counts():
    state = state_in(Phase.TRAINING)
    assert state.request_stop(15)
    assert state.request_stop(2)
    assert state.stop_signal == 15


@pytest.mark.parametrize("phase", [Phase.JOINING, Phase.CONNECTING, Phase.MEASURING])
def test_before_the_first_step_there_is_no_order_to_stop_in(phase):
    assert not state_in(phase).request_stop(2)


def test_exits_are_known_from_their_time_on_and_the_first_counts():
    state = RunState(0.0)
    state.note_exit(1, -9, 5.0)
    state.note_exit(1, 0, 6.0)
    assert state.exits(4.9) == {}
    assert state.exits(5.0) == {1: -9}


def test_ending_is_known_once_the_run_is_over():
    state = RunState(0.0)
    with pytest.raises(LocalProtocolError, match="joining"):
        _ = state.ending
    state.end(Event.ENDED, Ending(3, "lost"), 1.0)
    assert state.ending == Ending(3, "lost")


@pytest.mark.parametrize(
    ("last_snapshot", "command", "text"),
    [
        (None, "x", "no snapshot had been written, so start the run anew"),
        (7, "x --resume", "the run can be resumed with `x --resume` (snapshot after step 7)"),
        (7, "", "the run can be resumed (snapshot after step 7)"),
    ],
)
def test_resume_hint(last_snapshot, command, text):
    assert RunState(0.0, last_snapshot).resumable(command) == text
