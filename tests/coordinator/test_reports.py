"""What stages owe after a commit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.control.messages import Commit, Evaluated, Snapshotted
from tahq.coordinator.reports import Reports
from tahq.errors import RemoteProtocolError


def commit(step, evaluate=False, snapshot=False):
    return Commit(step, True, 1.0, evaluate, snapshot, False)


def part(step, stage, error=""):
    return Snapshotted(step, stage, f"stage-{stage}", f"sha{stage}", 10 + stage, error)


def test_nothing_is_owed_at_first():
    reports = Reports(2)
    reports.owe(commit(0))
    assert reports.outstanding == ()


def test_validation_loss_is_a_mean_and_counts_steps_from_one():
    reports = Reports(2)
    reports.owe(commit(4, evaluate=True))
    assert reports.outstanding == ("the validation loss",)
    record = reports.evaluated(Evaluated(4, 10, 30.0, 20.0), "stage 1")
    assert (record.step, record.tokens, record.loss, record.loss_raw) == (5, 10, 3.0, 2.0)
    assert reports.outstanding == ()


@pytest.mark.parametrize("evaluated", [Evaluated(3, 10, 1.0, 1.0), Evaluated(4, 0, 1.0, 1.0)])
def test_evaluation_that_was_not_asked_for_names_the_sender(evaluated):
    reports = Reports(2)
    reports.owe(commit(4, evaluate=True))
    with pytest.raises(RemoteProtocolError, match="stage 1 evaluated"):
        reports.evaluated(evaluated, "stage 1")


def test_evaluation_comes_once():
    reports = Reports(2)
    reports.owe(commit(4, evaluate=True))
    reports.evaluated(Evaluated(4, 10, 1.0, 1.0), "stage 1")
    with pytest.raises(RemoteProtocolError, match="asked for was None"):
        reports.evaluated(Evaluated(4, 10, 1.0, 1.0), "stage 1")


@given(st.permutations([(2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2)]))
def test_snapshots_are_complete_with_their_last_part_whatever_the_order(order):
    reports = Reports(3)
    reports.owe(commit(1, snapshot=True))
    reports.owe(commit(3, snapshot=True))
    done = [parts for step, stage in order if (parts := reports.snapshotted(part(step, stage), "x")) is not None]
    assert sorted(parts.step for parts in done) == [2, 4]
    for parts in done:
        assert [p.stage for p in parts.parts] == [0, 1, 2]
        assert parts.nbytes == 33
        assert parts.error == ""
    assert reports.outstanding == ()


def test_one_failed_part_fails_the_snapshot():
    reports = Reports(2)
    reports.owe(commit(1, snapshot=True))
    assert reports.snapshotted(part(2, 0, "disk full"), "x") is None
    assert reports.snapshotted(part(2, 1), "x").error == "stage 0: disk full"


@pytest.mark.parametrize("wrong", [part(1, 0), part(2, 1)])
def test_part_that_was_not_asked_for_names_the_sender(wrong):
    reports = Reports(2)
    reports.owe(commit(1, snapshot=True))
    reports.snapshotted(part(2, 1), "stage 1")
    with pytest.raises(RemoteProtocolError, match="the sender reported a snapshot after step"):
        reports.snapshotted(wrong, "the sender")
