"""What one training step puts on the wire, known before it runs: codecs tell their lengths beforehand.

Counted are payloads and frame headers. Acknowledgements, heartbeats, control messages, what TCP/IP adds and
what is sent again after a loss come on top; evaluations send activations of their own.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tahq.comm.group.ends import ANNOUNCEMENT_NBYTES
from tahq.comm.host_shaping import host_shaping
from tahq.comm.link.frame import HEADER_NBYTES, Direction
from tahq.comm.network_model import GOODPUT_SHARE
from tahq.config.cluster import ClusterConfig
from tahq.models.model_spec import ModelSpec
from tahq.pipeline.schedule.schedule import ActionKind, Schedule
from tahq.plan.simulate.costs import Costs, CutCosts, HostCosts
from tahq.plan.simulate.simulator import simulate
from tahq.quant import get_codec
from tahq_netem.network.description import NetworkPlan, plan_network


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Rates by stage in bit/s of a worker's own bytes; inf: not shaped.

    `longest_delay_s` is one-way, of any link between neighbours; `caps` are of pairs of stages, below what
    their hosts have.
    """

    up: tuple[float, ...]
    down: tuple[float, ...]
    longest_delay_s: float
    caps: Mapping[tuple[int, int], float]

    @property
    def is_shaped(self) -> bool:
        """Whether anything is."""
        rates = (*self.up, *self.down, *self.caps.values())
        return self.longest_delay_s > 0 or min(rates) < math.inf

    def rate(self, source: int, target: int) -> float:
        """What a flow between two stages may have if it is alone."""
        return min(self.up[source], self.down[target], self.caps.get((source, target), math.inf))


def link_speeds(config: ClusterConfig) -> LinkSpeeds:
    """The speeds of a configuration without a profile, its caps kept.

    Raises:
        ConfigError: a cap is a share of a rate that is not known.
    """
    stages, links = config.pipeline.stages, config.links
    own = [host_shaping(links, config.hosts, stage, stages) for stage in range(stages)]
    network = LinkSpeeds((math.inf,) * stages, (math.inf,) * stages, links.delay, {})
    if config.hosts == "namespaces":
        network = _of_network(plan_network(links.network(stages)))
    up = tuple(min(rate, shaping.up_bits_per_s) for rate, shaping in zip(network.up, own, strict=True))
    down = tuple(min(rate, shaping.down_bits_per_s) for rate, shaping in zip(network.down, own, strict=True))
    return replace(network, up=up, down=down)


def _of_network(plan: NetworkPlan) -> LinkSpeeds:
    stage_of = {host: stage for stage, host in enumerate(plan.hosts)}
    links = [path for path in plan.paths if abs(stage_of[path[0]] - stage_of[path[1]]) == 1]
    shapes = [plan.host_shapes[host] for host in plan.hosts]
    return LinkSpeeds(
        up=tuple(_own_bytes(shape.up_bits_per_s) for shape in shapes),
        down=tuple(_own_bytes(shape.down_bits_per_s) for shape in shapes),
        longest_delay_s=max((plan.paths[path].delay_s for path in links), default=0.0),
        caps={
            (stage_of[source], stage_of[target]): _own_bytes(path.rate_bits_per_s)
            for (source, target), path in plan.paths.items()
            if path.rate_bits_per_s is not None
        },
    )


def _own_bytes(rate_bits_per_s: float | None) -> float:
    return GOODPUT_SHARE * rate_bits_per_s if rate_bits_per_s else math.inf


@dataclass(frozen=True, slots=True)
class Flow:
    """The frames of one step that cross one link one way; all have the same length."""

    link: int
    is_tie: bool
    """Whether it is the gradient of the tied embedding, once a step, and not micro-batches across a cut."""
    source: int
    target: int
    direction: Direction
    codec: str
    num_frames: int
    num_elements: int
    payload_nbytes: int
    """Of one frame."""
    frame_nbytes: int
    """The same with its headers, one a piece."""

    @property
    def step_nbytes(self) -> int:
        """Of all frames of a step."""
        return self.num_frames * self.frame_nbytes

    @property
    def bits_per_element(self) -> float:
        """Payload alone, as metrics.jsonl has it."""
        return 8 * self.payload_nbytes / self.num_elements


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """What a stage's host sends and receives in a step, in bytes."""

    stage: int
    sent_nbytes: int
    received_nbytes: int

    def seconds(self, up_bits_per_s: float, down_bits_per_s: float) -> float:
        """Least time for it at these rates."""
        return max(8 * self.sent_nbytes / up_bits_per_s, 8 * self.received_nbytes / down_bits_per_s)


def step_flows(config: ClusterConfig, spec: ModelSpec) -> tuple[Flow, ...]:
    """Every link and direction, cuts first, then the link of tied embeddings if they are kept in step."""
    return (*_cut_flows(config, spec), *_tie_flows(config, spec))


def _cut_flows(config: ClusterConfig, spec: ModelSpec) -> Iterator[Flow]:
    shape = (config.training.micro_batch, config.data.seq_len, spec.hidden_size)
    num_frames = config.training.num_micro_batches
    stages = config.pipeline.stages
    for cut in range(config.pipeline.num_chunks - 1):
        before, after = cut % stages, (cut + 1) % stages
        ends = {Direction.FORWARD: (before, after), Direction.BACKWARD: (after, before)}
        codecs = {Direction.FORWARD: config.wire.activations, Direction.BACKWARD: config.wire.gradients}
        for direction, codec in codecs.items():
            yield _flow(config, cut, ends[direction], direction, codec, num_frames, shape)


def _tie_flows(config: ClusterConfig, spec: ModelSpec) -> Iterator[Flow]:
    last = config.pipeline.stages - 1
    if config.model.tie != "sync" or last == 0:
        return
    for direction, ends in ((Direction.FORWARD, (0, last)), (Direction.BACKWARD, (last, 0))):
        yield _flow(
            config,
            config.pipeline.num_chunks - 1,
            ends,
            direction,
            "raw:dtype=fp32",
            1,
            (spec.vocab_size, spec.hidden_size),
        )


def _flow(
    config: ClusterConfig,
    link: int,
    ends: tuple[int, int],
    direction: Direction,
    codec: str,
    num_frames: int,
    shape: tuple[int, ...],
) -> Flow:
    payload_nbytes = get_codec(codec).encoded_nbytes(shape)
    return Flow(
        link=link,
        is_tie=link == config.pipeline.num_chunks - 1,
        source=ends[0],
        target=ends[1],
        direction=direction,
        codec=codec,
        num_frames=num_frames,
        num_elements=math.prod(shape),
        payload_nbytes=payload_nbytes,
        frame_nbytes=payload_nbytes + _headers_nbytes(config, ends, payload_nbytes),
    )


def _headers_nbytes(config: ClusterConfig, ends: tuple[int, int], payload_nbytes: int) -> int:
    """Of a frame: one a piece over ZMQ, one in all over a process group."""
    if config.transport_between(*ends) != "zmq":
        return ANNOUNCEMENT_NBYTES
    sender = host_shaping(config.links, config.hosts, ends[0], config.pipeline.stages)
    return HEADER_NBYTES * max(1, math.ceil(payload_nbytes / sender.message_nbytes))


def host_traffic(flows: Iterable[Flow], num_stages: int) -> tuple[HostTraffic, ...]:
    """Flows added up by the hosts whose uplink and downlink they share."""
    flows = list(flows)
    return tuple(
        HostTraffic(
            stage,
            sum(flow.step_nbytes for flow in flows if flow.source == stage),
            sum(flow.step_nbytes for flow in flows if flow.target == stage),
        )
        for stage in range(num_stages)
    )


def wire_only_step_s(config: ClusterConfig, speeds: LinkSpeeds, schedule: Schedule, flows: Sequence[Flow]) -> float:
    """Seconds of a step if computing and coding took none: what schedule, rate and delay alone make of it.

    Simulated with `tahq.plan.simulate.simulator`; the tied embeddings' exchange is not in it.
    """
    nbytes = {(flow.link, flow.direction): float(flow.frame_nbytes) for flow in flows}
    cuts = [
        CutCosts(nbytes[cut, Direction.FORWARD], nbytes[cut, Direction.BACKWARD], latency_s=speeds.longest_delay_s)
        for cut in range(schedule.num_chunks - 1)
    ]
    costs = Costs(
        compute_s={(chunk, kind): 0.0 for chunk in range(schedule.num_chunks) for kind in ActionKind},
        cuts=cuts,
        hosts=[HostCosts(up, down) for up, down in zip(speeds.up, speeds.down, strict=True)],
        commit_s=2 * speeds.longest_delay_s,
        piece_nbytes=config.links.piece,
    )
    return simulate(schedule, costs).step_time_s
