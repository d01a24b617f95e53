"""Who holds which stage: pure, with identities and times as arguments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.control.messages import Heartbeat, Join, Ready, Refuse
from tahq.coordinator.membership import Member, Membership, Standing, stage_list
from tahq.errors import RemoteProtocolError


@pytest.fixture
def membership():
    return Membership(3, "0.1.0", "c0ffee")


def join(membership, identity, stage=-1, now_s=0.0):
    return membership.join(identity, Join(stage, "0.1.0", f"host-{identity.decode()}", 5), now_s)


def test_free_stages_are_given_in_order(membership):
    assert [join(membership, name).stage for name in (b"a", b"b", b"c")] == [0, 1, 2]
    assert membership.missing == ()


def test_worker_that_takes_any_stage_gets_the_lowest_free_one(membership):
    join(membership, b"a", stage=0)
    assert join(membership, b"b").stage == 1


def test_duplicate_is_refused_with_the_holder_and_what_is_free(membership):
    join(membership, b"a", stage=1)
    refusal = join(membership, b"b", stage=1)
    assert isinstance(refusal, Refuse)
    assert "stage 1 (host-a, pid 5)" in refusal.reason
    assert "still free: 0, 2" in refusal.reason


def test_joining_again_changes_nothing(membership):
    assert join(membership, b"a", stage=1) == join(membership, b"a", stage=1)
    assert membership.missing == (0, 2)


def test_one_worker_cannot_hold_two_stages(membership):
    join(membership, b"a", stage=1)
    with pytest.raises(RemoteProtocolError, match="spoke for stage 2"):
        membership.claim(b"a", 2)


@pytest.mark.parametrize("stage", [-2, 3, 10**9])
def test_stage_out_of_range_is_refused(membership, stage):
    assert "stages 0 to 2" in join(membership, b"a", stage=stage).reason


def test_listed_hosts_replace_what_workers_call_themselves():
    membership = Membership(2, "0.1.0", "c0ffee", ["left", "right"])
    assert join(membership, b"a", stage=1).name == "stage 1 (right, pid 5)"


def test_standing_follows_the_table(membership, hello):
    join(membership, b"a", stage=0)
    assert membership.lacking(Standing.GREETED) == (0, 1, 2)
    assert membership.greet(b"a", hello(0)) is None
    assert membership.lacking(Standing.GREETED) == (1, 2)
    membership.planned(0)
    assert membership.lacking(Standing.PLANNED) == (1, 2)
    membership.ready(b"a", Ready(0))
    assert membership.lacking(Standing.READY) == (1, 2)


def test_worker_that_follows_another_takes_its_place_and_others_do_not(membership):
    membership.join(b"old", Join(1, "0.1.0", "host", 5, worker_id="w"), 0.0)
    assert membership.replaced_by(b"new", Join(1, "0.1.0", "host", 6)) is None
    assert membership.replaced_by(b"new", Join(1, "0.1.0", "host", 6, worker_id="other")) is None
    assert membership.replaced_by(b"new", Join(1, "0.2.0", "host", 6, worker_id="w")) is None
    assert membership.replaced_by(b"old", Join(1, "0.1.0", "host", 5, worker_id="w")) is None
    assert membership.replaced_by(b"new", Join(1, "0.1.0", "host", 6, worker_id="w")).identity == b"old"
    assert membership.replaced_by(b"new", Join(1, "0.1.0", "host", 6, takeover=True)).identity == b"old"


def test_ready_before_hello_is_a_protocol_error_that_names_the_worker(membership):
    join(membership, b"a", stage=0)
    with pytest.raises(RemoteProtocolError, match=r"stage 0 \(host-a, pid 5\) said Ready while it was building"):
        membership.ready(b"a", Ready(0))


def test_second_hello_is_a_protocol_error(membership, hello):
    join(membership, b"a", stage=0)
    membership.greet(b"a", hello(0))
    with pytest.raises(RemoteProtocolError, match="said Hello while it was waiting"):
        membership.greet(b"a", hello(0))


def test_stranger_is_a_protocol_error(membership, hello):
    with pytest.raises(RemoteProtocolError, match="holds no stage"):
        membership.greet(b"nobody", hello(0))


@pytest.mark.parametrize(
    ("field", "first", "second"),
    [("tokenizer_hash", "t1", "t2"), ("data_hash", "d1", "d2"), ("num_train_samples", 10, 11)],
)
def test_what_stages_must_share_is_compared_between_those_that_have_it(membership, hello, field, first, second):
    for stage, name in enumerate((b"a", b"b", b"c")):
        join(membership, name, stage=stage)
    assert membership.greet(b"a", hello(0, **{field: first})) is None
    assert membership.greet(b"b", hello(1)) is None
    refusal = membership.greet(b"c", hello(2, **{field: second}))
    assert refusal.differences == [[field, str(second), f"{first} (stage 0 (host-a, pid 5))"]]
    assert membership.missing == (2,)


def test_refused_worker_leaves_its_stage_to_another(membership, hello):
    join(membership, b"a", stage=0)
    assert isinstance(membership.greet(b"a", hello(0, config_hash="bad")), Refuse)
    assert isinstance(join(membership, b"b", stage=0), Member)


def test_silence_is_measured_from_the_last_sign_of_life(membership):
    join(membership, b"a", stage=0, now_s=0.0)
    join(membership, b"b", stage=1, now_s=0.0)
    membership.seen(b"a", 8.0)
    assert [member.stage for member in membership.silent(5.0)] == [1]


def test_heartbeats_say_what_a_member_does_and_nothing_of_strangers(membership):
    join(membership, b"a", stage=0)
    assert membership.doing(b"a", Heartbeat(0, 4, "B2")).activity == "B2"
    assert membership.doing(b"x", Heartbeat(0, 4, "B2")) is None


@pytest.mark.parametrize(("stages", "text"), [([2], "stage 2"), ([1, 3], "stages 1, 3")])
def test_stage_list_reads_well(stages, text):
    assert stage_list(stages) == text


EVENTS = st.one_of(
    st.tuples(st.just("join"), st.integers(0, 4), st.integers(-1, 3)),
    st.tuples(st.just("leave"), st.integers(0, 2), st.just(0)),
)


@given(st.lists(EVENTS, max_size=30))
def test_a_stage_has_one_holder_and_a_holder_one_stage_whatever_happens(events):
    membership = Membership(3, "0.1.0", "c0ffee")
    for kind, who, stage in events:
        if kind == "join":
            join(membership, f"w{who}".encode(), stage)
        else:
            membership.leave(who)
        identities = [member.identity for member in membership.members]
        assert len(set(identities)) == len(identities)
        stages = [member.stage for member in membership.members]
        assert sorted([*stages, *membership.missing]) == [0, 1, 2]
