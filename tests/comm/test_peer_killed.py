"""A neighbour's process dies without a word; what it was sending, and that it is gone, is noticed in time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tahq.comm.control.client import ControlClient, ControlHooks
from tahq.comm.control.messages import Heartbeat, Join
from tahq.comm.control.server import ControlServer
from tahq.comm.link.shaping import Shaping
from tahq.errors import PeerLostError

PEER_TIMEOUT_S = 1.0
STARTED_WITHIN_S = 60.0

NEIGHBOUR = """
import sys, time
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint
settings = EndpointSettings(bind="127.0.0.1:0", peer_timeout_s=60.0, heartbeat_s=0.2)
endpoint = ZmqEndpoint(PeerIdentity(77, 1, 2, "c0ffee"), settings)
endpoint.open_link(1, 1, "parent", sys.argv[1])
endpoint.wait_connected(60.0)
print("connected", flush=True)
time.sleep(120)
"""

COORDINATOR = """
import sys
from tahq.comm.control.server import ControlServer
server = ControlServer("127.0.0.1:0", heartbeat_s=0.2)
print(server.address, flush=True)
while True:
    server.poll(0.2)
"""


@pytest.fixture
def start() -> Iterator:
    """start(code, *arguments): a Python process; reaped at the end."""
    children = []

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code, *arguments]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_neighbour_that_dies_is_lost_within_the_timeout(start, make_endpoint, make_id, number):
    endpoint = make_endpoint(1, peer_timeout_s=PEER_TIMEOUT_S, heartbeat_s=PEER_TIMEOUT_S / 5)
    link = endpoint.open_link(1, 2, "child", "")
    child = start(NEIGHBOUR, endpoint.address)
    endpoint.wait_connected(STARTED_WITHIN_S)
    assert child.stdout.readline() == "connected\n"
    link.expect(make_id(0), 100)
    with pytest.raises(TimeoutError):
        link.recv(1.5 * PEER_TIMEOUT_S)
    died_s = time.monotonic()
    child.send_signal(number)
    with pytest.raises(PeerLostError, match=r"link 1 to stage 2 \(child\): no sign of life for 1\.0 s"):
        link.recv(30.0)
    # Its last sign of life may be a heartbeat old; the rest of a second is for a busy machine.
    assert PEER_TIMEOUT_S * 0.75 < time.monotonic() - died_s < PEER_TIMEOUT_S + 1.0


def test_coordinator_that_dies_is_lost_within_the_timeout(start):
    lost = []
    child = start(COORDINATOR)
    address = child.stdout.readline().strip()
    client = ControlClient(
        address,
        "stage 1",
        shaping=Shaping(),
        peer_timeout_s=1.0,
        heartbeat_s=0.2,
        hooks=ControlHooks(on_lost=lost.append),
    )
    with pytest.raises(TimeoutError):
        client.recv(1.5)
    died_s = time.monotonic()
    child.kill()
    with pytest.raises(PeerLostError, match=f"coordinator at {address}: no sign of life for 1.0 s"):
        client.recv(30.0)
    assert 0.75 < time.monotonic() - died_s < 2.0
    client.close()
    assert len(lost) == 1


def test_worker_that_computes_without_a_pause_still_gives_signs_of_life():
    server = ControlServer("127.0.0.1:0", heartbeat_s=0.1)
    client = ControlClient(server.address, "stage 1", shaping=Shaping(), peer_timeout_s=5.0, heartbeat_s=0.1)
    client.send(Join(1, "0.1", "host", 1))
    client.set_activity(1, 7, "forward")
    until_s = time.monotonic() + 0.5
    while time.monotonic() < until_s:
        sum(range(1000))
    heard = []
    for _ in range(10):
        heard += [message for _, message in server.poll(0.1)]
    beats = [(beat.stage, beat.step, beat.activity) for beat in heard if isinstance(beat, Heartbeat)]
    assert beats.count((1, 7, "forward")) >= 4
    client.close()
    server.close()
