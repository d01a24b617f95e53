"""Bytes that one training step sends over each link; known before it runs, because codecs predict their lengths.

Counted are payloads and frame headers. Acknowledgements, heartbeats, control messages, TCP/IP headers and
retransmissions are not; evaluations send activations of their own.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tahq.comm.group.ends import ANNOUNCEMENT_NBYTES
from tahq.comm.link.frame import HEADER_NBYTES, Direction
from tahq.comm.network_model import GOODPUT_SHARE
from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import attached_nbytes, boundary_shapes, frozen_chunks
from tahq.models.model_spec import ModelSpec
from tahq.pipeline.schedule.schedule import ActionKind, Schedule
from tahq.plan.cluster_numbers import ClusterNumbers, RelayNumbers, host_labels
from tahq.plan.simulate.costs import Costs, CutCosts, HostCosts
from tahq.plan.simulate.simulator import simulate
from tahq.quant import get_codec
from tahq_netem.network.description import NetworkPlan, plan_network

_TIE_CODEC = "raw:dtype=fp32"


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Rates by stage, in bit/s of a worker's own bytes; inf: not shaped.

    `longest_delay_s` is one-way, of any link between neighbours; `caps` are of pairs of stages, below the rates of
    their hosts.
    """

    up: tuple[float, ...]
    down: tuple[float, ...]
    longest_delay_s: float
    caps: Mapping[tuple[int, int], float]

    @property
    def is_shaped(self) -> bool:
        """Whether any rate or delay is limited."""
        rates = (*self.up, *self.down, *self.caps.values())
        return self.longest_delay_s > 0 or min(rates) < math.inf

    def rate(self, source: int, target: int) -> float:
        """The rate of a flow between two stages if it is alone."""
        return min(self.up[source], self.down[target], self.caps.get((source, target), math.inf))


def link_speeds(config: ClusterConfig) -> LinkSpeeds:
    """The speeds of a configuration without a profile, its caps included."""
    stages, emulate = config.pipeline.num_workers, config.emulate
    own = [config.shaping(stage) for stage in range(stages)]
    network = LinkSpeeds((math.inf,) * stages, (math.inf,) * stages, emulate.delay, {})
    if config.hosts == "namespaces":
        network = _of_network(plan_network(emulate.network(stages)))
    up = tuple(min(rate, shaping.up_bits_per_s) for rate, shaping in zip(network.up, own, strict=True))
    down = tuple(min(rate, shaping.down_bits_per_s) for rate, shaping in zip(network.down, own, strict=True))
    return replace(network, up=up, down=down)


def _of_network(plan: NetworkPlan) -> LinkSpeeds:
    def goodput(bits_per_s: float | None) -> float:
        return GOODPUT_SHARE * bits_per_s if bits_per_s else math.inf

    stage_of = {host: stage for stage, host in enumerate(plan.hosts)}
    paths = {(stage_of[source], stage_of[target]): path for (source, target), path in plan.paths.items()}
    shapes = [plan.host_shapes[host] for host in plan.hosts]
    return LinkSpeeds(
        up=tuple(goodput(shape.up_bits_per_s) for shape in shapes),
        down=tuple(goodput(shape.down_bits_per_s) for shape in shapes),
        longest_delay_s=max((path.delay_s for (a, b), path in paths.items() if abs(a - b) == 1), default=0.0),
        caps={ends: goodput(path.rate_bits_per_s) for ends, path in paths.items() if path.rate_bits_per_s is not None},
    )


@dataclass(frozen=True, slots=True)
class StepFlow:
    """The frames of one step that cross one link in one direction; all have the same length.

    Attributes:
        is_tie: whether it is the gradient of the tied embedding, once per step, and not micro-batches across a cut.
        payload_nbytes: of one frame.
        frame_nbytes: with its headers.
    """

    link: int
    is_tie: bool
    source: int
    target: int
    direction: Direction
    codec: str
    num_frames: int
    num_elements: int
    payload_nbytes: int
    frame_nbytes: int

    @property
    def ends(self) -> tuple[int, int]:
        """Who sends, and who receives."""
        return self.source, self.target

    @property
    def step_nbytes(self) -> int:
        """Bytes of all frames of a step."""
        return self.num_frames * self.frame_nbytes

    @property
    def bits_per_element(self) -> float:
        """Of the payload alone, as in metrics.jsonl."""
        return 8 * self.payload_nbytes / self.num_elements


def step_flows(config: ClusterConfig, spec: ModelSpec) -> tuple[StepFlow, ...]:
    """Every link and direction of one replica: cuts, then the link of tied embeddings if they are synchronised.

    No gradients are sent to chunks in which nothing is trained.
    """
    stages, cuts, wire = config.pipeline.stages, config.pipeline.num_chunks - 1, config.wire
    to_trained, boundary = boundary_shapes(config, spec)
    codecs = {Direction.FORWARD: wire.activations, Direction.BACKWARD: wire.gradients}
    flows: list[StepFlow] = []
    num_frames, num_frozen = config.training.num_micro_batches // config.pipeline.replicas, frozen_chunks(config, spec)
    for cut in range(cuts):
        ends = cut % stages, (cut + 1) % stages
        is_frozen, attached = cut < num_frozen, attached_nbytes(config, spec)
        shapes = boundary if is_frozen else to_trained, boundary
        for flow in _flows(config, cut, ends, codecs, shapes, num_frames, attached):
            has_none = flow.direction is Direction.BACKWARD and is_frozen
            flows.append(replace(flow, num_frames=0) if has_none else flow)
    if config.model.tie == "sync" and stages > 1:
        codecs = dict.fromkeys(codecs, _TIE_CODEC)
        flows += _flows(config, cuts, (0, stages - 1), codecs, ((spec.vocab_size, spec.hidden_size),) * 2, 1)
    return tuple(flows)


def _flows(
    config: ClusterConfig,
    link: int,
    ends: tuple[int, int],
    codecs: Mapping[Direction, str],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    num_frames: int,
    attached: tuple[int, int] = (0, 0),
) -> Iterator[StepFlow]:
    for direction, codec in codecs.items():
        source, target = ends if direction is Direction.FORWARD else ends[::-1]
        shape = shapes[direction]
        payload_nbytes = get_codec(codec).encoded_nbytes(shape) + attached[direction]
        if config.transport_between(source, target) == "zmq":  # a header per piece
            piece = config.shaping(source).message_nbytes
            header_nbytes = HEADER_NBYTES * max(1, math.ceil(payload_nbytes / piece))
        else:
            header_nbytes = ANNOUNCEMENT_NBYTES
        yield StepFlow(
            link=link,
            is_tie=link == config.pipeline.num_chunks - 1,
            source=source,
            target=target,
            direction=direction,
            codec=codec,
            num_frames=num_frames,
            num_elements=math.prod(shape),
            payload_nbytes=payload_nbytes,
            frame_nbytes=payload_nbytes + header_nbytes,
        )


def host_traffic(flows: Sequence[StepFlow], stage: int) -> tuple[int, int]:
    """Bytes that a stage's host sends and receives in a step."""
    sent = sum(flow.step_nbytes for flow in flows if flow.source == stage)
    return sent, sum(flow.step_nbytes for flow in flows if flow.target == stage)


@dataclass(frozen=True, slots=True)
class Relaying:
    """The pairs of stages whose link is known to be relayed, and the host that relays: a stage's, or another."""

    pairs: frozenset[tuple[int, int]] = frozenset()
    stage: int | None = None
    rates: HostCosts = field(default_factory=HostCosts)

    @classmethod
    def of(cls, config: ClusterConfig, figures: ClusterNumbers | None = None) -> "Relaying":
        """Relayed are links of hosts that both only dial out, and those that `figures` were measured so."""
        if config.run.relay == "never" or isinstance(config.hosts, str):
            return cls()
        names = host_labels(config.hosts, config.pipeline.num_workers)
        only_dial_out = {name for name, host in zip(names, config.hosts, strict=True) if host.advertise == "none"}
        measured = {(path.source, path.target) for path in (figures.paths if figures else ()) if path.relayed}
        relay = (figures and figures.relay) or RelayNumbers()
        pairs = frozenset(
            (ends.lower, ends.upper)
            for ends in config.grid.links()
            if only_dial_out.issuperset(both := (names[ends.lower], names[ends.upper]))
            or (both in measured and relay.host not in both)
        )
        stage = names.index(relay.host) if relay.host in names else None
        return cls(pairs, stage, HostCosts(relay.up or math.inf, relay.down or math.inf))


def relayed_nbytes(flows: Sequence[StepFlow], pairs: Collection[tuple[int, int]]) -> int:
    """Bytes per step that the relay's host receives, and sends on, for the links between these pairs of stages."""
    return sum(flow.step_nbytes for flow in flows if not {flow.ends, flow.ends[::-1]}.isdisjoint(pairs))


def wire_only_step_s(
    config: ClusterConfig,
    speeds: LinkSpeeds,
    schedule: Schedule,
    flows: Sequence[StepFlow],
    relaying: Relaying = Relaying(),
) -> float:
    """Seconds of a step with infinitely fast computation and coding; schedule, rates and delays remain.

    Simulated with `tahq.plan.simulate.simulator`, without the exchange of tied embeddings.
    """
    nbytes = {(flow.link, flow.direction): float(flow.frame_nbytes) for flow in flows}
    relayed = {flow.link for flow in flows if flow.ends in relaying.pairs}
    delay_s = speeds.longest_delay_s
    cuts = [
        CutCosts(
            nbytes[cut, Direction.FORWARD],
            nbytes[cut, Direction.BACKWARD],
            latency_s=delay_s,
            is_relayed=cut in relayed,
        )
        for cut in range(schedule.num_chunks - 1)
    ]
    hosts = [HostCosts(up, down) for up, down in zip(speeds.up, speeds.down, strict=True)]
    if relaying.pairs and relaying.stage is not None:
        own, rates = hosts[relaying.stage], relaying.rates
        hosts[relaying.stage] = HostCosts(
            min(own.uplink_bits_per_s, rates.uplink_bits_per_s), min(own.downlink_bits_per_s, rates.downlink_bits_per_s)
        )
    costs = Costs(
        compute_s={(chunk, kind): 0.0 for chunk in range(schedule.num_chunks) for kind in ActionKind},
        cuts=cuts,
        hosts=hosts,
        commit_s=2 * delay_s,
        piece_nbytes=config.links.piece,
        relay=relaying.rates if relaying.stage is None else relaying.stage,
    )
    return simulate(schedule, costs).step_time_s
