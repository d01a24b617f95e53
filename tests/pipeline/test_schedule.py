import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schedules import check, schedule

from tahq.errors import ScheduleError
from tahq.pipeline.schedule.generators import GENERATORS, generate
from tahq.pipeline.schedule.schedule import Action, ActionKind


def test_action_is_in_torch_notation():
    assert str(Action(2, ActionKind.F, 0)) == "2F0"


def test_in_flight_lasts_until_the_weight_gradient():
    # I does not free what W still needs: two activations are held during 0F1
    assert schedule("0F0 0I0 0F1 0I1 0W0 0W1").max_in_flight(0) == 2
    assert schedule("0F0 0I0 0W0 0F1 0I1 0W1").max_in_flight(0) == 1


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0F1 0B0",
        "0F0 0I0",
        "0F0 0F0 0B0",
        "0F0 0B0\n0F0 1F0 1B0",
        "0F0 0F1 0B1 0B0",
        "0F0 0F1 0I0 0I1 0W1 0W0",
        "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1",
    ],
)
def test_check_of_schedules_finds_what_is_wrong(text):
    with pytest.raises(AssertionError):
        check(schedule(text))


# -- generated schedules -----------------------------------------------------------------------------

CHUNKS = dict.fromkeys(GENERATORS, 1) | {"interleaved": 2}
SIZES = [
    (name, stages, count)
    for name, stages, count in itertools.product(GENERATORS, (1, 2, 3, 8), (1, 2, 5, 16))
    if CHUNKS[name] == 1 or stages > 1
]


@pytest.mark.parametrize(("name", "num_stages", "num_micro_batches"), SIZES)
def test_generated_schedule_is_valid_and_prints_all_of_itself(name, num_stages, num_micro_batches):
    made = generate(name, num_stages, num_micro_batches, chunks_per_stage=CHUNKS[name])
    check(made)
    assert schedule(str(made), name) == made


@pytest.mark.parametrize(("name", "num_stages", "num_micro_batches"), [size for size in SIZES if size[1] > 1])
def test_chunks_without_a_backward_hold_nothing_and_the_others_no_more_than_before(name, num_stages, num_micro_batches):
    chunks = CHUNKS[name]
    whole = generate(name, num_stages, num_micro_batches, chunks_per_stage=chunks)
    for num_frozen in range(1, num_stages * chunks):
        made = generate(name, num_stages, num_micro_batches, chunks_per_stage=chunks, num_frozen=num_frozen)
        check(made)
        assert not any(
            made.max_in_flight(stage) for stage in range(num_stages) if stage + num_stages * (chunks - 1) < num_frozen
        )
        assert all(made.max_in_flight(stage) <= whole.max_in_flight(stage) for stage in range(num_stages))


def test_stages_behind_frozen_ones_are_a_pipeline_of_their_own():
    assert str(generate("zero-bubble", 3, 3, depths=[1, 2, 2], num_frozen=1)) == (
        "0F0 0F1 0F2\n1F0 1F1 1I0 1W0 1F2 1I1 1W1 1I2 1W2\n2F0 2I0 2F1 2I1 2W0 2F2 2I2 2W1 2W2"
    )


def test_gpipe_is_all_forwards_then_all_backwards():
    assert str(generate("gpipe", 2, 3)) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"


def test_one_f_one_b_warms_up_less_towards_the_end():
    assert str(generate("1f1b", 3, 4)) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), list(itertools.product((1, 2, 4, 8), (1, 2, 4, 5, 16))))
def test_in_flight_is_m_under_gpipe_and_stages_left_under_1f1b(num_stages, num_micro_batches):
    gpipe = generate("gpipe", num_stages, num_micro_batches)
    one_f_one_b = generate("1f1b", num_stages, num_micro_batches)
    for stage in range(num_stages):
        assert gpipe.max_in_flight(stage) == num_micro_batches
        assert one_f_one_b.max_in_flight(stage) == min(num_micro_batches, num_stages - stage)


def test_zero_bubble_fills_the_wait_for_gradients_with_weight_gradients():
    """Qi et al. 2023, Fig. 3: stage r's weight gradients lag behind by r."""
    assert str(generate("zero-bubble", 3, 4)) == (
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3\n"
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3\n"
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"
    )


def test_interleaved_goes_through_the_chunks_in_groups_of_stages():
    """Narayanan et al. 2021, Fig. 4 (bottom), for 2 stages of 2 chunks; after the warm-up a forward follows each B."""
    assert str(generate("interleaved", 2, 4, chunks_per_stage=2)) == (
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n"
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    )


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_a_deeper_stage_computes_more_forwards_before_its_first_backward(name):
    rows = generate(name, 4, 16, depths=[9, 9, 9, 9]).actions
    warm_ups = [sum(action.kind is ActionKind.F for action in row[: _first_backward(row)]) for row in rows]
    assert warm_ups == ([9] * 4 if name == "1f1b" else [9, 8, 7, 6])


def _first_backward(row):
    return next(at for at, action in enumerate(row) if action.kind is not ActionKind.F)


@st.composite
def requests(draw):
    name = draw(st.sampled_from(["1f1b", "zero-bubble", "interleaved"]))
    chunks = draw(st.integers(2, 4)) if name == "interleaved" else 1
    stages = draw(st.integers(2 if chunks > 1 else 1, 8))
    depths = draw(st.lists(st.integers(chunks, 3 * chunks * stages), min_size=stages, max_size=stages))
    return name, stages, draw(st.integers(1, 20)), depths, chunks


@given(requests())
@settings(max_examples=100, deadline=None)
def test_any_depths_give_a_schedule_that_finishes_and_stays_within_them(request):
    name, stages, count, depths, chunks = request
    made = generate(name, stages, count, depths=depths, chunks_per_stage=chunks)
    check(made)
    assert all(made.max_in_flight(stage) <= depth for stage, depth in enumerate(depths))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("1f1b", {"depths": [2]}, "got 1 in-flight depths for 2 stages"),
        ("1f1b", {"depths": [2, 0]}, "depth of 0 is too small"),
        ("interleaved", {"depths": [1, 4], "chunks_per_stage": 2}, "needs 2"),
        ("gpipe", {"depths": [3, 3]}, "gpipe holds all 4 micro-batches of a step, more than"),
        ("1f1b", {"chunks_per_stage": 2}, "interleaved needs 2 or more, all others have 1"),
        ("interleaved", {}, "interleaved needs 2 or more"),
        ("interleaved", {"chunks_per_stage": 2, "num_stages": 1}, "at least 2 stages"),
        ("zigzag", {}, "known: gpipe, 1f1b"),
        ("gpipe", {"num_micro_batches": 0}, "got 2 and 0"),
    ],
)
def test_generate_refuses_what_does_not_go_with_the_schedule(name, options, message):
    with pytest.raises(ScheduleError, match=message):
        generate(**{"name": name, "num_stages": 2, "num_micro_batches": 4} | options)
