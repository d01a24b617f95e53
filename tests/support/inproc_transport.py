"""A link inside one thread, on a virtual clock: the fake that stands in for the network.

The sessions, the shaping and the bytes are the real ones; only sockets and threads are missing. `recv` moves the clock
by itself, from event to event, until a frame is there or the time is over, so a test needs neither sleeps nor a second
thread. A side can `vanish` as if its process were killed, and messages can be lost with `lose_next`.
"""

import math
from typing import Protocol

from tahq.comm.link.frame import CPU, Frame, LogicalId, Outgoing, check_sendable
from tahq.comm.link.outbound import LinkCounter
from tahq.comm.link.session import Session
from tahq.comm.link.shaping import Downlink, Shaping, Uplink
from tahq.comm.link.spec import LinkSpec, PeerIdentity, SessionLimits
from tahq.comm.link.transitions import End
from tahq.comm.transport import LinkStats
from tahq.comm.zmq.socket_wait import Inbox
from tahq.errors import LocalProtocolError, PeerLostError, TahqError


class Actor(Protocol):
    """Something that has things to do at times."""

    def next_s(self) -> float:
        """When it next has something to do; inf: not unless another acts."""

    def act(self, now_s: float) -> None:
        """Do everything that is due by now."""


class VirtualClock:
    """Seconds since `start_s`, moved by `advance` and `step`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._actors: list[Actor] = []

    def __call__(self) -> float:
        """The time, as `time.monotonic` gives it."""
        return self._now_s

    def enrol(self, actor: Actor) -> None:
        self._actors.append(actor)

    def advance(self, duration_s: float) -> None:
        until_s = self._now_s + duration_s
        while self.step(until_s):
            pass
        self._now_s = until_s

    def step(self, until_s: float) -> bool:
        """Move to the next time that an actor waits for and let all act; False if there is none by `until_s`."""
        next_s = min((actor.next_s() for actor in self._actors), default=math.inf)
        if next_s == math.inf or next_s > until_s:
            return False
        self._now_s = max(self._now_s, next_s)
        for actor in self._actors:
            actor.act(self._now_s)
        return True


class InprocTransport:
    """One end of the link (contract: tahq.comm.transport.Transport). Payloads are CPU tensors."""

    payload_device = CPU
    peer: "InprocTransport"

    def __init__(
        self, identity: PeerIdentity, spec: LinkSpec, limits: SessionLimits, shaping: Shaping, clock: VirtualClock
    ) -> None:
        self.link = spec.link
        self._spec = spec
        self._session = Session(identity, spec, limits)
        self._uplink: Uplink[Outgoing] = Uplink(shaping)
        self._downlink: Downlink[Outgoing] = Downlink(shaping)
        self._clock = clock
        self._counter = LinkCounter(spec.link, limits.piece_nbytes)
        self._inbox: Inbox[Frame] = Inbox(str(spec))
        self._has_vanished = False
        self._to_lose = 0
        self._resume_s = clock()

    def __str__(self) -> str:
        return str(self._spec)

    # The contract

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        self._check_usable()
        self._session.expect(id, max_nbytes)
        self._publish()

    def send(self, frame: Frame) -> None:
        check_sendable(frame)
        self._check_usable()
        self._counter.count(frame)
        self._session.send(frame, self._clock())
        self._resume_s = self._clock()

    def recv(self, timeout_s: float | None = None) -> Frame:
        """The next expected frame that is whole; moves the clock.

        Raises:
            LocalProtocolError: without a time limit, when nothing is on its way.
        """
        deadline_s = None if timeout_s is None else self._clock() + timeout_s
        while True:
            try:
                return self._inbox.get(0.0)
            except TimeoutError:
                self._wait(deadline_s)

    def take_stats(self) -> list[LinkStats]:
        outbound = self._session.outbound
        times = (outbound.take_piece_times(), self._session.heartbeats.recent)
        return self._counter.take(outbound.busy, outbound.sending, self._clock(), *times)

    def close(self) -> None:
        """Send what is queued, say BYE; moves the clock until the peer has it. Safe to call twice."""
        self._inbox.fail(LocalProtocolError(f"{self}: closed on this side"))
        self._session.close(self._clock())
        self._resume_s = self._clock()
        until_s = self._clock() + 60.0
        while not (self._session.is_settled and not self._uplink) and self._clock.step(until_s):
            pass

    # What can go wrong

    def vanish(self) -> None:
        self._has_vanished = True

    def lose_next(self, count: int) -> None:
        self._to_lose = count

    def greet(self) -> None:
        """Say what a session begins with, one message, past all shaping."""
        message = self._session.next_urgent(self._clock())
        if message is not None:
            self.peer._session.receive(message.header, message.payload, self._clock())

    # What the clock calls

    def next_s(self) -> float:
        if self._has_vanished:
            return math.inf
        return min(self._uplink.next_s, self._downlink.next_s, self._session.timer_s, self._resume_s)

    def act(self, now_s: float) -> None:
        if self._has_vanished:
            return
        try:
            for message in self._downlink.take_due(now_s):
                self._session.receive(message.header, message.payload, now_s)
                self._publish()
            if self._session.timer_s <= now_s:
                self._session.handle_timer(now_s)
        except TahqError as error:
            self._publish()
            self._inbox.fail(error)
            self._session.close(now_s, reason=str(error))
        self._transmit(now_s)

    def _transmit(self, now_s: float) -> None:
        self._resume_s = math.inf
        while self._uplink.free_s <= now_s:
            outgoing = self._session.next_urgent(now_s) or self._session.next_piece(now_s)
            if outgoing is None:
                break
            self._uplink.send(outgoing, outgoing.nbytes, outgoing.ready_s, now_s)
        else:
            self._resume_s = self._uplink.free_s
        for outgoing in self._uplink.take_due(now_s):
            if self._to_lose > 0:
                self._to_lose -= 1
            else:
                self.peer._arrive(outgoing, now_s)

    def _arrive(self, message: Outgoing, now_s: float) -> None:
        self._session.heard(now_s)
        self._downlink.receive(message, message.nbytes, now_s)

    def _publish(self) -> None:
        for frame in self._session.take_delivered():
            self._inbox.put(frame)
        if self._session.remote is End.CLOSED and self._inbox.error is None:
            self._inbox.fail(PeerLostError(f"{self}: the peer has closed it; nothing more will come"))

    def _wait(self, deadline_s: float | None) -> None:
        if deadline_s is None:
            if self._nothing_will_come() or not self._clock.step(math.inf):
                raise LocalProtocolError(f"{self}: waits for ever; nothing expected is on its way, nor will be")
        elif not self._clock.step(deadline_s):
            self._clock.advance(deadline_s - self._clock())
            raise TimeoutError(f"{self}: nothing came in time")

    def _nothing_will_come(self) -> bool:
        if self.peer._has_vanished or self.peer._session.local is not End.OPEN:
            return False
        return self._session.remote is End.OPEN and self.peer._session.outbound.nbytes == 0

    def _check_usable(self) -> None:
        if self._inbox.error is not None:
            raise self._inbox.error.with_traceback(None)


_GREETINGS = 4
"""Turns that it takes both ends to say HELLO, give a sign of life and have it acknowledged."""


class InprocPair:
    """Both ends of one link, which have met: `lower` at stage `link`, `upper` at stage `link + 1`.

    Pairs may share a clock. `upper_shaping` is what the upper side is capped to; None: as the lower one.
    """

    def __init__(
        self,
        clock: VirtualClock,
        *,
        link: int = 0,
        run_id: int = 1,
        epoch: int = 0,
        shaping: Shaping | None = None,
        upper_shaping: Shaping | None = None,
        limits: SessionLimits | None = None,
    ) -> None:
        shaping = shaping or Shaping()
        limits = limits or SessionLimits(piece_nbytes=shaping.message_nbytes)

        def end(stage: int, peer_stage: int, shaping: Shaping) -> InprocTransport:
            spec = LinkSpec(link, peer_stage, "in this process", dials=stage > peer_stage)
            identity = PeerIdentity(run_id, epoch, stage, "inproc")
            return InprocTransport(identity, spec, limits, shaping, clock)

        self.lower, self.upper = end(link, link + 1, shaping), end(link + 1, link, upper_shaping or shaping)
        self.lower.peer, self.upper.peer = self.upper, self.lower
        for transport in (self.upper, self.lower) * _GREETINGS:
            transport.greet()
        clock.enrol(self.lower)
        clock.enrol(self.upper)

    @property
    def transports(self) -> tuple[InprocTransport, InprocTransport]:
        return self.lower, self.upper
