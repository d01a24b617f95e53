"""Which peers a coordinator remembers: strangers cannot make it forget a member, or remember without end."""

import pytest

from tahq.comm.control.client import ControlClient
from tahq.comm.control.messages import Assign, Join, Ready, Refuse
from tahq.comm.control.server import ControlServer, Place, Places
from tahq.comm.link.shaping import Shaping

ASSIGN = Assign(1, 7, "{}", "c0ffee", "", {}, 0)
MAX_STRANGERS = 3
NUM_STRANGERS = 12


def name(number):
    return f"peer {number}".encode()


@pytest.fixture
def places():
    return Places(MAX_STRANGERS)


def give(places, *numbers):
    for number in numbers:
        places.give(name(number), Place(None))


def kept(places):
    return [number for number in range(NUM_STRANGERS) if places.find(name(number)) is not None]


def test_stranger_that_was_silent_longest_makes_room(places):
    give(places, 0, 1, 2)
    places.heard(name(0))
    give(places, 3)
    assert kept(places) == [0, 2, 3]


def test_member_stays_however_many_strangers_come(places):
    give(places, 0)
    member = places.find(name(0))
    places.told(name(0), ASSIGN)
    give(places, *range(1, NUM_STRANGERS))
    assert places.find(name(0)) is member
    assert len(places) == 1 + MAX_STRANGERS


def test_refusal_ends_membership(places):
    give(places, 0, 1)
    places.told(name(1), ASSIGN)
    give(places, 2, 3, 4)
    assert kept(places) == [1, 2, 3, 4]
    places.told(name(1), Refuse("no stage"))
    give(places, 5, 6, 7)
    assert kept(places) == [5, 6, 7]


def test_unknown_peer_is_not_remembered_for_what_it_is_told(places):
    places.told(name(0), ASSIGN)
    assert len(places) == 0


def test_member_is_heard_and_newcomers_find_a_place_however_many_strangers_come():
    server = ControlServer("127.0.0.1:0", heartbeat_s=0.2, max_strangers=MAX_STRANGERS)
    clients = []

    def connect(stage):
        clients.append(
            ControlClient(server.address, f"stage {stage}", shaping=Shaping(), peer_timeout_s=5.0, heartbeat_s=0.2)
        )
        clients[-1].send(Join(stage, "0.1", "host", 1))
        return clients[-1]

    def heard(kind, stage):
        for _ in range(200):
            for who, message in server.poll(0.05):
                if isinstance(message, kind) and message.stage == stage:
                    return who
        raise AssertionError(f"no {kind.__name__} of {stage}")

    try:
        member = connect(0)
        server.send(heard(Join, 0), ASSIGN)
        for stage in range(1, NUM_STRANGERS):
            connect(stage)
            heard(Join, stage)
        assert len(server._places) <= 1 + MAX_STRANGERS
        member.send(Ready(0))
        heard(Ready, 0)
    finally:
        for client in clients:
            client.close(linger_s=0.0)
        server.close(linger_s=0.0)
