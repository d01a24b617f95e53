"""TCP connections of a namespace ended from outside, through the kernel's SOCK_DESTROY.

The kernel sends RST to the peer, and the program here sees ECONNABORTED: what a router that forgets a connection does
to both ends. Destroying a connection fails with ENOENT where there is none, but also where the module tcp_diag is
missing; listing connections fails in the second case alone.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, Final

from pyroute2 import DiagSocket, NetlinkError
from pyroute2.netlink import NLM_F_ACK, NLM_F_REQUEST
from pyroute2.netlink.diag import SOCK_DESTROY, inet_diag_req

from tahq.errors import NetworkError
from tahq_netem.backends.namespaces import entered

_STATES: Final = sum(1 << state for state in (1, 4, 5, 8))
"""ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT."""
_ADDRESSES: Final = ("idiag_src", "idiag_dst")
_NO_CONNECTION: Final = dict.fromkeys(_ADDRESSES, "0.0.0.0") | {"idiag_cookie": 2**64 - 1}


def reset_connections(namespace: str) -> int:
    """End every established TCP connection to another host; returns how many there were."""
    with entered(namespace), DiagSocket() as kernel, _explained():
        return sum(
            _destroy(kernel, family, connection)
            for family in (socket.AF_INET, socket.AF_INET6)
            for connection in kernel.get_sock_stats(family=family, states=_STATES)
            if not _is_within_host(connection)
        )


def try_reset() -> None:
    """End a connection that does not exist; raises NetworkError if this kernel cannot end connections."""
    with DiagSocket() as kernel, _explained():
        kernel.get_sock_stats(family=socket.AF_INET, states=_STATES)
        _destroy(kernel, socket.AF_INET, _NO_CONNECTION)


def _destroy(kernel: DiagSocket, family: int, connection: Any) -> bool:
    """Whether there still was such a connection."""
    request = inet_diag_req()
    request["sdiag_family"], request["sdiag_protocol"], request["idiag_states"] = family, socket.IPPROTO_TCP, _STATES
    for key in _ADDRESSES:
        request[key] = struct.unpack("!4I", socket.inet_pton(family, connection[key]).ljust(16, b"\0"))
    for key in ("idiag_sport", "idiag_dport", "idiag_if", "idiag_cookie"):
        request[key] = connection.get(key, 0)
    try:
        tuple(kernel.nlm_request(request, SOCK_DESTROY, NLM_F_REQUEST | NLM_F_ACK))
    except NetlinkError as error:
        if error.code == errno.ENOENT:
            return False
        raise
    return True


@contextmanager
def _explained() -> Iterator[None]:
    reasons = {
        errno.ENOENT: "it has no module tcp_diag",
        errno.EOPNOTSUPP: "it was built without CONFIG_INET_DIAG_DESTROY",
    }
    try:
        yield
    except NetlinkError as error:
        reason = reasons.get(error.code, os.strerror(error.code))
        raise NetworkError(f"this kernel cannot reset connections: {reason}") from None


def _is_within_host(connection: Any) -> bool:
    """Connections of a host to itself are not the network's to end."""
    source, destination = ip_address(connection["idiag_src"]), ip_address(connection["idiag_dst"])
    return source == destination or (getattr(destination, "ipv4_mapped", None) or destination).is_loopback
