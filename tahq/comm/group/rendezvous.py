"""Makes a process group of the two ends of a link that is connected over ZMQ.

The end that dialled says from which of its addresses it dialled; the other one opens a TCPStore on the address
that its own machine has towards that, and says where. Both then connect the lanes, in the same order. So no
interface has to be configured, and nothing listens outside the network of the link.
"""

import ipaddress
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch

from tahq.comm.group.gloo_group import GlooGroup, GroupBrokenError, PayloadPath, Store, c10d
from tahq.comm.group.lane import Lane
from tahq.comm.group.nccl_path import NcclPath
from tahq.comm.group.transport import GroupTransport, Lanes
from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.addresses import format_address, local_address_towards, parse_address
from tahq.comm.zmq.transport import ZmqTransport
from tahq.errors import PeerLostError, RemoteProtocolError, UserError

Backend = Literal["gloo", "nccl"]
_MAX_ADDRESS_NBYTES = 128
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
    """Our address towards the peer, and the store that both ends share."""
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
    path: PayloadPath = group
    if spec.backend == "nccl":
        path = NcclPath(store, f"nccl-{direction.name}", rank, spec.device, sends=sends, turn=turn)
    return Lane(group, path, spec.identity, control.link, str(control), store)


# -- messages over ZMQ: an address as text, in a frame of purpose GROUP ---------------------------


def _id(control: ZmqTransport, spec: GroupSpec, direction: Direction) -> LogicalId:
    return LogicalId(spec.identity.run_id, 0, 0, Purpose.GROUP, 0, control.link, direction)


def _tell(control: ZmqTransport, spec: GroupSpec, own: Direction, text: str) -> None:
    payload = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    control.send(Frame(_id(control, spec, own), 0, torch.uint8, (payload.numel(),), payload))


def _ask(control: ZmqTransport, spec: GroupSpec, own: Direction) -> tuple[str, int]:
    """The peer's IP address and port; port 0 if it sends none."""
    control.expect(_id(control, spec, Direction(1 - own)), _MAX_ADDRESS_NBYTES)
    try:
        text = bytes(control.recv(_CONNECT_S).payload.numpy()).decode("ascii", "replace")
    except TimeoutError:
        raise PeerLostError(f"{control}: sent no address for its process group in {_CONNECT_S:g} s") from None
    try:
        host, port = (text, 0) if _is_ip(text) else parse_address(text, str(control))
    except UserError:
        host, port = "", 0
    if not _is_ip(host):
        raise RemoteProtocolError(f"{control}: sent {text!a}; expected the address of its process group")
    return host, port


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
