"""Makes a process group of the two ends of a link that is connected over ZMQ.

The end that dialled says from which of its addresses it dialled; the other one opens a TCPStore on the address that its
own machine has towards that, and says where. Both then connect the group. So no interface has to be configured, and
nothing listens outside the network of the link.
"""

import ipaddress
import queue
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch

from tahq.comm.group.ends import GroupMessage, unpack_message
from tahq.comm.group.gloo_path import GlooPath, GroupBrokenError, PayloadPath, Store, c10d
from tahq.comm.group.nccl_path import NcclPath, check_nccl
from tahq.comm.group.transport import GroupTransport
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.addresses import format_address, local_address_towards, parse_address
from tahq.comm.zmq.transport import ZmqTransport
from tahq.errors import PeerLostError, RemoteProtocolError, UserError

Backend = Literal["gloo", "nccl"]
_CONNECT_S = 60.0
"""Time limit for the peer to open this link's group; meanwhile the ZMQ link tells whether it lives."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Settings of a group, besides its ZMQ link.

    Attributes:
        backend: of the payloads.
        identity: ours, in the plan's epoch.
        dial: host:port at which this end dialled the ZMQ link; empty: the other end dialled.
        device: of this stage.
        timeout_s: how long the peer may be silent.
    """

    backend: Backend
    identity: PeerIdentity
    dial: str
    device: torch.device
    timeout_s: float


def open_group(control: ZmqTransport, spec: GroupSpec) -> GroupTransport:
    """Make the group of a link whose ZMQ part is connected; blocks until both ends have done so.

    Every worker opens links with groups in the order of their numbers, so that no cycle of waits arises.

    Raises:
        PeerLostError: the peer is gone, or did not open the group in time.
        RemoteProtocolError: the peer sent a malformed address.
        ConfigError: this machine lacks what the backend needs.
    """
    if spec.backend == "nccl":
        check_nccl(spec.device)
    try:
        address, store = _meet(control, spec)
        outgoing, incoming = _paths(spec, store, address, is_lower=spec.identity.stage < control.spec.peer_stage)
    except (GroupBrokenError, c10d.DistError) as error:
        raise PeerLostError(f"{control}: its {spec.backend} group could not be made: {error}") from error
    transport = GroupTransport(control, spec.identity.run_id, outgoing, incoming, spec.timeout_s)
    transport.wait_open(_CONNECT_S)
    return transport


def _meet(control: ZmqTransport, spec: GroupSpec) -> tuple[str, Store]:
    """Our address towards the peer, and the store that both ends share."""
    if spec.dial:
        address = local_address_towards(spec.dial)
        _say_address(control, address)
        host, port = _peer_address(control)
        return address, _store(host, port, None)
    peer, _ = _peer_address(control)
    address = local_address_towards(format_address(peer, 9))
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    store = _store(address, port, listener)
    _say_address(control, format_address(address, port))
    return address, store


def _store(host: str, port: int, listener: socket.socket | None) -> Store:
    return c10d.TCPStore(
        host,
        port,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_S),
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _paths(spec: GroupSpec, store: Store, address: str, is_lower: bool) -> tuple[PayloadPath, PayloadPath]:
    """The outgoing and the incoming path."""
    rank = 0 if is_lower else 1
    if spec.backend == "gloo":
        path = GlooPath(store, rank, address, _CONNECT_S, spec.timeout_s)
        return path, path
    turn = threading.Lock() if is_lower else None
    forward = NcclPath(store, "forward", rank, spec.device, sends=is_lower, turn=turn)
    backward = NcclPath(store, "backward", rank, spec.device, sends=not is_lower, turn=turn)
    return (forward, backward) if is_lower else (backward, forward)


def _say_address(control: ZmqTransport, text: str) -> None:
    control.say(bytes([GroupMessage.ADDRESS]) + text.encode())


def _peer_address(control: ZmqTransport) -> tuple[str, int]:
    """The peer's IP address and port; port 0 if it sends none."""
    try:
        message = control.messages.get(timeout=_CONNECT_S)
    except queue.Empty:
        raise PeerLostError(f"{control}: sent no address for its process group in {_CONNECT_S:g} s") from None
    if message is None:
        raise (control.error or PeerLostError(f"{control}: the link is closed")).with_traceback(None)
    kind, rest = unpack_message(message, control)
    text = rest.decode("ascii", "replace")
    try:
        host, port = (text, 0) if _is_ip(text) else parse_address(text, str(control))
    except UserError:
        host, port = "", 0
    if kind is not GroupMessage.ADDRESS or not _is_ip(host):
        raise RemoteProtocolError(f"{control}: sent {kind.name} {text!a}; expected the address of its process group")
    return host, port


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
