"""Two sessions over connections that break, as a state machine: whatever is lost on the way, every frame is delivered
once, in order and whole.

A connection is a first-in first-out line of messages each way. TCP loses the end of what is on a line when it resets;
a ROUTER drops whatever it is given while nobody is connected. So any stretch of a line may vanish.
"""

from collections import deque

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.session_pairs import RUN, met_sessions

from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.session import End
from tahq.comm.link.spec import SessionLimits

ENDS = st.integers(0, 1)
DIALLING = 0
MAX_FRAMES = 12


class BreakingLink(RuleBasedStateMachine):
    """End 0 sends activations to end 1, which sends gradients back."""

    @initialize(connections=st.integers(1, 3), window=st.sampled_from([250, 1000]))
    def meet(self, connections, window):
        self.limits = SessionLimits(1e6, 2.0, 100, window, connections=connections, receive_window_nbytes=window)
        self.ends = met_sessions(self.limits)
        self.lines = {(end, c): deque() for end in (0, 1) for c in range(connections)}
        self.sent = ([], [])
        self.got = ([], [])
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
        self.got[1 - end].extend(self.ends[1 - end].take_delivered())

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
            due_s = session.next_timer_s()
            if due_s is not None and due_s <= self.now_s:
                session.handle_timer(self.now_s)

    @precondition(lambda self: self.sent[0] or self.sent[1])
    @rule(end=ENDS)
    def close(self, end):
        """Leave when all that it waits for has come, as workers do."""
        if len(self.got[end]) == len(self.sent[1 - end]) and self.is_closing[1 - end] is False:
            self.is_closing = [True, True]  # nobody sends any more
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
            assert self.ends[end].remote is not End.CONNECTING

    def teardown(self):
        """Left alone, everything comes, and nothing stays on anybody's mind."""
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
            assert self.ends[end].queued_nbytes == 0
        self.nothing_is_made_up_or_out_of_order()

    def _arrive_all(self, end, connection):
        line = self.lines[end, connection]
        while line:
            message = line.popleft()
            self.ends[1 - end].receive(message.header, message.payload, self.now_s, connection)
        self.got[1 - end].extend(self.ends[1 - end].take_delivered())


BreakingLink.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestBreakingLink = BreakingLink.TestCase
