"""TCP connections of a namespace ended from outside, through the kernel's SOCK_DESTROY.

The kernel sends RST to the peer, and the program here sees ECONNABORTED: what a router that forgets a
connection does to both ends. pyroute2 lists sockets but destroys none, so the messages are put together
here: `struct inet_diag_req_v2` of linux/inet_diag.h.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Final

from tahq.errors import NetworkError
from tahq_netem.backends.namespaces import entered

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_SOCK_DESTROY: Final = 21
_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_STATES: Final = sum(1 << state for state in (1, 4, 5, 8))
"""ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT."""
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST_BODY: Final = struct.Struct("=BBBBI48s")
_NO_CONNECTION: Final = bytes(40) + b"\xff" * 8  # INET_DIAG_NOCOOKIE


def reset_connections(namespace: str) -> int:
    """End every established TCP connection to another host; returns how many there were."""
    with entered(namespace), _open_kernel() as kernel:
        connections = [
            (family, identity)
            for family in (socket.AF_INET, socket.AF_INET6)
            for identity in _connections(kernel, family)
            if not _is_within_host(family, identity)
        ]
        return sum(_destroy(kernel, family, identity) for family, identity in connections)


def can_reset() -> bool:
    """Whether this kernel can end connections; tried on one that does not exist."""
    try:
        with _open_kernel() as kernel:
            # Ending a connection fails alike without the connection and without the module; listing them does not.
            for _ in _connections(kernel, socket.AF_INET):
                pass
            _destroy(kernel, socket.AF_INET, _NO_CONNECTION)
    except (NetworkError, OSError):
        return False
    return True


def _open_kernel() -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)


def _connections(kernel: socket.socket, family: int) -> Iterator[bytes]:
    """The identity of each connection: both ports and addresses, interface and cookie, as the kernel packs them."""
    _send(kernel, _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, family, bytes(48))
    while True:
        for kind, body in _messages(kernel.recv(1 << 16)):
            if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                _check(body)
                return
            yield body[4:52]


def _destroy(kernel: socket.socket, family: int, identity: bytes) -> bool:
    """Whether there still was such a connection."""
    _send(kernel, _SOCK_DESTROY, _REQUEST | _ACK, family, identity)
    [(_, body)] = _messages(kernel.recv(1 << 16))
    if _error_number(body) == errno.ENOENT:
        return False
    _check(body)
    return True


def _error_number(message: bytes) -> int:
    return -int.from_bytes(message[:4], "little", signed=True)


def _check(message: bytes) -> None:
    number = _error_number(message)
    if number == errno.ENOENT:
        raise NetworkError("this kernel cannot reset connections: it has no module tcp_diag")
    if number == errno.EOPNOTSUPP:
        raise NetworkError("this kernel cannot reset connections: it was built without CONFIG_INET_DIAG_DESTROY")
    if number:
        raise NetworkError(f"the kernel did not reset a connection: {os.strerror(number)}")


def _send(kernel: socket.socket, kind: int, flags: int, family: int, identity: bytes) -> None:
    body = _REQUEST_BODY.pack(family, socket.IPPROTO_TCP, 0, 0, _STATES, identity)
    kernel.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 0, 0) + body)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def _is_within_host(family: int, identity: bytes) -> bool:
    """Connections of a host to itself are not the network's to end."""
    size = 4 if family == socket.AF_INET else 16
    source, destination = ip_address(identity[4 : 4 + size]), ip_address(identity[20 : 20 + size])
    mapped = getattr(destination, "ipv4_mapped", None)
    return source == destination or (mapped or destination).is_loopback
