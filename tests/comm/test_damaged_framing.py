"""Bytes inserted into a TCP stream below CURVE's check, once: every kind of connection is made anew and loses nothing.

ZMQ closes a connection whose frames it cannot read. At the end that dialled it then never dials again by itself.
"""

import hashlib
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from support.breaking_proxy import BreakingProxy

from tahq.comm.control.client import ControlClient
from tahq.comm.control.messages import Message, Ready, Start
from tahq.comm.control.server import ControlServer
from tahq.comm.keys import Credentials, new_key_pair
from tahq.comm.link.frame import Direction
from tahq.comm.link.shaping import Shaping
from tahq.comm.zmq.files import FileSource, pieces

LOWER, UPPER = new_key_pair(), new_key_pair()
SOON_S = 30.0
NBYTES = 100_000
DAMAGE = {"size beyond all bounds": bytes.fromhex("020000000fffffffff"), "thirty times ff": b"\xff" * 30}

damages = pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
directions = pytest.mark.parametrize("towards", ["target", "dialler"])


@pytest.fixture
def proxy() -> Iterator[list[BreakingProxy]]:
    proxies: list[BreakingProxy] = []
    yield proxies
    for each in proxies:
        each.close()


@damages
@directions
@pytest.mark.parametrize("connections", [1, 2])
def test_link_goes_on_and_no_frame_is_lost(make_endpoint, make_frame, proxy, damage, towards, connections):
    settings = {"connections": connections, "peer_timeout_s": 3.0, "heartbeat_s": 0.3, "give_up_s": SOON_S}
    upper, lower = make_endpoint(1, keys=UPPER, **settings), make_endpoint(0, bind="", keys=LOWER, **settings)
    proxy.append(BreakingProxy(upper.address))
    ends = (
        lower.open_link(0, 1, "upper", proxy[0].address, UPPER.public),
        upper.open_link(0, 0, "lower", "", LOWER.public),
    )
    lower.wait_connected(SOON_S)
    frames = [[make_frame(NBYTES, number, direction) for number in range(10)] for direction in Direction]
    for number in range(10):
        if number == 3:
            proxy[0].insert(damage, towards)
        for end in (0, 1):
            ends[1 - end].expect(frames[end][number].id, NBYTES)
            ends[end].send(frames[end][number])
    for number in range(10):
        for end in (0, 1):
            assert torch.equal(ends[1 - end].recv(SOON_S).payload, frames[end][number].payload)
    assert proxy[0].num_connections > connections


@damages
@directions
def test_control_channel_goes_on_and_no_message_is_lost(proxy, damage, towards):
    server = ControlServer("127.0.0.1:0", heartbeat_s=0.3, keys=UPPER, allowed=[LOWER.public])
    proxy.append(BreakingProxy(server.address))
    heard: list[Message] = []
    is_over = threading.Event()

    def answer() -> None:
        while not is_over.is_set():
            for identity, message in server.poll(0.02):
                if isinstance(message, Ready):
                    heard.append(message)
                    server.send(identity, Start(message.stage))

    thread = threading.Thread(target=answer)
    thread.start()
    client = ControlClient(
        *(proxy[0].address, "stage 1"),
        shaping=Shaping(),
        peer_timeout_s=SOON_S,
        heartbeat_s=0.3,
        credentials=Credentials(LOWER, UPPER.public),
    )
    try:
        for number in range(20):
            if number == 10:
                proxy[0].insert(damage, towards)
            client.send(Ready(number))
            assert client.recv(SOON_S) == Start(number)
            time.sleep(0.02)
        assert heard == [Ready(number) for number in range(20)]
        assert proxy[0].num_connections == 2
    finally:
        client.close(linger_s=0.1)
        is_over.set()
        thread.join()
        server.close(linger_s=0.1)


@damages
@directions
def test_copy_of_a_file_goes_on_where_it_was(make_endpoint, proxy, tmp_path, damage, towards):
    content = os.urandom(2_000_000)
    (tmp_path / "file").write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    upper, lower = make_endpoint(1, keys=UPPER), make_endpoint(0, bind="", keys=LOWER)
    upper.files.offer(77, sha256, tmp_path / "file")
    upper.allow([LOWER.public])
    proxy.append(BreakingProxy(upper.address))
    got = bytearray()
    for piece in pieces(lower.fetching, FileSource(proxy[0].address, 77, sha256, UPPER.public), rate_bits_per_s=2e7):
        if not got:
            proxy[0].insert(damage, towards)
        got += piece
    assert bytes(got) == content
    assert proxy[0].num_connections == 2
