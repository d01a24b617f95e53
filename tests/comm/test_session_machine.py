"""Two sessions over connections that break, as a state machine: whatever is lost on the way, every frame, and every
message of each channel, is delivered once, in order and whole.

A connection is a first-in first-out line of messages each way. TCP loses the end of what is on a line when it resets;
a ROUTER drops whatever it is given while no peer is connected. So any stretch of a line may vanish.
"""

from collections import deque

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.session_pairs import RUN, hear, met_sessions, pieces, urgent

from tahq.comm.link.frame import Channel, Direction, Frame, LogicalId, Purpose, unpack_header
from tahq.comm.link.session import PeerForgotError, Session
from tahq.comm.link.signals import pack_reset
from tahq.comm.link.spec import MESSAGE_WINDOW_NBYTES, LinkSpec, PeerIdentity, SessionLimits
from tahq.comm.link.transitions import TRANSITIONS, End, Event
from tahq.errors import RemoteProtocolError

ENDS = st.integers(0, 1)
DIALLING = 0
MAX_FRAMES = 12
MESSAGES = (Channel.CONTROL, Channel.FILES)


class BreakingLink(RuleBasedStateMachine):
    """End 0 sends activations to end 1, which sends gradients back."""

    @initialize(connections=st.integers(1, 3), window=st.sampled_from([250, 1000]))
    def meet(self, connections, window):
        self.limits = SessionLimits(
            *(1e6, 2.0, 100, window),
            connections=connections,
            receive_window_nbytes=window,
            max_message_nbytes=450,
        )
        self.ends = met_sessions(self.limits)
        self.lines = {(end, c): deque() for end in (0, 1) for c in range(connections)}
        self.sent = ([], [])
        self.got = ([], [])
        self.said = {(end, channel): [] for end in (0, 1) for channel in MESSAGES}
        self.heard = {(end, channel): [] for end in (0, 1) for channel in MESSAGES}
        self.now_s = 0.0
        self.is_closing = [False, False]

    # What goes on

    @rule(end=ENDS, nbytes=st.integers(0, 450))
    def send(self, end, nbytes):
        if self.is_closing[end] or len(self.sent[end]) == MAX_FRAMES:
            return
        number = len(self.sent[end])
        id = LogicalId(RUN, 0, 0, Purpose.TRAIN, number, 0, Direction(end))
        frame = Frame(id, 0, torch.uint8, (nbytes,), torch.arange(nbytes).add(number).to(torch.uint8))
        self.ends[1 - end].expect(id, 450)
        self.ends[end].send(frame, self.now_s)
        self.sent[end].append(frame)

    @rule(end=ENDS, channel=st.sampled_from(MESSAGES), nbytes=st.integers(0, 450))
    def say(self, end, channel, nbytes):
        """Send a message on the control or the files channel."""
        if not self.is_closing[end] and len(self.said[end, channel]) < MAX_FRAMES:
            self.said[end, channel].append(bytes([len(self.said[end, channel])]) * nbytes)
            self.ends[end].send_message(channel, self.said[end, channel][-1], self.now_s)

    @rule(end=ENDS, count=st.integers(1, 4))
    def speak(self, end, count):
        """Put its next messages on their lines."""
        for _ in range(count):
            message = self.ends[end].next_urgent(self.now_s) or self.ends[end].next_piece(self.now_s)
            if message is None:
                return
            self.lines[end, message.connection].append(message)

    @rule(data=st.data(), count=st.integers(1, 6))
    def arrive(self, data, count):
        """Bring the next messages of a line to its end."""
        end, connection = data.draw(st.sampled_from(sorted(self.lines)))
        line = self.lines[end, connection]
        for _ in range(min(count, len(line))):
            message = line.popleft()
            self.ends[1 - end].receive(message.header, message.payload, self.now_s, connection)
        self._take(1 - end)

    def _take(self, end):
        self.got[end].extend(self.ends[end].take_delivered())
        for channel, data in self.ends[end].take_messages():
            self.heard[end, channel].append(data)

    @rule(data=st.data(), begin=st.integers(0, 5), count=st.integers(1, 9))
    def lose(self, data, begin, count):
        """Lose a stretch of a line."""
        line = self.lines[data.draw(st.sampled_from(sorted(self.lines)))]
        kept = [message for index, message in enumerate(line) if not begin <= index < begin + count]
        line.clear()
        line.extend(kept)

    @rule(connection=st.integers(0, 2), is_noticed=st.booleans())
    def reset(self, connection, is_noticed):
        """Lose all that is on a connection, both ways; the end that dials may be told."""
        for end in (0, 1):
            if (end, connection) in self.lines:
                self.lines[end, connection].clear()
        if is_noticed and (DIALLING, connection) in self.lines:
            self.ends[DIALLING].reconnected(connection)

    @rule(duration_s=st.sampled_from([0.006, 1.0, 2.0]))
    def wait(self, duration_s):
        self.now_s += duration_s
        for session in self.ends:
            if session.timer_s <= self.now_s:
                session.handle_timer(self.now_s)

    @precondition(lambda self: self.sent[0] or self.sent[1])
    @rule(end=ENDS)
    def close(self, end):
        """Leave when all that it waits for has come, as workers do."""
        has_all = all(self.heard[end, channel] == self.said[1 - end, channel] for channel in MESSAGES)
        if has_all and len(self.got[end]) == len(self.sent[1 - end]) and self.is_closing[1 - end] is False:
            self.is_closing = [True, True]  # neither end sends any more
            self.ends[end].close(self.now_s)

    # What holds

    @invariant()
    def nothing_is_made_up_or_out_of_order(self):
        if not hasattr(self, "ends"):
            return
        for end in (0, 1):
            got, sent = self.got[end], self.sent[1 - end]
            assert [frame.id for frame in got] == [frame.id for frame in sent[: len(got)]]
            assert all(torch.equal(one.payload, other.payload) for one, other in zip(got, sent, strict=False))
            for channel in MESSAGES:
                heard = self.heard[end, channel]
                assert heard == self.said[1 - end, channel][: len(heard)]
            assert self.ends[end].remote is not End.CONNECTING

    def teardown(self):
        """Left alone, everything arrives, and no state is left over."""
        if not hasattr(self, "ends"):
            return
        for _ in range(200):
            for end in (0, 1):
                self.speak(end, 50)
                for connection in range(self.limits.connections):
                    self._arrive_all(end, connection)
            self.wait(2.0)
        for end in (0, 1):
            assert len(self.got[end]) == len(self.sent[1 - end])
            assert all(self.heard[end, channel] == self.said[1 - end, channel] for channel in MESSAGES)
            assert self.ends[end].outbound.nbytes == 0
        self.nothing_is_made_up_or_out_of_order()

    def _arrive_all(self, end, connection):
        line = self.lines[end, connection]
        while line:
            message = line.popleft()
            self.ends[1 - end].receive(message.header, message.payload, self.now_s, connection)
        self._take(1 - end)


BreakingLink.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestBreakingLink = BreakingLink.TestCase


@pytest.mark.parametrize("is_request_lost", [True, False])
def test_last_frame_is_sent_again_if_it_was_lost_with_the_request_or_the_answer_to_it(is_request_lost):
    """The receiver waits for another round then, and a BYE, which names none, tells it of no loss."""
    limits = SessionLimits(10.0, 2.0, 100)
    receiver, sender = met_sessions(limits)
    id = LogicalId(RUN, 0, 0, Purpose.TRAIN, 0, 0, Direction.BACKWARD)
    receiver.expect(id, 50)
    sender.send(Frame(id, 0, torch.uint8, (50,), torch.zeros(50, dtype=torch.uint8)), 0.0)
    sender.close(0.0)
    assert len(pieces(sender)) == 2  # lost: the frame and BYE
    receiver.reconnected(0)
    request = urgent(receiver)
    if not is_request_lost:
        hear(sender, request)
        urgent(sender), pieces(sender)  # lost as well
    for now_s in (2.0, 4.0, 6.0, 8.0):
        for one, other in ((sender, receiver), (receiver, sender)):
            one.handle_timer(now_s)
            hear(other, [*urgent(one, now_s), *pieces(one, now_s)], now_s)
    assert [frame.id for frame in receiver.take_delivered()] == [id]
    assert sender.is_settled


# Channels


def test_control_passes_data_and_data_passes_files_between_pieces():
    limits = SessionLimits(10.0, 2.0, 100, max_message_nbytes=10_000)
    lower, _ = met_sessions(limits)
    lower.send_message(Channel.FILES, bytes(300), 0.0)
    assert channel_of(lower.next_piece(0.0)) is Channel.FILES
    id = LogicalId(RUN, 0, 0, Purpose.TRAIN, 0, 0, Direction.FORWARD)
    lower.send(Frame(id, 0, torch.uint8, (300,), torch.zeros(300, dtype=torch.uint8)), 1.0)
    assert channel_of(lower.next_piece(1.0)) is Channel.DATA
    lower.send_message(Channel.CONTROL, bytes(200), 2.0)
    order = [channel_of(piece) for piece in pieces(lower, 2.0)]
    assert order == [Channel.CONTROL] * 2 + [Channel.DATA] * 2 + [Channel.FILES] * 2


def test_each_channel_is_bounded_by_its_own_window():
    """A file that fills its window holds up neither data nor control messages."""
    limits = SessionLimits(10.0, 2.0, 100_000, max_message_nbytes=1 << 24)
    lower, upper = met_sessions(limits)
    lower.send_message(Channel.FILES, bytes(5_000_000), 0.0)
    under_way = pieces(lower)
    assert MESSAGE_WINDOW_NBYTES <= sum(len(piece.payload) for piece in under_way) < MESSAGE_WINDOW_NBYTES + 100_000
    lower.send_message(Channel.CONTROL, b"now", 0.0)
    (piece,) = pieces(lower)
    assert channel_of(piece) is Channel.CONTROL
    hear(upper, [*under_way, piece])
    hear(lower, urgent(upper, 0.1), 0.1)
    assert {channel_of(piece) for piece in pieces(lower, 0.1)} == {Channel.FILES}


def test_message_longer_than_the_limit_is_a_protocol_error_before_memory_is_taken():
    lower, upper = met_sessions(SessionLimits(10.0, 2.0, 100, max_message_nbytes=1000))
    lower.send_message(Channel.CONTROL, bytes(1001), 0.0)
    with pytest.raises(RemoteProtocolError, match="message of 1001 bytes on the channel for control; at most 1000"):
        hear(upper, pieces(lower))


def channel_of(piece):
    return unpack_header(piece.header, piece.payload, "").channel


# The table of transitions


def test_every_state_that_a_transition_leads_to_is_in_the_table():
    reached = {(local, remote) for row in TRANSITIONS.values() for local, remote, _ in row.values()}
    assert reached | {(End.OPEN, End.CONNECTING)} == set(TRANSITIONS)


@given(st.lists(st.sampled_from(Event), max_size=12))
def test_no_event_reopens_a_closed_end_but_a_loss_after_bye(events):
    state = (End.OPEN, End.CONNECTING)
    for event in events:
        local, remote, _ = TRANSITIONS[state].get(event, (*state, ""))
        if state[1] is End.CLOSED:
            assert remote is End.CLOSED
        if state[0] is End.CLOSED:
            assert local is End.CLOSED or event is Event.LOST
        state = (local, remote)
    assert (End.CLOSED, End.CLOSED) in reachable(state)


def reachable(state):
    found, new = set(), {state}
    while new:
        found |= new
        new = {(local, remote) for each in new for local, remote, _ in TRANSITIONS[each].values()} - found
    return found


def test_peer_that_was_started_again_is_known_by_its_reset():
    lower, _ = met_sessions(SessionLimits())
    reset = pack_reset(RUN, 1, 0)
    with pytest.raises(PeerForgotError, match="was started again"):
        lower.receive(*reset, 1.0)
    connecting = Session(PeerIdentity(RUN, 1, 0, "c0ffee"), LinkSpec(0, 1, "host1", dials=True), SessionLimits())
    connecting.receive(*reset, 1.0)  # is about the session before this one
    assert connecting.remote is End.CONNECTING
