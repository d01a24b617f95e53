"""A worker's addresses, the sockets of its links, and the links, which change as the coordinator orders.

The main thread opens the links. Orders arrive in the control thread, which carries them out at once, since the main
thread may be waiting for a frame from the very peer that an order concerns.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from tahq.comm.control.messages import (
    Abandon,
    Assign,
    Hold,
    LinkState,
    Message,
    NotKept,
    Plan,
    Published,
    Relink,
    Relinked,
    Tried,
    TryPeers,
    Widen,
)
from tahq.comm.link.frame_log import FrameLog
from tahq.comm.link.inbound import memory_for
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.relay.tickets import RelayTicket
from tahq.comm.transport import Transport
from tahq.comm.zmq.addresses import format_address, local_address_towards, unless_taken
from tahq.comm.zmq.endpoint import Dial, EndpointSettings, ZmqEndpoint
from tahq.comm.zmq.endpoint_loop import Trouble
from tahq.comm.zmq.transport import Wanted, ZmqTransport
from tahq.config.cluster import ClusterConfig
from tahq.errors import RemoteProtocolError, TahqError, UserError
from tahq.worker.control import WorkerOptions

log = logging.getLogger(__name__)

Send = Callable[[Message], None]
TRY_S = 5.0
"""How long a peer may take to answer when it is found out whether it can be dialled."""
COPY_RATE_SHARE = 0.05
"""Share of this host's configured receiving rate that copies of checkpoints may take."""
COPY_RATE_BITS_PER_S = 10e6
"""Rate of copies where no rate is configured."""


def open_endpoint(
    options: WorkerOptions, assign: Assign, config: ClusterConfig, device: torch.device, send: Send
) -> ZmqEndpoint:
    """The sockets of a stage's links; trouble with a link or its frame log is reported with `send`.

    Raises:
        UserError: the address is malformed or in use.
    """
    stage, run = assign.stage, config.run
    report = partial(_try_to_send, send)

    def on_trouble(trouble: Trouble) -> None:
        spec, figures = trouble.spec, (trouble.lasted_s, trouble.num_sent_again)
        report(LinkState(stage, spec.link, spec.peer_stage, trouble.reason, *figures))

    def frame_log(link: int) -> FrameLog:
        frames = Path(run.dir) / run.name / "frames"
        return FrameLog(
            frames / f"stage-{stage:03d}" / f"link-{link:03d}",
            link,
            run.frame_log // (2 * config.pipeline.chunks + config.pipeline.replicas - 1),
            on_given_up=lambda reason: report(NotKept(stage, link, reason)),
            inside=frames,
        )

    # links over gloo and NCCL cannot reconnect, so frames that were sent need not be kept for a new process
    can_reconnect = config.links.inside == "zmq" or not any(config.sites)
    bind, advertise = listening_addresses(options, config, stage)
    endpoint = ZmqEndpoint(
        PeerIdentity(assign.run_id, 0, stage, assign.config_hash),
        EndpointSettings(
            bind=bind,
            advertise=advertise,
            shaping=config.shaping(stage),
            peer_timeout_s=run.peer_timeout,
            heartbeat_s=run.peer_timeout / 5,
            give_up_s=run.give_up,
            first=config.links.first,
            connections=config.links.connections,
            allocate=memory_for(device),
            keys=options.credentials.own if options.credentials is not None else None,
            on_trouble=on_trouble,
            frame_log=frame_log if run.frame_log and can_reconnect else None,
        ),
    )
    if options.credentials is not None:
        endpoint.allow([options.credentials.coordinator])  # the run's owner may fetch checkpoint files
    return endpoint


def _try_to_send(send: Send, message: Message) -> None:
    with suppress(TahqError):  # the loss of the coordinator is noticed elsewhere, and ends the run
        send(message)


def listening_addresses(options: WorkerOptions, config: ClusterConfig, stage: int) -> tuple[str, str | None]:
    """Address to bind, and address that neighbours dial if it differs; port 0 of the latter stands for the bound port.

    The command line comes first, then the stage's `hosts:` entry, then the address from which this machine reaches the
    coordinator. The entry describes the machine that was planned for the stage: a spare, or a worker that takes the
    stage over on a machine without the entry's address, does not use it.
    """
    bind, advertise = format_address(local_address_towards(options.peer), 0), None
    if isinstance(config.hosts, list) and not options.spare:
        host = config.hosts[stage]
        if not options.replaces_host or is_local_address(host.address):
            bind, advertise = free_bind(config, stage), host.advertise or format_address(host.address, 0)
        elif options.advertise is None:
            log.warning(
                "this machine does not have the address %s of hosts.%d, so neighbours will dial %s; if they reach "
                "it at another address, give --advertise",
                *(host.address, stage, options.bind or bind),
            )
    return options.bind or bind, options.advertise or advertise


def free_bind(config: ClusterConfig, stage: int) -> str:
    """`ClusterConfig.worker_bind`, with any free port where the one after `run.base_port` is taken.

    A lost worker may hold it for some seconds after its successor was started.
    """
    bind = config.worker_bind(stage)
    assert isinstance(config.hosts, list), "worker_bind is for listed hosts"
    return bind if bind == config.hosts[stage].bind else unless_taken(bind)


def is_local_address(host: str) -> bool:
    """Whether a name or IP address is one of this machine's; traffic to it then has it as its source, too."""
    try:
        addresses = {str(row[4][0]) for row in socket.getaddrinfo(host, None)}
        return local_address_towards(format_address(host, 9)) in addresses
    except (OSError, UserError):
        return False


def control_shaping(config: ClusterConfig) -> Shaping:
    """Shaping of the path to the coordinator; control messages are small, and do not count towards caps."""
    return Shaping() if config.hosts == "namespaces" else Shaping(config.emulate.rate, config.emulate.delay)


def copy_rate_bits_per_s(config: ClusterConfig, stage: int) -> float:
    """Rate at which a stage's worker fetches copies: `run.copy_rate`, or a share of its host's receiving rate."""
    if config.run.copy_rate is not None:
        return config.run.copy_rate
    rate = config.shaping(stage).down_bits_per_s
    return COPY_RATE_SHARE * rate if rate < float("inf") else COPY_RATE_BITS_PER_S


def try_peers(endpoint: ZmqEndpoint, stage: int, order: TryPeers, answer: Send) -> None:
    """Dial all of these peers in threads of their own, which report the outcomes with `answer`."""

    def try_one(peer_stage: int, address: str, key: str) -> None:
        try:
            failure = endpoint.dial_failure(address, key, TRY_S)
        except TahqError as error:
            failure = str(error)
        _try_to_send(answer, Tried(stage, peer_stage, address, failure))

    for peer_stage, address, key in order.peers:
        peer = (int(peer_stage), str(address), str(key))
        threading.Thread(target=try_one, args=peer, name=f"tahq-try-{peer_stage}", daemon=True).start()


LinkOrder = Relink | Widen | Hold | Abandon | Published
"""Orders about links."""
OpenGroup = Callable[[ZmqTransport, str, str], Transport]
"""(link, address of its peer's process group or "", gloo or nccl) -> the transport that replaces the link."""


class WorkerLinks:
    """Links to the neighbours, opened by the main thread; orders that arrive earlier are carried out then.

    `answer` sends an answer to the coordinator, from any thread; `relay_host` is where this worker reaches its host.
    """

    def __init__(self, endpoint: ZmqEndpoint, stage: int, answer: Send, relay_host: str) -> None:
        self._relay_host = relay_host
        self._endpoint = endpoint
        self._stage = stage
        self._answer = answer
        self._lock = threading.Lock()
        self._epoch = 0
        self._early: list[LinkOrder] | None = []
        """Orders that arrived before the links were open; None: they are open."""

    def open(self, plan: Plan, timeout_s: float, open_group: OpenGroup) -> dict[int, Transport]:
        """Open the plan's links and wait until all are connected; by number.

        Raises:
            PeerLostError: a neighbour did not connect in time; the message names it.
            RemoteProtocolError: the plan is invalid, or a peer has another identity than planned.
        """
        wanted = _wanted(plan.wanted)
        self._epoch = plan.epoch
        self._endpoint.set_epoch(plan.epoch, plan.start_step)
        links: dict[int, ZmqTransport] = {}
        for link, peer_stage, peer_name, dial, _, peer_key in plan.links:
            names = (int(link), int(peer_stage), str(peer_name), self._dial(str(dial)), str(peer_key))
            links[int(link)] = self._endpoint.open_link(*names, wanted.get(int(link), Wanted()))
        with self._lock:
            early, self._early = self._early or [], None
            for order in early:
                self._obey(order)
        self._endpoint.wait_connected(timeout_s)
        return {
            int(number): links[int(number)] if kind == "zmq" else open_group(links[int(number)], str(dial), str(kind))
            for number, _, _, dial, kind, _ in plan.links
        }

    def obey(self, order: LinkOrder) -> None:
        """Carry out an order, now or when the links are open."""
        with self._lock:
            if self._early is None:
                self._obey(order)
            else:
                self._early.append(order)

    def report_lacking(self, link: int) -> None:
        """Tell the coordinator that the log of this link lacks frames that a neighbour needs again."""
        _try_to_send(self._answer, Relinked(self._stage, self._epoch, [link]))

    def _obey(self, order: LinkOrder) -> None:
        if isinstance(order, Relink):
            self._relink(order)
        elif isinstance(order, Widen):
            self._endpoint.widen(order.link, _through(order.through))
        elif isinstance(order, Hold):
            for link in order.links:
                self._endpoint.hold(link)
        elif isinstance(order, Abandon):
            for link in order.links:
                self._endpoint.abandon_step(link, order.step)
        else:
            self._endpoint.free_logs(order.base, order.step)

    def _relink(self, order: Relink) -> None:
        self._epoch = order.epoch
        wanted = _wanted(order.wanted)
        lacking = [link for link, row in wanted.items() if not self._endpoint.has_log(link, row.since)]
        answer = partial(_try_to_send, self._answer, Relinked(self._stage, order.epoch, lacking))
        if lacking:
            answer()
            return
        for link, _, peer_name, dial, _, peer_key in order.links:
            row = wanted[int(link)]
            end = (str(peer_name), self._dial(str(dial)), row, str(peer_key))
            self._endpoint.relink(int(link), order.epoch, *end)
        self._endpoint.after_that(answer)  # the new process may dial at once

    def _dial(self, planned: str) -> Dial:
        """What a plan says to dial, with the coordinator's host as this worker reaches it for the relay's."""
        return RelayTicket.planned(planned, self._relay_host) if "/" in planned else planned


def _wanted(rows: Iterable[Sequence[int]]) -> dict[int, Wanted]:
    try:
        return {link: Wanted(since, evaluations, _through(through)) for link, since, evaluations, through in rows}
    except ValueError as error:
        raise RemoteProtocolError(f"the coordinator sent malformed rows of wanted frames: {error}") from error


def _through(step: int) -> int | None:
    return None if step < 0 else step
