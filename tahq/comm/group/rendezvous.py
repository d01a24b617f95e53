"""How the two ends of a link, who have met over ZMQ, make a process group.

The end that dialled says which of its addresses it dialled from; the other one opens a TCPStore on the address
that its own machine has on the way there, and says where. Both then connect the lanes, in the same order. So
nobody has to name an interface, and nothing listens anywhere but on the network that the link is on.
"""

import ipaddress
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch

from tahq.comm.group.gloo_group import GlooGroup, GroupBrokenError
from tahq.comm.group.nccl_path import NcclPath
from tahq.comm.group.payload_path import HostPath, PayloadPath
from tahq.comm.group.thread import Lane
from tahq.comm.group.torch_groups import Store, c10d
from tahq.comm.group.transport import GroupTransport, Lanes
from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.addresses import format_address, local_address_towards, parse_address
from tahq.comm.zmq.transport import ZmqTransport
from tahq.errors import PeerLostError, RemoteProtocolError, UserError

Backend = Literal["gloo", "nccl"]
_MAX_ADDRESS_NBYTES = 128
_CONNECT_S = 60.0
"""For the peer to come to this link's group. Whether it lives meanwhile is watched over ZMQ."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What a group is made with, beside its ZMQ link."""

    backend: Backend
    identity: PeerIdentity
    """Ours, in the plan's epoch."""
    dial: str
    """host:port that the ZMQ link was dialled at from here; empty: it was dialled from the other end."""
    device: torch.device
    """Where this stage computes."""
    timeout_s: float
    """How long the peer may be silent."""


def open_group(control: ZmqTransport, spec: GroupSpec) -> GroupTransport:
    """Make the group of a link whose ZMQ part is connected; blocks until both ends are there.

    Links with groups are opened in the order of their numbers at every worker, so that nobody waits in a circle.

    Raises:
        PeerLostError: the peer is gone, or did not come.
        RemoteProtocolError: what it said is no address.
        ConfigError: this machine has not what the backend needs.
    """
    is_lower = spec.identity.stage < control.spec.peer_stage
    try:
        own, store = _meet(control, spec, Direction.FORWARD if is_lower else Direction.BACKWARD)
        turn = threading.Lock() if is_lower else None
        lanes = [_lane(control, spec, store, own, direction, is_lower, turn) for direction in Direction]
    except (GroupBrokenError, c10d.DistError) as error:
        raise PeerLostError(f"{control}: its {spec.backend} group could not be made: {error}") from error
    outgoing, incoming = lanes if is_lower else reversed(lanes)
    transport = GroupTransport(control, Lanes(outgoing, incoming), spec.timeout_s)
    transport.wait_open(_CONNECT_S)
    return transport


def _meet(control: ZmqTransport, spec: GroupSpec, own: Direction) -> tuple[str, Store]:
    """Our address on the way to the peer, and the store that both ends have."""
    if spec.dial:
        address = local_address_towards(spec.dial)
        _tell(control, spec, own, address)
        host, port = _ask(control, spec, own)
        return address, _store(host, port, None)
    peer, _ = _ask(control, spec, own)
    address = local_address_towards(format_address(peer, 9))
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    store = _store(address, port, listener)
    _tell(control, spec, own, format_address(address, port))
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


def _lane(
    control: ZmqTransport,
    spec: GroupSpec,
    store: Store,
    address: str,
    direction: Direction,
    is_lower: bool,
    turn: "threading.Lock | None",
) -> Lane:
    rank, sends = (0 if is_lower else 1), (direction is Direction.FORWARD) == is_lower
    group = GlooGroup(store, f"gloo-{direction.name}", rank, address, _CONNECT_S, spec.timeout_s)
    path: PayloadPath = HostPath(group)
    if spec.backend == "nccl":
        path = NcclPath(store, f"nccl-{direction.name}", rank, spec.device, sends=sends, turn=turn)
    return Lane(group, path, spec.identity, control.link, str(control), store)


# What is said over ZMQ: an address as text, in a frame of its own purpose


def _id(control: ZmqTransport, spec: GroupSpec, direction: Direction) -> LogicalId:
    return LogicalId(spec.identity.run_id, 0, 0, Purpose.GROUP, 0, control.link, direction)


def _tell(control: ZmqTransport, spec: GroupSpec, own: Direction, text: str) -> None:
    payload = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    control.send(Frame(_id(control, spec, own), 0, torch.uint8, (payload.numel(),), payload))


def _ask(control: ZmqTransport, spec: GroupSpec, own: Direction) -> tuple[str, int]:
    """IP address and port that the peer says; port 0 where it says none."""
    control.expect(_id(control, spec, Direction(1 - own)), _MAX_ADDRESS_NBYTES)
    try:
        text = bytes(control.recv(_CONNECT_S).payload.numpy()).decode("ascii", "replace")
    except TimeoutError:
        raise PeerLostError(f"{control}: said no address for its process group in {_CONNECT_S:g} s") from None
    try:
        host, port = (text, 0) if _is_ip(text) else parse_address(text, str(control))
    except UserError:
        host, port = "", 0
    if not _is_ip(host):
        raise RemoteProtocolError(f"{control}: said {text!a} where the address of a process group was next")
    return host, port


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
