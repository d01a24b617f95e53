"""Who introduces himself how, and what a worker says that has dialled the wrong one."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
import zmq

from tahq.comm.control.client import ControlClient
from tahq.comm.keys import Credentials, new_key_pair
from tahq.comm.link.shaping import Shaping
from tahq.comm.zmq.dialled import Listener, identify_listener
from tahq.comm.zmq.sockets import serve_curve
from tahq.errors import PeerLostError, RefusedError

SSH = b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(100)


@contextlib.contextmanager
def saying(greeting: bytes) -> Iterator[str]:
    """The address of a program that sends this on each connection, and hangs up."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)

        def serve() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(greeting)
                        connection.shutdown(socket.SHUT_WR)
                        connection.settimeout(0.2)
                        connection.recv(4096)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize(("has_curve", "expected"), [(True, Listener.CURVE), (False, Listener.OTHER_ZMQ)])
def test_zmq_socket_is_known_by_its_mechanism(has_curve, expected):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    if has_curve:
        serve_curve(router, new_key_pair())
    port = router.bind_to_random_port("tcp://127.0.0.1")
    assert identify_listener(f"127.0.0.1:{port}") is expected
    context.destroy(linger=0)


@pytest.mark.parametrize(("greeting", "expected"), [(b"", "NOTHING"), (b"hi", "STRANGER"), (SSH, "STRANGER")])
def test_what_is_no_zmq_socket_is_a_stranger_or_nobody(greeting, expected):
    with saying(greeting) as address:
        assert identify_listener(address) is Listener[expected]


@pytest.mark.parametrize(
    ("greeting", "error", "told"),
    [(SSH, RefusedError, "another program listens there"), (b"", PeerLostError, r"no answer within 2\.5 s")],
    ids=["another program", "tunnel to nothing"],
)
def test_worker_that_dials_the_wrong_port_is_told_what_is_there(greeting, error, told):
    """A tunnel to nothing hangs up, as a coordinator with another key does, but sends no greeting."""
    keys = new_key_pair()
    timing = {"peer_timeout_s": 5.0, "heartbeat_s": 1.0, "connect_timeout_s": 2.5 if greeting == b"" else 15.0}
    with saying(greeting) as address:
        client = ControlClient(
            address, "stage 1", shaping=Shaping(), credentials=Credentials(keys, keys.public), **timing
        )
        with pytest.raises(error, match=f"coordinator at {address}: {told}"):
            client.recv(15.0)
        client.close(linger_s=0.1)
