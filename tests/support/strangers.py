"""Those who do not belong to a run, and try: scanners, silent connections, ZMQ sockets with wrong keys or none."""

import contextlib
import socket
from collections.abc import Iterator, Sequence

import zmq

from support.session_pairs import control_hello
from tahq.comm.keys import new_key_pair
from tahq.comm.zmq.sockets import dial_curve

WELL_FORMED = control_hello()
"""What a worker would say first; nobody may read it."""
GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes(4096),
    b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" * 2048,
    b"\x16\x03\x01",
)


@contextlib.contextmanager
def silent_connections(ports: Sequence[int], number: int) -> Iterator[list[socket.socket]]:
    """So many connections to each of these ports of loopback, that never speak."""
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            for _ in range(number)
            for port in ports
        ]


def scan(port: int) -> None:
    """Say what scanners say, and hang up."""
    for said in GARBAGE:
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=30) as scanner:
            scanner.sendall(said)


@contextlib.contextmanager
def intruders(ports: Sequence[int], server_keys: Sequence[str]) -> Iterator[list[zmq.Socket[bytes]]]:
    """ZMQ sockets that say what a member would: without CURVE, and with a new key to each of `server_keys`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield [_intruder(context, port, key) for port in ports for key in ("", *server_keys)]
    finally:
        context.destroy(linger=0)


def _intruder(context: "zmq.Context[zmq.Socket[bytes]]", port: int, server_key: str) -> "zmq.Socket[bytes]":
    dealer = context.socket(zmq.DEALER)
    if server_key:
        dial_curve(dealer, new_key_pair(), server_key)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send_multipart(WELL_FORMED)
    return dealer
