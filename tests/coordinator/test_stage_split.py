"""A stage's step in parts that add up to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.coordinator.observer import StageSplit
from tahq.coordinator.step_report import stage_split

ACTIVITIES = (
    "data", "forward", "backward", "input_gradient", "weight_gradient", "encode", "decode", "wait:0", "wait:12",
    "wait:codec", "wait:memory", "norms", "optimizer", "snapshot",
)  # fmt: skip
SECONDS = st.floats(0, 100)


@given(
    st.dictionaries(st.sampled_from(ACTIVITIES), SECONDS),
    st.dictionaries(st.sampled_from(["beside:encode", "beside:decode"]), SECONDS),
    SECONDS,
    SECONDS,
)
def test_parts_add_up_to_the_step(own, beside, unmeasured_s, commit_s):
    active_s = sum(own.values()) + unmeasured_s
    split = stage_split(own | beside, active_s, active_s + commit_s)
    assert split.total_s == pytest.approx(active_s + commit_s)
    assert split.other_s == pytest.approx(unmeasured_s, abs=1e-9)


def test_both_gradients_are_the_backward_and_waits_are_by_sender():
    timing = {"input_gradient": 1.0, "weight_gradient": 2.0, "wait:3": 4.0, "wait:memory": 8.0, "wait:codec": 16.0}
    split = stage_split(timing, 31.0, 32.0)
    assert (split.backward_s, split.wait_s, split.wait_memory_s, split.wait_codec_s) == (3.0, {3: 4.0}, 8.0, 16.0)
    assert (split.commit_s, split.other_s) == (1.0, 0.0)


def test_work_beside_takes_no_time_of_the_step():
    split = stage_split({"forward": 1.0, "beside:encode": 5.0, "encode": 0.5}, 1.5, 1.5)
    assert (split.encode_s, split.codec_s, split.total_s) == (0.5, 5.5, 1.5)


def test_device_that_overlaps_with_the_host_leaves_nothing_negative():
    assert stage_split({"forward": 3.0, "wait:1": 2.0}, 4.0, 3.5) == StageSplit(forward_s=3.0, wait_s={1: 2.0})
