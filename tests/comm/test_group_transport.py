"""Links over a gloo group: whole payloads both ways; a peer that dies is lost in time, as it is over ZMQ."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from tahq.comm.group.paths import PART_NBYTES
from tahq.comm.group.transport import GroupSpec, open_group
from tahq.comm.link.frame import Direction, Frame
from tahq.comm.link.spec import PeerIdentity, SessionLimits
from tahq.errors import ConfigError, LocalProtocolError, PeerLostError, RemoteProtocolError

SOON_S = 20.0
PEER_TIMEOUT_S = 1.0
NEIGHBOUR = """
import sys, time
import torch
from tahq.comm.group.transport import GroupSpec, open_group
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint
identity = PeerIdentity(77, 1, 2, "c0ffee")
endpoint = ZmqEndpoint(identity, EndpointSettings(bind="127.0.0.1:0", peer_timeout_s=60.0, heartbeat_s=0.2))
control = endpoint.open_link(1, 1, "parent", sys.argv[1])
endpoint.wait_connected(60.0)
if sys.argv[2] == "gloo":
    link = open_group(control, GroupSpec("gloo", identity, sys.argv[1], torch.device("cpu"), 60.0))
print("connected", flush=True)
time.sleep(120)
"""


def spec(stage, dial="", *, timeout_s=5.0, backend="gloo"):
    return GroupSpec(backend, PeerIdentity(77, 1, stage, "c0ffee"), dial, torch.device("cpu"), timeout_s)


@pytest.fixture
def connected(make_endpoint):
    """Both ends of link 1 over ZMQ, stage 1's first, and the address that stage 2 dialled."""
    lower, upper = make_endpoint(1), make_endpoint(2)
    ends = lower.open_link(1, 2, "upper", ""), upper.open_link(1, 1, "lower", lower.address)
    for endpoint in (lower, upper):
        endpoint.wait_connected(SOON_S)
    return *ends, lower.address


@pytest.fixture
def joined(connected):
    """Both ends of link 1 over gloo, stage 1's first."""
    below, above, address = connected
    with ThreadPoolExecutor(1) as other:
        opening = other.submit(open_group, above, spec(2, address))
        lower = open_group(below, spec(1))
        upper = opening.result()
    yield lower, upper
    for transport in (lower, upper):
        transport.close(linger_s=0.2)


def own_threads():
    ours = ("tahq-send", "tahq-answer", "tahq-receive")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(ours)]


def random_frame(id, nbytes):
    return Frame(id, 0, torch.uint8, (nbytes,), torch.randint(256, (nbytes,), dtype=torch.uint8))


def test_payloads_of_several_parts_cross_both_ways_at_once(joined, make_id):
    lower, upper = joined
    nbytes = 2 * PART_NBYTES + 17
    forward, backward = (random_frame(make_id(0, direction), nbytes) for direction in Direction)
    upper.expect(forward.id, nbytes)
    lower.expect(backward.id, nbytes)
    lower.send(forward)
    upper.send(backward)
    assert torch.equal(upper.recv(SOON_S).payload, forward.payload)
    assert torch.equal(lower.recv(SOON_S).payload, backward.payload)
    with pytest.raises(LocalProtocolError, match="is not of run 77"):
        lower.send(random_frame(make_id(0)._replace(run=78), 4))


def test_sender_waits_for_a_peer_that_is_late_to_post(monkeypatch, request, make_id):
    monkeypatch.setattr("tahq.comm.group.ends.SessionLimits", partial(SessionLimits, unexpected_nbytes=1000))
    monkeypatch.setattr("tahq.comm.group.transport.MAX_QUEUED_NBYTES", 1000)
    lower, upper = request.getfixturevalue("joined")
    frames = [random_frame(make_id(number), 400) for number in range(12)]
    with ThreadPoolExecutor(1) as other:
        sending = other.submit(lambda: [lower.send(frame) for frame in frames])
        time.sleep(0.3)
        assert not sending.done()
        for frame in frames:
            upper.expect(frame.id, 400)
        for frame in frames:
            assert torch.equal(upper.recv(SOON_S).payload, frame.payload)
        sending.result(SOON_S)


def test_peer_is_told_why_its_frame_was_not_taken(joined, make_id):
    lower, upper = joined
    upper.expect(make_id(0), 99)
    lower.send(random_frame(make_id(0), 100))
    with pytest.raises(RemoteProtocolError, match=r"link 1 to stage 1 .*at most 99"):
        upper.recv(SOON_S)
    with pytest.raises(PeerLostError, match=r"link 1 to stage 2 .*the peer ended it: .*at most 99"):
        lower.recv(SOON_S)
    for transport in joined:
        transport.close(linger_s=5.0)
    assert own_threads() == []


def test_peer_that_says_no_address_is_a_protocol_error(connected):
    below, above, _ = connected
    above.say(b"\0nowhere")
    with pytest.raises(RemoteProtocolError, match=r"link 1 to stage 2 .*sent ADDRESS 'nowhere'"):
        open_group(below, spec(1))


def test_nccl_without_cuda_is_a_mistake_in_the_configuration(connected):
    below, above, address = connected
    with ThreadPoolExecutor(1) as other:
        opening = other.submit(open_group, above, spec(2, address, backend="nccl"))
        with pytest.raises(ConfigError, match="nccl needs CUDA devices"):
            open_group(below, spec(1, backend="nccl"))
        with pytest.raises(ConfigError, match="nccl needs CUDA devices"):
            opening.result()


@pytest.fixture
def neighbour(make_endpoint):
    """neighbour(kind, **limits): a link to a process, over ZMQ or gloo, and the process."""
    children = []

    def start(kind, **limits):
        endpoint = make_endpoint(1, peer_timeout_s=PEER_TIMEOUT_S, heartbeat_s=PEER_TIMEOUT_S / 5, **limits)
        link = endpoint.open_link(1, 2, "child", "")
        command = [sys.executable, "-c", NEIGHBOUR, endpoint.address, kind]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        endpoint.wait_connected(60.0)
        if kind == "gloo":
            link = open_group(link, spec(1, timeout_s=PEER_TIMEOUT_S))
        assert children[-1].stdout.readline() == b"connected\n"
        return link, children[-1]

    yield start
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.serial
@pytest.mark.parametrize("kind", ["zmq", "gloo"])
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.acceptance),
    ],
)
def test_neighbour_that_dies_is_lost_within_the_timeout_and_closing_does_not_hang(neighbour, make_id, kind, number):
    link, child = neighbour(kind)
    link.send(random_frame(make_id(0), 16 << 20))
    with pytest.raises(TimeoutError):
        link.recv(1.5 * PEER_TIMEOUT_S)
    died_s = time.monotonic()
    child.send_signal(number)
    link.send(random_frame(make_id(1), 16 << 20))
    with pytest.raises(PeerLostError, match=r"link 1 to stage 2 \(child\): (no sign of life|its process group)"):
        link.recv(30.0)
    # Its last sign of life may be a heartbeat old; the rest of a second is for a busy machine.
    assert 0.75 * PEER_TIMEOUT_S < time.monotonic() - died_s < PEER_TIMEOUT_S + 1.0
    link.close(linger_s=0.2)
    assert time.monotonic() - died_s < 2 * PEER_TIMEOUT_S + 3.0


@pytest.mark.acceptance
@pytest.mark.serial
def test_neighbour_that_dies_is_waited_for_until_it_is_given_up_or_all_begin_anew(neighbour, make_id):
    link, child = neighbour("gloo", give_up_s=60.0)
    link.send(random_frame(make_id(0), 16 << 20))
    child.kill()
    with pytest.raises(TimeoutError):
        link.recv(3 * PEER_TIMEOUT_S)
    link.send(random_frame(make_id(1), 16 << 20))  # nor does this notice anything
    link.abandon()
    assert own_threads() == []


def test_group_that_breaks_between_two_that_live_ends_the_link(make_endpoint, make_id):
    lower, upper = (make_endpoint(stage, heartbeat_s=0.1) for stage in (1, 2))
    below, above = lower.open_link(1, 2, "upper", ""), upper.open_link(1, 1, "lower", lower.address)
    for endpoint in (lower, upper):
        endpoint.wait_connected(SOON_S)
    with ThreadPoolExecutor(1) as other:
        opening = other.submit(open_group, above, spec(2, lower.address))
        link = open_group(below, spec(1))
        peer = opening.result()
    peer._incoming.abort()
    link.send(random_frame(make_id(0), 16 << 20))
    with pytest.raises(PeerLostError, match=r"link 1 to stage 2 .*its process group broke"):
        link.recv(SOON_S)
    for transport in (link, peer):
        transport.close(linger_s=0.2)
