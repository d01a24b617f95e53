"""Which piece enters a host's uplink next, on virtual times; test_shaped_sockets.py has it over real sockets."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.session_pairs import RUN, hear, met_sessions, pieces, urgent

from tahq.comm.link.frame import HEADER_NBYTES, Direction, Frame, LogicalId, Purpose, unpack_header
from tahq.comm.link.shaping import Shaping, Uplink
from tahq.comm.link.spec import SessionLimits

FORWARD, BACKWARD = Direction
PREFERRED = {"oldest": None, "activations": FORWARD, "gradients": BACKWARD}
PIECE = 100


@dataclass(frozen=True)
class Queued:
    """A frame that a host queues on a link at a time."""

    link: int
    direction: Direction
    nbytes: int
    at_s: float


def some_frames():
    frame = st.builds(
        Queued,
        link=st.integers(0, 2),
        direction=st.sampled_from(Direction),
        nbytes=st.integers(0, 5 * PIECE),
        at_s=st.integers(0, 40).map(lambda tenths: tenths / 10),
    )
    return st.lists(frame, max_size=12).map(lambda frames: sorted(frames, key=lambda frame: frame.at_s))


def next_to_send(candidates):
    """As the I/O thread chooses."""
    ready = [(rank, number, sender) for number, (rank, sender) in enumerate(candidates) if rank is not None]
    return min(ready)[2] if ready else None


class Host:
    """The uplink of one host, its links' sessions and their peers: what the I/O thread does, without it."""

    def __init__(self, first, num_links: int = 3) -> None:
        limits = SessionLimits(piece_nbytes=PIECE, first=first)
        self.pairs = [met_sessions(limits, link) for link in range(num_links)]
        self.uplink: Uplink[None] = Uplink(Shaping(rate_bits_per_s=8 * (PIECE + HEADER_NBYTES)))  # a piece a second

    def send_all(self, frames: dict[Queued, Frame]) -> list[tuple[float, Queued]]:
        """Queue each at its time; which frame's piece entered when."""
        of_id = {frame.id: queued for queued, frame in frames.items()}
        waiting, entered, now_s = list(frames), [], 0.0
        while True:
            while waiting and waiting[0].at_s <= now_s:
                queued = waiting.pop(0)
                self.pairs[queued.link][0].send(frames[queued], queued.at_s)
            sender = next_to_send((ours.next_rank, (ours, theirs)) for ours, theirs in self.pairs)
            if sender is None and not waiting:
                return entered
            if sender is None:
                now_s = waiting[0].at_s
                continue
            message = sender[0].next_piece(now_s)
            hear(sender[1], [message], now_s)
            entered.append((now_s, of_id[unpack_header(message.header, message.payload, "").id]))
            self.uplink.send(None, message.nbytes, message.ready_s, now_s)
            now_s = max(now_s, self.uplink.free_s)


@pytest.mark.parametrize("first", PREFERRED)
@settings(deadline=None, max_examples=60)
@given(queued=some_frames())
def test_no_piece_enters_while_one_waits_that_goes_before_it(first, queued):
    host = Host(first)
    frames = {one: frame_of(one, index) for index, one in enumerate(dict.fromkeys(queued))}
    for one, frame in frames.items():
        host.pairs[one.link][1].expect(frame.id, one.nbytes)
    entered = host.send_all(frames)
    last_s = {one: at_s for at_s, one in entered}
    assert set(last_s) == set(frames)
    for at_s, one in entered:
        for other in frames:
            if other.at_s > at_s or last_s[other] <= at_s:
                continue  # it came later, or is over
            assert other.direction is not PREFERRED[first] or one.direction is other.direction
            if first == "oldest" or one.direction is other.direction:
                assert one.at_s <= other.at_s
    delivered = [frame for _, theirs in host.pairs for frame in theirs.take_delivered()]
    assert {frame.id: frame.payload.tolist() for frame in delivered} == {
        frame.id: frame.payload.tolist() for frame in frames.values()
    }


def frame_of(queued: Queued, index: int) -> Frame:
    id = LogicalId(RUN, 0, 0, Purpose.TRAIN, index, queued.link, queued.direction)
    payload = torch.arange(queued.nbytes, dtype=torch.int64).add(index).to(torch.uint8)
    return Frame(id, 0, torch.uint8, (queued.nbytes,), payload)


def test_goodbye_waits_for_frames_of_its_own_link_alone():
    leaving, _ = met_sessions(SessionLimits(piece_nbytes=PIECE, first="gradients"))
    busy, _ = met_sessions(SessionLimits(piece_nbytes=PIECE, first="gradients"), link=1)
    busy.send(frame_of(Queued(1, BACKWARD, 250, 0.0), 0), 0.0)
    leaving.send(frame_of(Queued(0, FORWARD, 50, 1.0), 1), 1.0)
    leaving.close(2.0)
    assert next_to_send((session.next_rank, session) for session in (leaving, busy)) is busy
    leaving.next_piece(2.0)
    assert next_to_send((session.next_rank, session) for session in (leaving, busy)) is leaving


def test_what_waited_for_room_in_the_window_was_not_ready_before():
    lower, upper = met_sessions(SessionLimits(piece_nbytes=PIECE, window_nbytes=PIECE))
    lower.send(frame_of(Queued(0, FORWARD, 150, 0.0), 0), 0.0)
    hear(upper, pieces(lower, 0.0))
    upper.close(5.0)  # so that it acknowledges at once
    hear(lower, urgent(upper, 5.0), 5.0)
    (last,) = pieces(lower, 5.0)
    assert last.ready_s == 5.0
