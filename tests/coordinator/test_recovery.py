"""Where stages begin again, and what is kept for them."""

import pytest
from coordinator.conftest import make_prepare

from tahq.comm.control.messages import Commit
from tahq.comm.topology import link_ends
from tahq.coordinator.recovery import Recovery, RestorePoint


def decide(recovery, step, *, snapshot=False):
    prepares = [make_prepare(step, stage) for stage in range(3)]
    for prepare in prepares:
        recovery.prepared(prepare)
    recovery.decided(Commit(step, True, 1.0, False, snapshot, False), prepares, [[0, 0, step]])


@pytest.fixture
def recovery():
    """At step 6, with snapshots after 2 and 4 steps; that after 2 is copied."""
    recovery = Recovery(RestorePoint(0), link_ends(3, False, 1), 3, 1)
    for step in range(6):
        decide(recovery, step, snapshot=step in (1, 3))
        if step in (2, 4):
            recovery.published(step, f"step-{step}", {"a": "b"}, {})
            if step == 2:
                assert recovery.rebase(recovery.point)
    return recovery


def test_decisions_are_kept_since_the_base(recovery):
    assert recovery.step == 6
    assert (recovery.base.step, recovery.point.step) == (2, 4)
    assert recovery.answer(make_prepare(2, 1)) is not None
    assert recovery.answer(make_prepare(1, 1)) is None
    assert recovery.rebase(recovery.point)
    assert recovery.step == 6
    assert recovery.answer(make_prepare(3, 1)) is None


def test_lost_stage_begins_where_it_says_with_the_codecs_of_then(recovery):
    recovery.lose(1)
    assert not recovery.begins(1, 3)
    assert recovery.begins(1, 4)
    assert (recovery.position(1), recovery.origin(1).codecs) == (4, [[0, 0, 3]])
    assert recovery.begins(1, 2)
    assert (recovery.position(1), recovery.origin(1).codecs) == (2, [[0, 0, 1]])


def test_base_stays_while_a_stage_is_before_the_new_one(recovery):
    recovery.lose(1)
    assert not recovery.rebase(recovery.point)
    recovery.begins(1, 2)
    for step in (2, 3):
        assert not recovery.rebase(recovery.point)
        recovery.prepared(make_prepare(step, 1))
    assert recovery.rebase(recovery.point)


def test_all_go_back_to_the_newest_snapshot_unless_one_does_not_have_it(recovery):
    recovery.roll_back()
    assert recovery.point.step == 4
    recovery.lose(1)
    recovery.begins(1, 2)
    recovery.roll_back()
    assert recovery.point.step == recovery.base.step == 2
