"""Who is told to keep a copy of what, and when a checkpoint counts as copied: no socket, no file."""

import pytest
from coordinator.conftest import make_hello
from coordinator.test_seats import options
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.control.messages import Copied, Join
from tahq.coordinator import copies
from tahq.coordinator.run_state import RunState
from tahq.coordinator.seats import RestorePoint, SeatEvent, Seats


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
        self.seats.advance(stage, SeatEvent.HELLO, 0.0).hello = make_hello(stage, files_address=address)

    def publish(self, step):
        files = {f"stage-{seat.stage:03d}-{step}.safetensors": f"{step}{seat.stage}" for seat in self.seats}
        self.run.newest = RestorePoint(step, f"snapshots/step-{step:08d}", files)
        copies.published(self.run, self.seats)

    def due(self):
        return copies.due(self.options, self.run, self.seats)

    def carry_out(self, *, and_settle=False):
        """Every holder does as it is told; returns (holder's stage, copied stage) of each order."""
        told = []
        for identity, order in self.due():
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


def test_each_stage_is_copied_to_the_next_one_and_the_last_to_the_one_before():
    world = World()
    assert [(who, order.stage, order.file, order.address) for who, order in world.due()] == [
        (b"worker-1-0", 0, "stage-000-5.safetensors", "10.0.0.0:7000"),
        (b"worker-2-0", 1, "stage-001-5.safetensors", "10.0.0.1:7000"),
        (b"worker-1-0", 2, "stage-002-5.safetensors", "10.0.0.2:7000"),
    ]
    assert world.due() == []


def test_neighbours_of_one_host_are_skipped_unless_copies_within_it_are_configured():
    assert World("aabb").carry_out() == [(2, 0), (2, 1), (1, 2), (1, 3)]
    assert World("aaa", copies_within_host=True).carry_out() == [(1, 0), (2, 1), (1, 2)]


@pytest.mark.parametrize(("hosts", "num_copies"), [("aaa", 1), ("abc", 0)])
def test_nothing_is_copied_within_one_host_or_if_no_copies_are_configured(hosts, num_copies):
    world = World(hosts, copies=num_copies)
    assert world.due() == []
    assert world.is_complete


def test_newer_checkpoint_waits_until_the_one_before_is_copied():
    world = World()
    orders = world.due()
    world.publish(10)
    world.publish(15)
    assert world.run.copying.step == 5
    for who, order in orders:
        holder = world.seats.find(who)
        copies.copied(world.seats[order.stage], holder, Copied(5, order.stage, holder.stage))
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


def test_sources_are_holders_that_are_there():
    world = World()
    world.carry_out(and_settle=True)
    assert copies.sources(world.seats, 0) == [(5, world.seats[1], "10.0.0.1:7000")]
    world.leave(0)
    assert world.lacks(0) == ""
    world.leave(1)
    assert world.lacks(0) == "stage-000-5.safetensors"


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
