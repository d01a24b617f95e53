"""What ``--dry-run`` prints: layers, memory, traffic and schedule of a run that is not started.

Nothing is allocated and nothing contacted; the model is on the meta device. Every figure is either exact
(layers, parameters, bytes on the wire) or says what it leaves out. The text depends on the configuration
alone, apart from `device: auto`, and is at most 100 columns wide.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tahq.comm.link.frame import Direction
from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import chunks_of, stage_estimate
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.memory.estimate import StageMemory
from tahq.models.costs import counted_costs
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import BlockRange, divide
from tahq.models.slice import slice_parameters
from tahq.pipeline.schedule.schedule import ActionKind, Schedule
from tahq.plan.simulate.simulator import draw_grid
from tahq.quant import get_codec
from tahq.quant.aqsgd.codec import AqsgdCodec
from tahq.quant.config import WireConfig
from tahq.units import format_rate, format_size
from tahq_launch.network_text import describe_network
from tahq_launch.plan.step_traffic import Flow, LinkSpeeds, host_traffic, link_speeds, step_flows, wire_only_step_s
from tahq_launch.start.codec_choice import codec_options
from tahq_launch.tables import plain_table

WIDTH = 100
_MAX_PICTURES = 3


def dry_run(config: ClusterConfig) -> str:
    """Describe a run without starting it.

    Args:
        config: resolved; of one that is not, layers are divided by counted cost.

    Returns:
        Lines joined by newlines.

    Raises:
        UserError: whatever in the configuration does not fit the model or the tokenizer, or `wire.replay` is of no use.
    """
    plan = _Plan.make(config)
    codec_options(config, {})  # as a run would begin with: that `wire.replay` can be read
    remembered = codec_memory(config, plan.spec)
    parts = [_header(plan), _stages(plan), _memory(plan), describe_network(config), _links(plan), remembered]
    parts += [_hosts(plan), _grid(plan)]
    return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all parts of the text are made of."""

    config: ClusterConfig
    spec: ModelSpec
    ranges: tuple[BlockRange, ...]
    schedule: Schedule
    flows: tuple[Flow, ...]
    memory: tuple[StageMemory, ...]
    speeds: LinkSpeeds

    @classmethod
    def make(cls, config: ClusterConfig) -> "_Plan":
        spec = _spec(config)
        costs = counted_costs(spec, config.data.seq_len)
        ranges = divide(costs, config.pipeline.num_chunks, config.pipeline.layers)
        schedule = config.pipeline.actions(config.training.num_micro_batches)
        flows = step_flows(config, spec)
        memory = tuple(
            stage_estimate(
                config, spec, stage, bf16=computes_in_bf16(config.training.precision, _device(config, stage))
            )
            for stage in range(schedule.num_stages)
        )
        return cls(config, spec, ranges, schedule, flows, memory, link_speeds(config))


def _spec(config: ClusterConfig) -> ModelSpec:
    if config.model.path is not None or config.model.vocab_size is not None:
        vocab_size = config.model.vocab_size or 1
    else:
        vocab_size = load_tokenizer(config.data).vocab_size
    return load_spec(config.model, vocab_size=vocab_size, seq_len=config.data.seq_len)


def computes_in_bf16(precision: str, device: str) -> bool:
    """Whether a stage computes under bf16 autocast: `auto` does on CUDA."""
    return precision == "bf16" or (precision == "auto" and device.startswith("cuda"))


def _device(config: ClusterConfig, stage: int) -> str:
    """Where a stage would compute; `auto` is taken for what this machine has."""
    host = config.hosts[stage].device if isinstance(config.hosts, list) else "auto"
    device = host if host != "auto" else config.run.device
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


# -- the parts of the text -----------------------------------------------------------------------


def _header(plan: _Plan) -> str:
    training, spec, data = plan.config.training, plan.spec, plan.config.data
    length = f"{training.steps} steps" if training.steps is not None else f"{training.epochs:g} epochs"
    num_parameters = sum(_num_parameters(plan, stage) for stage in range(len(plan.memory)))
    source = str(spec.folder) if spec.folder is not None else f"{spec.family} with random weights"
    lines = [
        f"run {plan.config.run.name}: {source}, {num_parameters:,} parameters",
        f"  {spec.num_layers} layers, hidden size {spec.hidden_size}, vocabulary {spec.vocab_size}, "
        f"sequences of {data.seq_len} tokens",
        f"  {length} of {training.global_batch} samples = {training.num_micro_batches} micro-batches of "
        f"{training.micro_batch}; {training.optimizer}, learning rate {training.lr:g}",
    ]
    return "\n".join(lines)


def _stages(plan: _Plan) -> str:
    counts = [_num_parameters(plan, stage) for stage in range(len(plan.memory))]
    rows = [
        [
            str(stage),
            _host_name(plan.config, stage),
            _device(plan.config, stage),
            "bf16" if computes_in_bf16(plan.config.training.precision, _device(plan.config, stage)) else "fp32",
            " | ".join(_layers(plan.ranges[chunk]) for chunk in chunks_of(plan.config, stage)),
            f"{count:,}",
            f"{count / sum(counts):.1%}",
        ]
        for stage, count in enumerate(counts)
    ]
    titles = ["stage", "host", "device", "in", "layers", "parameters", "share"]
    return "Layers\n" + plain_table(titles, rows, left=(1, 2, 3, 4))


def _num_parameters(plan: _Plan, stage: int) -> int:
    """Of all chunks of a stage, whatever their weights are kept in."""
    chunks = (slice_parameters(plan.spec, plan.ranges[chunk]).values() for chunk in chunks_of(plan.config, stage))
    return sum(math.prod(shape) for shapes in chunks for shape in shapes)


def _host_name(config: ClusterConfig, stage: int) -> str:
    if config.hosts == "namespaces":
        return f"host{stage}"
    name = config.hosts[stage].address if isinstance(config.hosts, list) else config.hosts
    return name if len(name) <= 24 else f"{name[:23]}…"


def _layers(blocks: BlockRange) -> str:
    span = f"{blocks.start}-{blocks.stop - 1}" if len(blocks) > 1 else str(blocks.start)
    return f"{'embedding + ' if blocks.first else ''}{span}{' + norm, head' if blocks.last else ''}"


def _memory(plan: _Plan) -> str:
    kinds = list(plan.memory[0].kinds())
    rows = [
        [
            str(stage),
            str(plan.schedule.max_in_flight(stage)),
            *map(format_size, memory.kinds().values()),
            format_size(memory.total),
        ]
        for stage, memory in enumerate(plan.memory)
    ]
    note = "estimated from sizes; Python, torch, data and fragmentation come on top"
    table = f"Memory at the peak ({note})\n" + plain_table(["stage", "in flight", *kinds, "total"], rows)
    copies = [_snapshot_copies(plan)] if plan.config.run.snapshot_every is not None else []
    return "\n".join([table, *copies, *_too_large(plan)])


def _too_large(plan: _Plan) -> Iterator[str]:
    """A warning for each memory of this machine that the stages on it exceed together."""
    if not isinstance(plan.config.hosts, str):
        return
    needed: Counter[str] = Counter()
    for stage, memory in enumerate(plan.memory):
        needed[_placed(_device(plan.config, stage), stage)] += memory.total
    for device, nbytes in needed.items():
        there = installed_bytes(device)
        if there and nbytes > there:
            owner = "this machine" if device == "cpu" else device
            yield (
                f"  warning: the stages on {owner} together need {format_size(nbytes)} or more; "
                f"it has {format_size(there)}"
            )


def _placed(device: str, stage: int) -> str:
    """A device with its number, as `compute_device` chooses it for `auto`."""
    if device == "cuda":
        return f"cuda:{stage % max(1, torch.cuda.device_count())}"
    return device


def installed_bytes(device: str) -> int:
    """Memory of a device of this machine; 0: there is no such device."""
    if device == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    index = int(device.partition(":")[2])
    return int(torch.cuda.get_device_properties(index).total_memory) if index < torch.cuda.device_count() else 0


def _snapshot_copies(plan: _Plan) -> str:
    """What snapshots take of the hosts' memory on top."""
    num_copies = plan.config.run.snapshot_buffers
    if num_copies == 0:
        return "  snapshots: nothing more, training waits while they are written"
    largest = max(memory.snapshot for memory in plan.memory)
    copies = "one copy" if num_copies == 1 else f"at most {num_copies} copies"
    return f"  snapshots: {copies} in each host's memory while they are written, up to {format_size(largest)} each"


def _links(plan: _Plan) -> str:
    if not plan.flows:
        return "One stage: nothing crosses a wire."
    rates = [plan.speeds.rate(flow.source, flow.target) for flow in plan.flows]
    titles = ["link", "from-to", "carries", "frames", "payload each", "bits/element", "bytes per step"]
    titles += [_seconds_title(plan)] if min(rates) < math.inf else []
    rows = [_link_row(flow, rate, len(titles)) for flow, rate in zip(plan.flows, rates, strict=True)]
    total = sum(flow.step_nbytes for flow in plan.flows)
    lines = [
        "Bytes per step on every link (frame headers included; acknowledgements and TCP/IP come on top)",
        plain_table(titles, rows, left=(1, 2)),
        *_codecs(plan.config.wire),
        f"  together {format_size(total)} a step" + _whole_run(plan, total),
    ]
    lines += [_transports(plan)] if plan.config.links.inside != "zmq" else []
    return "\n".join(lines)


def _codecs(wire: WireConfig) -> list[str]:
    """The codecs that a run begins with, and what they may change to."""
    rungs = wire.rungs()
    return [
        f"  {direction}: {spec}" + (f", to follow the link among {', '.join(rungs[direction])}" if wire.follow else "")
        for direction, spec in wire.specs().items()
    ]


def _transports(plan: _Plan) -> str:
    """Which links lie inside a site, and so do not go over ZMQ."""
    config = plan.config
    inside = {flow.link for flow in plan.flows if config.transport_between(flow.source, flow.target) != "zmq"}
    between = {flow.link for flow in plan.flows} - inside
    text = f"  {config.links.inside} carries link{'s' * (len(inside) > 1)} {', '.join(map(str, sorted(inside)))}"
    return f"{text}, ZMQ {', '.join(map(str, sorted(between)))}" if between else text


def _seconds_title(plan: _Plan) -> str:
    rate = _common_rate(plan)
    return "s alone" if rate is None else f"s at {format_rate(rate)}"


def _common_rate(plan: _Plan) -> float | None:
    """What every host is held to in both directions, if it is `links.rate` alone."""
    rates = {*plan.speeds.up, *plan.speeds.down}
    return plan.config.links.rate if plan.config.hosts != "namespaces" and rates == {plan.config.links.rate} else None


def _link_row(flow: Flow, rate_bits_per_s: float, num_cells: int) -> list[str]:
    carries = "activations" if flow.direction is Direction.FORWARD else "gradients"
    row = [
        str(flow.link),
        f"{flow.source} → {flow.target}",
        "tied embedding" if flow.is_tie else carries,
        str(flow.num_frames),
        f"{flow.payload_nbytes:,}",
        f"{flow.bits_per_element:.3f}",
        f"{flow.step_nbytes:,}",
        f"{8 * flow.step_nbytes / rate_bits_per_s:.3f}",
    ]
    return row[:num_cells]


def _whole_run(plan: _Plan, step_nbytes: int) -> str:
    steps = plan.config.training.steps
    return f", {format_size(steps * step_nbytes)} in {steps} steps" if steps is not None else ""


def _hosts(plan: _Plan) -> str:
    """What rate and delay make of the traffic; nothing without either of them."""
    speeds = plan.speeds
    if not plan.flows or not speeds.is_shaped:
        return ""
    lines = []
    if min(*speeds.up, *speeds.down) < math.inf:
        lines += [_traffic_title(plan), _host_table(plan)]
    wire_s = wire_only_step_s(plan.config, speeds, plan.schedule, plan.flows)
    lines.append(
        f"  if computing took no time, a step would take {wire_s:.3f} s: schedule, rate and a delay of "
        f"{1000 * speeds.longest_delay_s:g} ms,\n  simulated"
    )
    return "\n".join(lines)


def _traffic_title(plan: _Plan) -> str:
    rate = _common_rate(plan)
    if rate is None:
        in_namespaces = plan.config.hosts == "namespaces"
        held_to = "at 1448/1514 of its rates" if in_namespaces else "at its rate or its cap"
        return f"Traffic of each host a step, all its links together, {held_to}"
    return f"Traffic of each host a step, both links together, at {format_rate(rate)} each way"


def _host_table(plan: _Plan) -> str:
    speeds = plan.speeds
    rows = [
        [
            str(host.stage),
            f"{host.sent_nbytes:,}",
            f"{host.received_nbytes:,}",
            f"{host.seconds(speeds.up[host.stage], speeds.down[host.stage]):.3f}",
        ]
        for host in host_traffic(plan.flows, plan.config.pipeline.stages)
    ]
    return plain_table(["stage", "bytes sent", "bytes received", "s at least"], rows)


def _grid(plan: _Plan) -> str:
    title = f"Schedule {plan.schedule.name} (0F2: chunk 0, forward, micro-batch 2; {_drawn(plan.schedule)})"
    column = 1 + max(len(str(action)) for row in plan.schedule.actions for action in row)
    return f"{title}\n{_wrapped(draw_grid(plan.schedule), len('stage 0  '), column)}"


def _drawn(schedule: Schedule) -> str:
    if any(action.kind is ActionKind.I for row in schedule.actions for action in row):
        return "I and W: gradient of the input, of the weights"
    return "a backward, B, is drawn twice as long"


def _wrapped(grid: str, margin: int, column: int) -> str:
    """A picture that is too wide, in pieces below each other, cut between its columns."""
    lines = grid.splitlines()
    piece = (WIDTH - margin) // column * column
    starts = range(margin, max(map(len, lines)), piece)
    pictures = ["\n".join((line[:margin] + line[at : at + piece]).rstrip() for line in lines) for at in starts]
    shown = "\n\n".join(pictures[:_MAX_PICTURES])
    left = len(pictures) - _MAX_PICTURES
    return f"{shown}\n({left} more pictures of this width not shown)" if left > 0 else shown


def codec_memory(config: ClusterConfig, spec: ModelSpec) -> str:
    """The part of a dry run about codecs that remember samples; empty if there is none.

    Raises:
        DataError: the data cannot be read here.
    """
    codec, stages = get_codec(config.wire.activations), config.pipeline.stages
    if not isinstance(codec, AqsgdCodec) or not codec.is_stateful or stages == 1:
        return ""
    shape = (config.training.micro_batch, config.data.seq_len, spec.hidden_size)
    num_samples = seen_samples(config)
    rows = []
    last = config.pipeline.num_chunks - 1
    for stage in range(stages):
        chunks = range(stage, last + 1, stages)
        num_ends = sum((chunk > 0) + (chunk < last) for chunk in chunks)
        nbytes = num_ends * codec.predicted_state_nbytes(shape, num_samples)
        rows.append([str(stage), str(num_ends), f"{nbytes:,}", format_size(nbytes)])
    a_sample, later = codec.predicted_state_nbytes(shape, 1), codec.revisit_nbytes(shape)
    return "\n".join(
        [
            f"What {codec.spec} remembers at the ends of the cuts, on each host, and in every snapshot",
            plain_table(["stage", "ends of cuts", "bytes", ""], rows),
            f"  {num_samples:,} samples of {format_size(a_sample)}, once all have been seen",
            f"  the payloads above are of first visits; a later one takes {later:,} bytes each, "
            f"{8 * later / math.prod(shape):.3f} bits/element",
        ]
    )


def seen_samples(config: ClusterConfig) -> int:
    """Training samples that a run comes to see: an epoch's, or fewer in a run that is shorter than an epoch."""
    num_samples = load_dataset(config.data, load_tokenizer(config.data)).num_train_samples
    steps, epochs = config.training.steps, config.training.epochs
    if steps is not None:
        return min(num_samples, steps * config.training.global_batch)
    return min(num_samples, math.ceil((epochs or 0.0) * num_samples))
