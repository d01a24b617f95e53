"""Whom a coordinator remembers, and that strangers cannot make it forget a member, or remember without end."""

import pytest
import zmq

from tahq.comm.control.channel import ControlServer
from tahq.comm.control.encoding import decode_message, encode_message
from tahq.comm.control.messages import Abort, Assign, Heartbeat, Join, Ready, Refuse
from tahq.comm.control.numbering import Numbering
from tahq.comm.control.places import Place, Places

ASSIGN = Assign(1, 7, "{}", "c0ffee", "", {}, 0)
MAX_STRANGERS = 3
NUM_STRANGERS = 40
OLD_COORDINATOR = 4711


def place():
    return Place(Numbering(), "")


def name(number):
    return f"who {number}".encode()


@pytest.fixture
def places():
    return Places(MAX_STRANGERS)


def give(places, *numbers):
    for number in numbers:
        places.give(name(number), place())


def numbers_of(places):
    return sorted(int(identity.split()[1]) for identity, _ in places)


def test_stranger_who_was_silent_for_longest_makes_room(places):
    give(places, 0, 1, 2)
    places.heard(name(0))
    give(places, 3)
    assert numbers_of(places) == [0, 2, 3]
    assert places.find(name(1)) is None


def test_member_stays_whatever_strangers_come(places):
    give(places, 0)
    member = places.find(name(0))
    places.told(name(0), ASSIGN)
    give(places, *range(1, NUM_STRANGERS))
    assert places.find(name(0)) is member
    assert len(places) == 1 + MAX_STRANGERS


def test_heartbeats_make_nobody_a_member_and_a_refusal_ends_it(places):
    give(places, 0, 1)
    places.told(name(0), Heartbeat())
    places.told(name(1), ASSIGN)
    places.told(name(1), Heartbeat())
    give(places, 2, 3, 4)
    assert numbers_of(places) == [1, 2, 3, 4]
    places.told(name(1), Refuse(2, "no stage"))
    give(places, 5, 6, 7)
    assert numbers_of(places) == [5, 6, 7]


def test_nobody_who_is_unknown_is_remembered_for_what_he_is_told(places):
    places.told(name(0), ASSIGN)
    assert len(places) == 0


# The server


@pytest.fixture
def server():
    server = ControlServer("127.0.0.1:0", heartbeat_s=60.0, max_strangers=MAX_STRANGERS)
    yield server
    server.close(linger_s=0.1)


@pytest.fixture
def say(server):
    """say(who, *parts): one message over a connection of this name; says what answers have come."""
    context, dealers = zmq.Context(), {}

    def say(who, *parts):
        if who not in dealers:
            dealers[who] = context.socket(zmq.DEALER)
            dealers[who].setsockopt(zmq.IDENTITY, who)
            dealers[who].connect(f"tcp://{server.address}")
        dealers[who].send_multipart(parts)
        return dealers[who]

    yield say
    context.destroy(linger=0)


def heard(server, num_polls=5):
    """All that is said until so many polls in a row bring nothing."""
    said, num_empty = [], 0
    while num_empty < num_polls:
        now = server.poll(0.05)
        num_empty = 0 if now else num_empty + 1
        said += now
    return said


def of_another_coordinator(message):
    """The parts of a message of a worker that was with a coordinator before this one."""
    return Numbering(OLD_COORDINATOR).wrap(message)


def of_another_past(message):
    """The parts of a message of a worker that has heard what this coordinator has never said."""
    numbering, coordinator = Numbering(), Numbering()
    numbering.take(coordinator.wrap(b"")[0], "coordinator")
    return numbering.wrap(message)


JOIN = encode_message(Join(1, "0.1", "host", 4711))


@pytest.mark.parametrize(
    "parts",
    [
        lambda: of_another_coordinator(b"no message at all"),
        lambda: of_another_coordinator(JOIN),
        lambda: of_another_past(JOIN),
        lambda: Numbering().wrap(JOIN),
    ],
    ids=["unreadable of a coordinator before", "of a coordinator before", "of another past", "newcomers"],
)
def test_member_is_heard_and_newcomers_find_a_place_whatever_strangers_say(server, say, parts):
    member, newcomer = Numbering(), Numbering()
    line = say(b"member", *member.wrap(JOIN))
    assert [who for who, _ in heard(server)] == [b"member"]
    server.send(b"member", ASSIGN)
    for number in range(NUM_STRANGERS):
        say(name(number), *parts())
    heard(server)
    assert len(server._places) <= 1 + MAX_STRANGERS
    say(b"newcomer", *newcomer.wrap(JOIN))
    say(b"member", *member.wrap(encode_message(Ready(1))))
    said = [(who, type(message)) for who, message in heard(server) if who in (b"member", b"newcomer")]
    assert sorted(said) == [(b"member", Ready), (b"newcomer", Join)]
    server.send(b"member", Abort("over", 1))
    answers = []
    while line.poll(500):
        answers.append(decode_message(line.recv_multipart()[1], "coordinator"))
    assert [type(answer) for answer in answers] == [Heartbeat, Assign, Abort]


def test_stranger_who_cannot_be_read_is_told_each_time_and_takes_no_place(server, say):
    for _ in range(2):
        line = say(name(0), *of_another_coordinator(b"\x07 of another version"))
        assert heard(server) == []
        assert line.poll(1000)
        answer = decode_message(line.recv_multipart()[1], "coordinator")
        assert isinstance(answer, Abort)
        assert "speaks version 7" in answer.message
    assert len(server._places) == 0
