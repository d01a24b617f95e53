"""The control channel over a connection that is reset: what was lost is said again, and soon."""

import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from support.breaking_proxy import BreakingProxy

from tahq.comm.control.client import ControlClient
from tahq.comm.control.messages import Join, Message, Ready, Start
from tahq.comm.control.server import ControlServer
from tahq.comm.link.shaping import Shaping
from tahq.comm.zmq.sockets import replace_silent_connections

SOON_S = 20.0
RARELY_S = 60.0
"""Between heartbeats: nothing here waits for one."""


class Channel:
    """Both ends with a proxy between them, and a thread that polls the server."""

    def __init__(self) -> None:
        self._server = ControlServer("127.0.0.1:0", heartbeat_s=RARELY_S)
        self.proxy = BreakingProxy(self._server.address)
        timing = {"peer_timeout_s": 5 * RARELY_S, "heartbeat_s": RARELY_S}
        self.client = ControlClient(self.proxy.address, "stage 1", shaping=Shaping(), **timing)
        self.heard: list[Message] = []
        self.identity = b""
        self._replies: list[Message] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _poll(self) -> None:
        while not self._is_over:
            while self._replies:
                self._server.send(self.identity, self._replies.pop(0))
            for identity, message in self._server.poll(0.02):
                self.identity = identity
                self.heard.append(message)

    def reply(self, message: Message) -> None:
        """Have the server say this."""
        self._replies.append(message)

    def wait_for(self, message: Message) -> None:
        """Until the server has heard this."""
        deadline_s = time.monotonic() + SOON_S
        while message not in self.heard:
            assert time.monotonic() < deadline_s, f"{message} did not come; {self.heard} did"
            time.sleep(0.01)

    def close(self) -> None:
        """End both ends."""
        self._is_over = True
        self._thread.join()
        self.client.close(linger_s=0.1)
        self.proxy.close()
        self._server.close(linger_s=0.1)


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel()
    yield channel
    channel.close()


def test_what_a_reset_has_lost_is_said_again_without_waiting_for_a_heartbeat(channel):
    join = Join(1, "0.1", "host", 4711)
    channel.client.send(join)
    channel.wait_for(join)
    channel.reply(Start(0))
    assert channel.client.recv(SOON_S) == Start(0)
    channel.proxy.cut()
    channel.client.send(Ready(1))
    channel.reply(Start(1))
    time.sleep(0.3)  # they are on their way
    channel.proxy.reset()
    channel.proxy.heal()
    channel.wait_for(Ready(1))
    assert channel.client.recv(SOON_S) == Start(1)
    assert channel.proxy.num_connections == 2


@pytest.mark.parametrize(("peer_timeout_s", "expected_ms"), [(10.0, 2000), (60.0, 12000), (1.0, 200)])
def test_connection_whose_peer_acknowledges_nothing_is_closed_by_the_kernel(peer_timeout_s, expected_ms):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        replace_silent_connections(socket, peer_timeout_s)
        assert socket.get(zmq.TCP_MAXRT) == expected_ms
        assert socket.get(zmq.TCP_KEEPALIVE) == 1
