"""What every transport promises (tahq.comm.transport.Transport), run over every implementation.

A harness gives two joined ends and can make one vanish as if its process were killed. A new transport
is one class here and one parameter of `harness`.
"""

import dataclasses
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.inproc_transport import InprocPair, VirtualClock

from tahq.comm.group.ends import ANNOUNCEMENT_NBYTES
from tahq.comm.group.transport import Backend, GroupSpec, open_group
from tahq.comm.link.frame import HEADER_NBYTES, Direction, Frame, LogicalId, Purpose
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import PeerIdentity, SessionLimits
from tahq.comm.relay.process import Relay
from tahq.comm.relay.tickets import LOWER, UPPER, RelayTicket, split_planned
from tahq.comm.transport import Transport
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError

RUN = 5
PIECE_NBYTES = 4096
PEER_TIMEOUT_S = 1.5
SOON_S = 10.0
SHORT_S = 0.05


class InprocHarness:
    headers_nbytes = 3 * HEADER_NBYTES
    """Of a frame of three pieces."""

    def __init__(self) -> None:
        limits = SessionLimits(PEER_TIMEOUT_S, PEER_TIMEOUT_S / 5, PIECE_NBYTES)
        self._pair = InprocPair(VirtualClock(), link=2, run_id=RUN, limits=limits)
        self.lower: Transport = self._pair.lower
        self.upper: Transport = self._pair.upper

    def vanish_lower(self) -> None:
        self._pair.lower.vanish()

    def close(self) -> None:
        self.lower.close()
        self.upper.close()


class ZmqHarness:
    connections = 1
    headers_nbytes = 3 * HEADER_NBYTES

    def __init__(self) -> None:
        self._endpoints = [self._endpoint(stage) for stage in (2, 3)]
        lower, upper = self._endpoints
        self.upper: Transport = upper.open_link(2, 2, "lower", dial="")
        self.lower: Transport = lower.open_link(2, 3, "upper", dial=upper.address)
        for endpoint in self._endpoints:
            endpoint.wait_connected(SOON_S)

    def _endpoint(self, stage: int) -> ZmqEndpoint:
        return ZmqEndpoint(
            PeerIdentity(RUN, 1, stage, "hash"),
            EndpointSettings(
                bind="127.0.0.1:0",
                shaping=Shaping(piece_nbytes=PIECE_NBYTES),
                peer_timeout_s=PEER_TIMEOUT_S,
                heartbeat_s=PEER_TIMEOUT_S / 5,
                connections=self.connections,
            ),
        )

    def vanish_lower(self) -> None:
        self._endpoints[0]._loop.stop()

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close(linger_s=0.2)


class StripedZmqHarness(ZmqHarness):
    connections = 3


class RelayedZmqHarness(ZmqHarness):
    """The same over a relay, which both ends dial."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        log = Path(self._folder.name) / "relay.log"
        self._relay = Relay("127.0.0.1", 0, secret="", run_id=RUN, num_links=3, log=log)
        self._endpoints = [self._endpoint(stage) for stage in (2, 3)]
        lower, upper = self._endpoints
        self.upper: Transport = upper.open_link(2, 2, "lower", self._ticket(LOWER))
        self.lower: Transport = lower.open_link(2, 3, "upper", self._ticket(UPPER))
        for endpoint in self._endpoints:
            endpoint.wait_connected(SOON_S)

    def _ticket(self, end: int) -> RelayTicket:
        port, ticket = split_planned(self._relay.ticket(2, 1, end))
        return RelayTicket(f"127.0.0.1:{port}", ticket)

    def close(self) -> None:
        super().close()
        self._relay.close()
        self._folder.cleanup()


class GlooHarness(ZmqHarness):
    backend: Backend = "gloo"
    headers_nbytes = ANNOUNCEMENT_NBYTES

    def __init__(self) -> None:
        super().__init__()
        upper = self._endpoints[1]
        with ThreadPoolExecutor(1) as other:
            opening = other.submit(open_group, self.lower, self._spec(2, upper.address))
            self.upper = open_group(self.upper, self._spec(3, ""))
            self.lower = opening.result()

    def _spec(self, stage: int, dial: str) -> GroupSpec:
        device = torch.device(f"cuda:{stage - 2}" if self.backend == "nccl" else "cpu")
        return GroupSpec(self.backend, PeerIdentity(RUN, 1, stage, "hash"), dial, device, PEER_TIMEOUT_S)

    def close(self) -> None:
        for transport in (self.lower, self.upper):
            transport.close(linger_s=0.2)
        super().close()


class NcclHarness(GlooHarness):
    backend: Backend = "nccl"

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = FromHost(self.lower), FromHost(self.upper)


class FromHost:
    """A transport whose payloads lie on a device, for tests that make and compare them in host memory."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, frame: Frame) -> None:
        if frame.payload.is_contiguous():  # a copy would be
            frame = dataclasses.replace(frame, payload=frame.payload.to(self._transport.payload_device))
        self._transport.send(frame)

    def recv(self, timeout_s: float | None = None) -> Frame:
        frame = self._transport.recv(timeout_s)
        assert frame.payload.device == self._transport.payload_device
        return dataclasses.replace(frame, payload=frame.payload.cpu())


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


@pytest.fixture(
    params=[
        pytest.param(InprocHarness, id="inproc"),
        pytest.param(ZmqHarness, id="zmq"),
        pytest.param(StripedZmqHarness, id="zmq over 3 connections"),
        pytest.param(RelayedZmqHarness, id="zmq over a relay"),
        pytest.param(GlooHarness, id="gloo"),
        pytest.param(NcclHarness, id="nccl", marks=[pytest.mark.gpu, two_devices]),
    ]
)
def harness(request: pytest.FixtureRequest) -> Iterator[InprocHarness | ZmqHarness]:
    harness = request.param()
    yield harness
    harness.close()


def make_id(micro_batch: int, direction: Direction = Direction.FORWARD) -> LogicalId:
    return LogicalId(RUN, 0, 0, Purpose.TRAIN, micro_batch, 2, direction)


def make_frame(nbytes: int, micro_batch: int = 0, direction: Direction = Direction.FORWARD) -> Frame:
    content = random.Random(nbytes * 1000 + micro_batch).randbytes(nbytes)
    payload = torch.tensor(list(content), dtype=torch.uint8)
    return Frame(make_id(micro_batch, direction), 7, torch.float16, (1, 2, nbytes), payload, shard=1)


def assert_same(got: Frame, expected: Frame) -> None:
    assert dataclasses.replace(got, payload=expected.payload) == expected
    assert got.payload.dtype == torch.uint8
    assert torch.equal(got.payload, expected.payload)


@pytest.mark.parametrize("nbytes", [0, 1, PIECE_NBYTES - 1, PIECE_NBYTES, PIECE_NBYTES + 1, 10 * PIECE_NBYTES + 17])
def test_frame_arrives_unchanged(harness, nbytes):
    frame = make_frame(nbytes)
    harness.upper.expect(frame.id, nbytes)
    harness.lower.send(frame)
    assert_same(harness.upper.recv(SOON_S), frame)


def test_frames_cross_in_both_directions(harness):
    forward, backward = make_frame(9000), make_frame(5000, direction=Direction.BACKWARD)
    harness.upper.expect(forward.id, 9000)
    harness.lower.expect(backward.id, 5000)
    harness.lower.send(forward)
    harness.upper.send(backward)
    assert_same(harness.lower.recv(SOON_S), backward)
    assert_same(harness.upper.recv(SOON_S), forward)


def test_frame_that_came_early_is_delivered_once_it_is_expected(harness):
    early, later = make_frame(6000, micro_batch=0), make_frame(100, micro_batch=1)
    harness.upper.expect(later.id, 100)
    harness.lower.send(early)
    harness.lower.send(later)
    assert_same(harness.upper.recv(SOON_S), later)
    harness.upper.expect(early.id, 6000)
    assert_same(harness.upper.recv(SOON_S), early)


def test_frame_that_is_sent_twice_is_delivered_once(harness):
    twice, later = make_frame(9000, micro_batch=0), make_frame(100, micro_batch=1)
    for frame in (twice, later):
        harness.upper.expect(frame.id, frame.payload.numel())
    for frame in (twice, twice, later):
        harness.lower.send(frame)
    assert_same(harness.upper.recv(SOON_S), twice)
    assert_same(harness.upper.recv(SOON_S), later)


def test_recv_times_out_and_can_be_called_again(harness):
    frame = make_frame(10)
    harness.upper.expect(frame.id, 10)
    with pytest.raises(TimeoutError, match="link 2 to stage 2"):
        harness.upper.recv(SHORT_S)
    harness.lower.send(frame)
    assert_same(harness.upper.recv(SOON_S), frame)


def test_frame_larger_than_posted_is_a_protocol_error_that_names_the_peer(harness):
    harness.upper.expect(make_id(0), 9999)
    harness.lower.send(make_frame(10_000))
    with pytest.raises(RemoteProtocolError, match=r"link 2 to stage 2 .*10000 bytes.*at most 9999"):
        harness.upper.recv(SOON_S)


def test_early_frame_larger_than_posted_is_a_protocol_error(harness):
    harness.upper.expect(make_id(1), 1)
    harness.lower.send(make_frame(10_000, micro_batch=0))
    harness.lower.send(make_frame(1, micro_batch=1))
    harness.upper.recv(SOON_S)
    with pytest.raises(RemoteProtocolError, match="link 2 to stage 2"):
        expect_and_recv(harness.upper, make_id(0), 9999)


def test_more_frames_than_anyone_expects_are_a_protocol_error(harness):
    for i in range(4200):
        harness.lower.send(make_frame(1, micro_batch=i))
    if isinstance(harness, GlooHarness):  # what the receiver does not ask for is not sent
        with pytest.raises(TimeoutError):
            harness.upper.recv(SHORT_S)
        return
    with pytest.raises(RemoteProtocolError, match="unexpected frames"):
        harness.upper.recv(SOON_S)


def test_expecting_an_id_twice_is_our_own_error(harness):
    harness.upper.expect(make_id(0), 10)
    with pytest.raises(LocalProtocolError, match="was expected before"):
        expect_and_recv(harness.upper, make_id(0), 10)


def expect_and_recv(transport: Transport, id: LogicalId, max_nbytes: int) -> Frame:
    """A mistake in `expect` may show there or, where a thread does the work, at the next `recv`."""
    transport.expect(id, max_nbytes)
    transport.send(make_frame(0, micro_batch=998, direction=Direction.BACKWARD))
    return transport.recv(SOON_S)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"payload": torch.zeros(4)}, "payload must be uint8"),
        ({"payload": torch.zeros(2, 2, dtype=torch.uint8)}, "payload must be uint8"),
        ({"payload": torch.zeros(8, dtype=torch.uint8)[::2]}, "payload must be uint8"),
        ({"shape": (1, 1, 1, 1, 4)}, "cannot describe"),
    ],
    ids=["float", "two dimensions", "strided", "shape"],
)
def test_frame_that_cannot_be_sent_is_refused(harness, change, error):
    with pytest.raises(LocalProtocolError, match=error):
        harness.lower.send(dataclasses.replace(make_frame(4), **change))


def test_stats_count_what_was_sent_since_the_last_call(harness):
    frames = [make_frame(10_000, micro_batch=i) for i in range(3)]
    for frame in frames:
        harness.upper.expect(frame.id, 10_000)
        harness.lower.send(frame)
    harness.lower.send(make_frame(100, direction=Direction.BACKWARD))
    for _ in frames:
        harness.upper.recv(SOON_S)
    forward, backward = harness.lower.take_stats()
    assert (forward.link, forward.direction, forward.frames) == (2, Direction.FORWARD, 3)
    assert (forward.payload_bytes, forward.elements) == (30_000, 3 * 2 * 10_000)
    assert forward.wire_bytes == 30_000 + 3 * harness.headers_nbytes
    assert (backward.direction, backward.frames, backward.payload_bytes) == (Direction.BACKWARD, 1, 100)
    assert forward.busy_s >= 0.0
    assert harness.lower.take_stats() == []


def test_stats_leave_out_what_was_sent_to_evaluate(harness):
    for purpose in (Purpose.EVAL, Purpose.EVAL_RAW):
        frame = make_frame(10_000)
        frame = dataclasses.replace(frame, id=frame.id._replace(purpose=purpose))
        harness.upper.expect(frame.id, 10_000)
        harness.lower.send(frame)
        harness.upper.recv(SOON_S)
    assert sum(entry.frames + entry.payload_bytes + entry.busy_s for entry in harness.lower.take_stats()) == 0


def test_peer_that_vanishes_is_lost_within_the_timeout(harness):
    harness.vanish_lower()
    started_s = time.monotonic()
    with pytest.raises(PeerLostError, match=f"link 2 to stage 2 .*no sign of life for {PEER_TIMEOUT_S} s"):
        harness.upper.recv(SOON_S)
    assert time.monotonic() - started_s < PEER_TIMEOUT_S + 1.0
    with pytest.raises(PeerLostError):
        harness.upper.recv(SOON_S)
    with pytest.raises(PeerLostError):
        harness.upper.send(make_frame(1))


def test_idle_link_stays_up(harness):
    with pytest.raises(TimeoutError):
        harness.upper.recv(1.5 * PEER_TIMEOUT_S)
    frame = make_frame(10)
    harness.upper.expect(frame.id, 10)
    harness.lower.send(frame)
    assert_same(harness.upper.recv(SOON_S), frame)


def test_close_sends_what_is_queued_first_and_in_order(harness):
    frames = [make_frame(500 * (i % 20), micro_batch=i) for i in range(200)]
    for frame in frames:
        harness.upper.expect(frame.id, frame.payload.numel())
        harness.lower.send(frame)
    harness.lower.close()
    for frame in frames:
        assert_same(harness.upper.recv(SOON_S), frame)


def test_recv_after_the_peer_has_closed_says_so(harness):
    harness.upper.expect(make_id(0), 10)
    harness.lower.close()
    with pytest.raises(PeerLostError, match=r"link 2 to stage 2 .*has closed it"):
        harness.upper.recv(SOON_S)


def test_closed_transport_refuses_work_and_closes_again(harness):
    harness.lower.close()
    harness.lower.close()
    with pytest.raises(LocalProtocolError, match="closed on this side"):
        harness.lower.send(make_frame(1))
    with pytest.raises(LocalProtocolError, match="closed on this side"):
        harness.lower.recv(SHORT_S)
