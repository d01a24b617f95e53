"""Where a worker is: what its command line says, where it listens, and the sockets that links go over."""

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tahq.comm.config import host_shaping
from tahq.comm.control.messages import Assign, LinkState, Message, NotKept
from tahq.comm.keys import Credentials
from tahq.comm.link.frame_log import FrameLog
from tahq.comm.link.inbound import memory_for
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.addresses import format_address, local_address_towards
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint
from tahq.comm.zmq.endpoint_loop import Trouble
from tahq.config.cluster import ClusterConfig
from tahq.errors import TahqError, UserError

log = logging.getLogger(__name__)

Send = Callable[[Message], None]
COPY_RATE_SHARE = 0.05
"""Share of this host's configured receiving rate that copies of checkpoints may take."""
COPY_RATE_BITS_PER_S = 10e6
"""Rate of copies where no rate is configured."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker is told on its command line; all else comes from the coordinator.

    `stage` -1 takes any that is free; `peer` is the coordinator's host:port; `advertise` may be
    `none` for a host that can only dial out. Processes with the same `worker_id` follow each other; with `takeover`
    this one takes its stage from its holder. Without `credentials` there is no CURVE. A `spare` waits for the
    stage of a host that is lost; one that `stands_by` wants its stage back, and becomes a spare if another has it.
    One that `replaces_host` was started with --takeover, perhaps on another machine than its stage was planned for.
    """

    stage: int
    peer: str
    bind: str | None = None
    advertise: str | None = None
    device: str | None = None
    worker_id: str = ""
    takeover: bool = False
    credentials: Credentials | None = None
    spare: bool = False
    stands_by: bool = False
    replaces_host: bool = False


def open_endpoint(
    options: WorkerOptions, assign: Assign, config: ClusterConfig, device: torch.device, send: Send
) -> ZmqEndpoint:
    """The sockets of a stage's links; trouble with a link or its frame log is reported with `send`.

    Raises:
        UserError: the address is malformed or in use.
    """
    stage = assign.stage

    def report(message: Message) -> None:
        with suppress(TahqError):  # a coordinator that is lost ends the run anyway
            send(message)

    def on_trouble(trouble: Trouble) -> None:
        spec, figures = trouble.spec, (trouble.lasted_s, trouble.num_sent_again)
        report(LinkState(stage, spec.link, spec.peer_stage, trouble.reason, *figures))

    bind, advertise = listening_addresses(options, config, stage)
    return ZmqEndpoint(
        PeerIdentity(assign.run_id, 0, stage, assign.config_hash),
        EndpointSettings(
            bind=bind,
            advertise=advertise,
            shaping=host_shaping(config.links, config.hosts, stage, config.pipeline.stages),
            peer_timeout_s=config.run.peer_timeout,
            heartbeat_s=config.run.peer_timeout / 5,
            give_up_s=config.run.give_up,
            first=config.links.first,
            connections=config.links.connections,
            allocate=memory_for(device),
            keys=options.credentials.own if options.credentials is not None else None,
            on_trouble=on_trouble,
            frame_log=_frame_logs(config, stage, lambda link, reason: report(NotKept(stage, link, reason))),
        ),
    )


def _frame_logs(
    config: ClusterConfig, stage: int, report: Callable[[int, str], None]
) -> Callable[[int], FrameLog] | None:
    """Frame logs for the links of a stage that can reconnect; gloo and NCCL links cannot."""
    if config.run.frame_log == 0 or (config.links.inside != "zmq" and any(config.sites)):
        return None
    frames = Path(config.run.dir) / config.run.name / "frames"
    limit_nbytes = config.run.frame_log // (2 * config.pipeline.chunks)

    def log(link: int) -> FrameLog:
        folder = frames / f"stage-{stage:03d}" / f"link-{link:03d}"
        return FrameLog(folder, link, limit_nbytes, on_given_up=partial(report, link), inside=frames)

    return log


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
            bind, advertise = host.bind, host.advertise or format_address(host.address, 0)
        elif options.advertise is None:
            log.warning(
                "this machine does not have the address %s of hosts.%d, so neighbours are told %s; if they reach it "
                "at another address, give --advertise",
                *(host.address, stage, options.bind or bind),
            )
    return options.bind or bind, options.advertise or advertise


def is_local_address(host: str) -> bool:
    """Whether a name or IP address is one of this machine's: what is sent there then has it as its source, too."""
    try:
        addresses = {str(row[4][0]) for row in socket.getaddrinfo(host, None)}
        return local_address_towards(format_address(host, 9)) in addresses
    except (OSError, UserError):
        return False


def control_shaping(config: ClusterConfig) -> Shaping:
    """Shaping of the path to the coordinator; control messages are small, and do not count towards caps."""
    if config.hosts == "namespaces":
        return Shaping()
    return Shaping(config.links.rate, config.links.delay)


def copy_rate_bits_per_s(config: ClusterConfig, stage: int) -> float:
    """Rate at which a stage's worker fetches copies: `run.copy_rate`, or a share of its host's receiving rate."""
    if config.run.copy_rate is not None:
        return config.run.copy_rate
    rate = host_shaping(config.links, config.hosts, stage, config.pipeline.stages).down_bits_per_s
    return COPY_RATE_SHARE * rate if rate < float("inf") else COPY_RATE_BITS_PER_S
