"""What the fake has beyond the contract: virtual time, and things that go wrong on command."""

import pytest

from tahq.comm.link.inproc_transport import InprocPair, VirtualClock
from tahq.comm.link.shaping import Shaping
from tahq.errors import LocalProtocolError, PeerLostError


class Bell:
    """Rings at its times."""

    def __init__(self, *times_s: float) -> None:
        self._times_s = list(times_s)
        self.rang_s: list[float] = []

    def next_s(self) -> float | None:
        return self._times_s[0] if self._times_s else None

    def act(self, now_s: float) -> None:
        while self._times_s and self._times_s[0] <= now_s:
            self.rang_s.append(now_s)
            self._times_s.pop(0)


def test_clock_stops_at_every_time_that_somebody_waits_for():
    clock, bell, other = VirtualClock(10.0), Bell(11.0, 12.5, 20.0), Bell(12.0)
    clock.enrol(bell)
    clock.enrol(other)
    clock.advance(5.0)
    assert clock() == 15.0
    assert (bell.rang_s, other.rang_s) == ([11.0, 12.5], [12.0])
    assert not clock.step(19.9)
    assert clock.step(20.0)
    assert clock() == 20.0


def test_recv_moves_the_clock_as_far_as_needed_and_no_further(make_frame):
    clock = VirtualClock()
    pair = InprocPair(clock, run_id=77, shaping=Shaping(delay_s=0.25))
    frame = make_frame(10)
    pair.upper.expect(frame.id, 10)
    pair.lower.send(frame)
    pair.upper.recv(5.0)
    assert clock() == 0.25
    with pytest.raises(TimeoutError):
        pair.upper.recv(5.0)
    assert clock() == 5.25


def test_waiting_for_ever_in_the_only_thread_is_our_own_error(make_id):
    pair = InprocPair(VirtualClock(), run_id=77)
    pair.upper.expect(make_id(), 10)
    with pytest.raises(LocalProtocolError, match="waits for ever"):
        pair.upper.recv()


def test_recv_without_a_limit_takes_what_is_on_its_way(make_frame):
    pair = InprocPair(VirtualClock(), run_id=77, shaping=Shaping(1e6, 0.5))
    frame = make_frame(1_000_000)
    pair.upper.expect(frame.id, 1_000_000)
    pair.lower.send(frame)
    assert pair.upper.recv().id == frame.id


def test_peer_that_vanished_is_lost_after_the_timeout():
    clock = VirtualClock()
    pair = InprocPair(clock, run_id=77)
    clock.advance(100.0)
    pair.lower.vanish()
    with pytest.raises(PeerLostError, match="no sign of life for 10"):
        pair.upper.recv()
    assert 107.9 < clock() <= 110.0


def test_lost_message_is_noticed_by_the_next_heartbeat_and_comes_again(make_frame):
    clock = VirtualClock()
    pair = InprocPair(clock, run_id=77)
    frame = make_frame(10)
    pair.upper.expect(frame.id, 10)
    pair.lower.lose_next(1)
    pair.lower.send(frame)
    assert pair.upper.recv(30.0).id == frame.id
    assert clock() <= 2.0


def test_pairs_may_share_a_clock(make_frame):
    clock = VirtualClock()
    first, second = (InprocPair(clock, link=i, run_id=77, shaping=Shaping(delay_s=1.0)) for i in range(2))
    for pair in (first, second):
        pair.upper.expect(make_frame(10).id, 10)
        pair.lower.send(make_frame(10))
    first.upper.recv()
    second.upper.recv()
    assert clock() == 1.0
