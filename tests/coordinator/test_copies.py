"""Who is told to keep a copy of what, and when a snapshot counts as copied: no socket, no file."""

from dataclasses import replace

from coordinator.conftest import make_hello
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.control.messages import Copied, Join
from tahq.coordinator.copies import Copies
from tahq.coordinator.membership import Member
from tahq.coordinator.recovery import RestorePoint
from tahq.coordinator.spares import Spares

BEGINNING = RestorePoint(0)


def point(step, num_stages=3):
    return RestorePoint(
        step,
        f"snapshots/step-{step:08d}",
        {f"stage-{s:03d}-{step}.safetensors": f"{step}{s}" for s in range(num_stages)},
    )


def member(stage, host=None, *, serves=True, generation=0):
    hello = make_hello(stage, files_address=f"10.0.0.{stage}:7{generation:03d}" if serves else "")
    who = f"worker-{stage}-{generation}".encode()
    return Member(who, stage, f"host{stage}" if host is None else host, 100 + stage, 0.0, hello=hello)


def copies_of(num_stages=3, base=BEGINNING, **changes):
    return Copies(**({"is_on": True, "within_host": False, "num_stages": num_stages, "base": base} | changes))


def carry_out(copies, members):
    """Every holder does as it is told; returns (holder's stage, copied stage) of each order."""
    by_identity = {m.identity: m for m in members}
    told = []
    for identity, order in copies.orders(members):
        holder = by_identity[identity]
        copies.copied(holder, Copied(order.step, order.stage, holder.stage))
        told.append((holder.stage, order.stage))
    return told


def test_each_stage_is_copied_to_the_next_one_and_the_last_to_the_one_before():
    copies, members = copies_of(), [member(stage) for stage in range(3)]
    copies.published(point(5))
    assert not copies.is_complete(members)
    orders = copies.orders(members)
    assert [(who, order.stage, order.file, order.address) for who, order in orders] == [
        (b"worker-1-0", 0, "stage-000-5.safetensors", "10.0.0.0:7000"),
        (b"worker-2-0", 1, "stage-001-5.safetensors", "10.0.0.1:7000"),
        (b"worker-1-0", 2, "stage-002-5.safetensors", "10.0.0.2:7000"),
    ]
    assert copies.orders(members) == []
    for who, order in orders:
        holder = next(m for m in members if m.identity == who)
        assert not copies.is_complete(members)
        copies.copied(holder, Copied(5, order.stage, holder.stage))
    assert copies.is_complete(members)


def test_neighbours_of_one_host_are_passed_over():
    copies = copies_of(4)
    members = [member(stage, host) for stage, host in enumerate("aabb")]
    copies.published(point(5, 4))
    assert carry_out(copies, members) == [(2, 0), (2, 1), (1, 2), (1, 3)]


def test_stages_of_one_host_need_no_copies_unless_that_is_configured():
    members = [member(stage, "here") for stage in range(3)]
    copies = copies_of()
    copies.published(point(5))
    assert not copies.is_needed(members)
    assert copies.orders(members) == []
    assert copies.is_complete(members)
    assert copies_of(within_host=True).is_needed(members)


def test_without_copies_every_complete_snapshot_is_the_base():
    copies = copies_of(is_on=False)
    copies.published(point(5))
    assert copies.is_complete([])
    assert copies.orders([member(stage) for stage in range(3)]) == []


def test_stage_that_nobody_can_ask_is_not_waited_for():
    copies, members = copies_of(), [member(0, serves=False), member(1), member(2)]
    copies.published(point(5))
    assert carry_out(copies, members) == [(2, 1), (1, 2)]
    assert copies.is_complete(members)
    copies.based(point(5))
    assert copies.lacks(0, members) == "stage-000-5.safetensors"
    assert copies.uncopied(members) == members[:1]
    assert copies_of(is_on=False).uncopied(members) == []
    assert copies_of().uncopied([member(stage, "here", serves=False) for stage in range(3)]) == []


def test_newer_snapshot_waits_until_the_one_before_is_copied():
    copies, members = copies_of(), [member(stage) for stage in range(3)]
    copies.published(point(5))
    copies.orders(members)
    copies.published(point(10))
    copies.published(point(15))
    assert copies.target == point(5)
    copies.based(point(5))
    assert copies.target == point(15)
    assert {order.step for _, order in copies.orders(members)} == {15}


def test_holder_that_was_started_again_is_asked_again():
    copies, members = copies_of(), [member(stage) for stage in range(3)]
    copies.published(point(5))
    carry_out(copies, members)
    again = [*members[:1], member(1, generation=1), *members[2:]]
    assert not copies.is_complete(again)
    assert carry_out(copies, again) == [(1, 0), (2, 1), (1, 2)]
    assert copies.is_complete(again)


def test_copy_that_failed_is_tried_again_with_the_next_snapshot():
    copies, members = copies_of(), [member(stage) for stage in range(3)]
    copies.published(point(5))
    copies.orders(members)
    copies.copied(members[1], Copied(5, 0, 1, "the disk is full"))
    assert copies.orders(members) == []
    copies.published(point(10))
    assert sorted((order.step, order.stage) for _, order in copies.orders(members)) == [(10, 0), (10, 1), (10, 2)]


def test_sources_are_holders_that_are_there():
    copies, members = copies_of(), [member(stage) for stage in range(3)]
    copies.published(point(5))
    carry_out(copies, members)
    copies.based(point(5))
    assert copies.sources(0, members) == [(5, members[1], "10.0.0.1:7000")]
    assert copies.lacks(0, members[1:]) == ""
    assert copies.lacks(0, members[2:]) == "stage-000-5.safetensors"


def test_snapshot_whose_part_is_lost_is_passed_over():
    copies, members = copies_of(), [member(stage) for stage in range(3)]
    copies.published(point(5))
    carry_out(copies, members)
    copies.based(point(5))
    copies.published(point(10))
    copies.began(1, 5)  # on another host: what it had of step 10 is gone
    assert copies.target is None
    assert not copies.is_complete(members)
    copies.published(point(15))
    assert copies.target == point(15)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=8))
def test_all_that_can_be_copied_is_and_never_to_its_own_host(places):
    num_stages = len(places)
    members = [member(stage, host, serves=serves) for stage, (host, serves) in enumerate(places)]
    copies = copies_of(num_stages)
    copies.published(point(5, num_stages))
    told = carry_out(copies, members)
    assert copies.is_complete(members)
    assert all(members[holder].host != members[stage].host for holder, stage in told)
    hosts = {m.host for m in members if m.hello.files_address}
    protected = {stage for _, stage in told}
    assert protected == {m.stage for m in members if m.hello.files_address and hosts - {m.host}}
    copies.based(point(5, num_stages))
    for m in members:  # its host is gone, with all that was on it
        left = [other for other in members if other.host != m.host]
        assert bool(copies.lacks(m.stage, left)) == (m.stage not in protected)


def test_spares_go_in_the_order_in_which_they_came():
    spares = Spares()
    for number in range(3):
        spares.add(f"spare-{number}".encode(), Join(-1, "0", f"host{number}", 7, spare=True), float(number))
    assert str(spares) == "3 spares"
    spares.seen(b"spare-0", 9.0)
    assert [spare.name for spare in spares.silent(2.0)] == ["host1, pid 7"]
    assert spares.take().identity == b"spare-0"
    assert spares.remove(b"spare-1").join == replace(Join(-1, "0", "host1", 7), spare=True)
    assert str(spares) == "1 spare"
    assert spares.identities == (b"spare-2",)
