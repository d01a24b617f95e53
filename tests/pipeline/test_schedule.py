import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.errors import ScheduleError
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import Action, ActionKind, Schedule, validate

ACTIONS = st.builds(Action, st.integers(0, 999), st.sampled_from(ActionKind), st.integers(0, 9999))


@given(ACTIONS)
def test_action_parses_what_it_prints(action):
    assert Action.parse(str(action)) == action


def test_action_is_in_torch_notation():
    assert str(Action(2, ActionKind.F, 0)) == "2F0"
    assert Action.parse("12W34") == Action(12, ActionKind.W, 34)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 ", "2F0.5", "2BW0"])
def test_action_refuses_other_text(text):
    with pytest.raises(ScheduleError, match="not an action"):
        Action.parse(text)


@given(st.text())
def test_action_parse_raises_nothing_else(text):
    with contextlib.suppress(ScheduleError):  # the only error that text may cause
        assert Action.parse(text).micro_batch >= 0


def test_in_flight_lasts_until_the_weight_gradient():
    # I does not free what W still needs: two activations are held during 0F1
    assert Schedule.parse("0F0 0I0 0F1 0I1 0W0 0W1").max_in_flight(0) == 2
    assert Schedule.parse("0F0 0I0 0W0 0F1 0I1 0W1").max_in_flight(0) == 1


VALID = {
    "split backward": "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1B0 1F1 1B1",
    "two chunks a stage": "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    "weight gradients last": "0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1I0 1F1 1I1 1W0 1W1",
}


@pytest.mark.parametrize("text", VALID.values(), ids=VALID)
def test_validator_accepts(text):
    validate(Schedule.parse(text))


INVALID = {
    "backward missing": ("0F0 0F1 0B0", "chunk 0 computes F of micro-batch 1, expected F B or F I W", ">0F1<"),
    "weight gradient missing": ("0F0 0I0", "computes F I of micro-batch 0", ">0I0<"),
    "split and whole backward": ("0F0 0B0 0I0 0W0", "computes F B I W of micro-batch 0", ">0W0<"),
    "micro-batch missing": ("0F1 0B1", "computes nothing of micro-batch 0", ""),
    "twice": ("0F0 0F0 0B0", "0F0 appears 2 times, expected once", ">0F0<"),
    "on two stages": ("0F0 0B0\n0F0 1F0 1B0", "0F0 is on stage 1, but stage 0 holds its chunk", ">0F0<"),
    "descending": ("0F0 0F1 0B1 0B0", "0B0 comes after 0B1: weight gradients must be added in ascending", ">0B0<"),
    "weights descending": ("0F0 0F1 0I0 0I1 0W1 0W0", "0W0 comes after 0W1", ">0W0<"),
    "backward first": ("0B0 0F0", "deadlock: stage 0 waits at 0B0 for 0F0", ">0B0<"),
    "weight before input": ("0F0 0W0 0I0", "deadlock: stage 0 waits at 0W0 for 0I0", ">0W0<"),
    "crossed": (
        "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1",
        "deadlock: stage 0 waits at 0B0 for 1B0; stage 1 waits at 1F1 for 0F1",
        ">1F1<",
    ),
}


@pytest.mark.parametrize(("text", "message", "mark"), INVALID.values(), ids=INVALID)
def test_validator_says_what_is_wrong_and_marks_it_in_the_grid(text, message, mark):
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule.parse(text))
    first, *grid = str(caught.value).splitlines()
    assert message in first
    assert len(grid) == len(text.splitlines())
    assert all(line.startswith(f"stage {stage}") for stage, line in enumerate(grid))
    assert mark in "\n".join(grid)


def test_validator_refuses_what_is_out_of_range():
    row = (Action(0, ActionKind.F, 0), Action(0, ActionKind.B, 0), Action(0, ActionKind.F, 5))
    with pytest.raises(ScheduleError, match="0F5 is out of range: there are 1 chunks and 1 micro-batches"):
        validate(Schedule("hand-made", 1, (row,), (0,)))


def test_parse_refuses_gaps_between_chunks():
    with pytest.raises(ScheduleError, match=r"without gaps; got \[0, 2\]"):
        Schedule.parse("0F0 0B0\n2F0 2B0")


@given(st.randoms(use_true_random=False), st.sampled_from([(2, 2), (2, 3), (3, 3)]))
def test_validator_decides_every_order_of_the_right_actions(random, sizes):
    """A shuffled schedule is either refused, or the plain event loop below finishes it."""
    rows = [list(row) for row in generate("1f1b", *sizes).actions]
    for row in rows:
        first, second = random.sample(range(len(row)), 2)
        row[first], row[second] = row[second], row[first]
    schedule = Schedule("shuffled", sizes[1], tuple(map(tuple, rows)), tuple(range(sizes[0])))
    try:
        validate(schedule)
        accepted = True
    except ScheduleError:
        accepted = False
    assert accepted == (_finishes(rows) and _backwards_ascend(rows))


def _backwards_ascend(rows):
    backwards = [[action.micro_batch for action in row if action.kind is ActionKind.B] for row in rows]
    return all(row == sorted(row) for row in backwards)


def _finishes(rows):
    """F needs F of the stage before, B needs own F and B of the stage after; repeat until nothing moves."""
    queues, done, moved = [list(row) for row in rows], set(), True
    while moved:
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                action = queue[0]
                needs = [(stage - 1, "F")] if action.kind is ActionKind.F else [(stage, "F"), (stage + 1, "B")]
                if any(0 <= s < len(rows) and (s, kind, action.micro_batch) not in done for s, kind in needs):
                    break
                done.add((stage, str(action.kind), action.micro_batch))
                queue.pop(0)
                moved = True
    return not any(queues)
