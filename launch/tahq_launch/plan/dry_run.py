"""The text of ``--dry-run``: layers, memory, traffic and schedule of a run that is not started.

Nothing is allocated and nothing contacted; the model is on the meta device. Every figure is either exact
(layers, parameters, bytes on the wire) or says what it leaves out. The text depends on the configuration
alone, apart from `device: auto`, and is at most 100 columns wide.
"""

import math
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from tahq.comm.link.frame import Direction
from tahq.comm.network_config import HostConfig, PairConfig
from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import (
    autocast_dtype,
    block_ranges,
    chunks_of,
    memory_lines,
    schedule_of,
    stage_estimate,
    with_memory_choices,
)
from tahq.data.dataset import RecordDataset, load_dataset, shown_samples
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import ConfigError, DataError
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import slice_parameters
from tahq.pipeline.schedule.schedule import ActionKind, Schedule
from tahq.pipeline.stage import PRODUCTS
from tahq.plan.cluster_numbers import ClusterNumbers
from tahq.plan.simulate.simulator import draw_grid
from tahq.quant import get_codec
from tahq.quant.aqsgd.codec import AqsgdCodec
from tahq.quant.config import WireConfig
from tahq.units import format_rate, format_size
from tahq.worker.assembly import offloaded
from tahq_launch.command_line import plain_table
from tahq_launch.plan.numbers import stage_device
from tahq_launch.plan.step_traffic import (
    Relaying,
    StepFlow,
    host_traffic,
    link_speeds,
    relayed_nbytes,
    step_flows,
    wire_only_step_s,
)
from tahq_launch.start.codec_choice import codec_options
from tahq_launch.start.local_checks import check_reachable, warnings_about

WIDTH = 100
_MAX_PICTURES = 3


def dry_run(
    config: ClusterConfig,
    progress: Callable[[float], None] = lambda share: None,
    figures: ClusterNumbers | None = None,
) -> str:
    """Describe a run without starting it; unless the configuration is resolved, layers are divided by counted cost.

    `progress` is called with the share of the stages whose memory is estimated. `figures`: what is known of the hosts,
    for links that are relayed.
    """
    codec_options(config, {})  # as at the start of a run: checks `wire.replay`
    return _DryRun(config, progress, figures).text()


class _DryRun:
    """The parts of the text, and the values that several of them need."""

    def __init__(
        self, config: ClusterConfig, progress: Callable[[float], None], figures: ClusterNumbers | None
    ) -> None:
        vocab_size = config.model.vocab_size or 1
        if config.model.path is None and config.model.vocab_size is None:
            vocab_size = load_tokenizer(config.data).vocab_size
        self.spec = load_spec(config.model, vocab_size=vocab_size, seq_len=config.data.seq_len, adapter=config.adapter)
        self.config = config = with_memory_choices(config, self.spec)
        self.ranges = block_ranges(config, self.spec)
        self.schedule = schedule_of(config, self.spec)
        self.stages = range(self.schedule.num_stages)
        self.devices = [stage_device(config, stage) for stage in self.stages]
        self.products = [autocast_dtype(config, device.type) for device in self.devices]
        self.memory = []
        for stage, device in zip(self.stages, self.devices, strict=True):
            offloaded(config, stage % config.pipeline.stages, torch.device(device.type))
            self.memory.append(stage_estimate(config, self.spec, stage, device=device.type))
            progress((stage + 1) / len(self.stages))
        self.num_parameters = [self._num_parameters(stage) for stage in self.stages]
        self.flows = step_flows(config, self.spec)
        self.speeds = link_speeds(config)
        self.relaying = Relaying.of(config, figures)

    def text(self) -> str:
        parts = [
            self._header(),
            self._samples(),
            self._layers(),
            self._memory(),
            describe_network(self.config),
            self._links(),
        ]
        parts += [
            codec_memory(self.config, self.spec),
            self._hosts(),
            _grid(self.schedule, self.config.pipeline.schedule == "auto"),
        ]
        return "\n\n".join([*(part for part in parts if part), *self._warnings()])

    def _warnings(self) -> list[str]:
        """What a start would warn about, or refuse."""
        found = warnings_about(self.config)
        try:
            check_reachable(self.config)
        except ConfigError as error:
            found.append(f"warning: the start will be refused: {error}")
        return [textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in found]

    def _precision(self, stage: int) -> str:
        if self.config.training.precision == "fp8":
            return "fp8"
        return PRODUCTS[self.products[stage]]

    def _num_parameters(self, stage: int) -> int:
        """Parameters of all chunks of a stage, in whichever format their weights are stored."""
        chunks = (slice_parameters(self.spec, self.ranges[chunk]).values() for chunk in chunks_of(self.config, stage))
        return sum(math.prod(shape) for shapes in chunks for shape in shapes)

    def _header(self) -> str:
        training, spec = self.config.training, self.spec
        length = f"{training.steps} steps" if training.steps is not None else f"{training.epochs:g} epochs"
        source = spec.path if spec.folder is not None else f"{spec.family} with random weights"
        shorter = "".join(f", {size} until step {last}" for size, last in training.seq_len_schedule)
        return (
            f"run {self.config.run.name}: {source}, {sum(self.num_parameters):,} parameters{self._adapters()}\n"
            f"  {spec.num_layers} layers, hidden size {spec.hidden_size}, vocabulary {spec.vocab_size}, "
            f"sequences of {self.config.data.seq_len} tokens{shorter}\n"
            f"  {length} of {training.global_batch} {'samples' if training.dpo is None else 'pairs of answers'} = "
            f"{training.num_micro_batches} micro-batches of "
            f"{training.micro_batch}; {training.optimizer}, learning rate {training.lr:g}"
            f"{'' if training.dpo is None else f', DPO with beta {training.dpo.beta:g}'}"
        )

    def _adapters(self) -> str:
        """How many of the parameters are trained, if only adapters are."""
        adapter = self.spec.adapter
        if adapter is None:
            return ""
        shapes = slice_parameters(self.spec, BlockRange(0, self.spec.num_layers, self.spec.num_layers))
        count = sum(math.prod(shape) for name, shape in shapes.items() if self.spec.is_trained(name))
        base = ", beside matrices in 4 bits" if adapter.kind == "qlora" else ""
        return f",\n  {count:,} of them in adapters of rank {adapter.rank}, which alone are trained{base}"

    def _samples(self) -> str:
        """The first records as the model sees them; none where the data is not on this machine."""
        data, training = self.config.data, self.config.training
        if data.records is None:
            return ""
        try:
            tokenizer, are_preferences = load_tokenizer(data), training.dpo is not None
            dataset = load_dataset(data, tokenizer, training.global_batch, are_preferences=are_preferences)
        except DataError as error:
            return f"Samples: not shown here: {error}"
        assert isinstance(dataset, RecordDataset)
        samples = map(repr, shown_samples(dataset, tokenizer))
        kinds = ", chosen and rejected in turn" * are_preferences
        title = f"Samples{kinds}; what has no loss is in ⟦brackets⟧"
        return "\n".join([title, *samples, dataset.summary, *dataset.notes])

    def _layers(self) -> str:
        rows = []
        for stage, count in enumerate(self.num_parameters):
            layers = " | ".join(_span(self.ranges[chunk]) for chunk in chunks_of(self.config, stage))
            place = _host_name(self.config, stage), self.devices[stage], self._precision(stage)
            rows.append((stage, *place, layers, f"{count:,}", f"{count / sum(self.num_parameters):.1%}"))
        titles = ["stage", "host", "device", "dtype", "layers", "parameters", "share"]
        return "Layers\n" + plain_table(titles, rows, left=(1, 2, 3, 4))

    def _memory(self) -> str:
        rows = [
            (stage, self.schedule.max_in_flight(stage), *map(format_size, (*memory.kinds().values(), memory.total)))
            for stage, memory in enumerate(self.memory)
        ]
        lines = [
            "Peak memory (estimated from sizes; Python, torch, data and fragmentation add to it)",
            plain_table(["stage", "in flight", *self.memory[0].kinds(), "total"], rows),
        ]
        lines += [*self._host_memory(), *memory_lines(self.config)]
        if self.config.run.checkpoint_every != "never":
            lines += self._checkpoints()
        return "\n".join([*lines, *self._too_large()])

    def _host_memory(self) -> Iterator[str]:
        if any(memory.host_total for memory in self.memory):
            yield "Host memory of what is offloaded (memory.offload)"
            rows = [
                (stage, *map(format_size, (*memory.host_kinds().values(), memory.host_total)))
                for stage, memory in enumerate(self.memory)
            ]
            yield plain_table(["stage", *self.memory[0].host_kinds(), "total"], rows)

    def _checkpoints(self) -> Iterator[str]:
        run, sizes = self.config.run, [memory.snapshot for memory in self.memory]
        largest = format_size(max(sizes))
        if run.checkpoint_buffers == 0:
            yield "  checkpoints: no extra memory; training waits while they are written"
        else:
            copies = "one copy" if run.checkpoint_buffers == 1 else f"at most {run.checkpoint_buffers} copies"
            yield f"  checkpoints: {copies} in each host's memory while they are written, up to {largest} each"
        each = (
            f"{format_size(sum(sizes))} each"
            if isinstance(self.config.hosts, str)
            else f"up to {largest} each on a host"
        )
        kept = f"{run.keep_checkpoints} are kept while the next is written"
        if self.config.keeps_best:
            kept = f"the newest {run.keep_checkpoints}, the best, and the next"
        yield f"  checkpoints on disk: {each}; {kept}"

    def _too_large(self) -> Iterator[str]:
        """A warning for each memory of this machine that the stages on it exceed together."""
        if not isinstance(self.config.hosts, str):
            return
        needed: Counter[torch.device] = Counter()
        for stage, memory in enumerate(self.memory):
            needed[self.devices[stage]] += memory.total
            needed[torch.device("cpu")] += memory.host_total
        for device, nbytes in needed.items():
            installed = installed_nbytes(device)
            if installed and nbytes > installed:
                owner = "this machine" if device.type == "cpu" else str(device)
                yield (
                    f"  warning: the stages on {owner} together need {format_size(nbytes)} or more; "
                    f"it has {format_size(installed)}"
                )

    def _links(self) -> str:
        if not self.flows:
            return "One stage: nothing is sent."
        rates = [self.speeds.rate(flow.source, flow.target) for flow in self.flows]
        rate = self._common_rate()
        titles = ["link", "from-to", "carries", "frames", "payload each", "bits/element", "bytes per step"]
        if min(rates) < math.inf:
            titles.append("s alone" if rate is None else f"s at {format_rate(rate)}")
        rows = [_link_row(flow, own)[: len(titles)] for flow, own in zip(self.flows, rates, strict=True)]
        total, steps = sum(flow.step_nbytes for flow in self.flows), self.config.training.steps
        whole_run = f", {format_size(steps * total)} in {steps} steps" if steps is not None else ""
        lines = [
            "Bytes per step on each link (with frame headers, without acknowledgements and TCP/IP)",
            plain_table(titles, rows, left=(1, 2)),
            *_codecs(self.config.wire),
            f"  total {format_size(total)} per step{whole_run}",
        ]
        if nbytes := relayed_nbytes(self.flows, self.relaying.pairs):
            lines.append(
                f"  the coordinator's host relays {format_size(nbytes)} per step: it receives and sends as much"
            )
        return "\n".join([*lines, self._transports()] if self.config.links.inside != "zmq" else lines)

    def _transports(self) -> str:
        """The links inside a site, and the others."""
        between = self.config.transport_between
        inside = {flow.link for flow in self.flows if between(flow.source, flow.target) != "zmq"}
        outside = {flow.link for flow in self.flows} - inside
        links = f"link{'s' * (len(inside) > 1)} {', '.join(map(str, sorted(inside)))}"
        others = f", ZMQ {', '.join(map(str, sorted(outside)))}" if outside else ""
        return f"  {self.config.links.inside} carries {links}{others}"

    def _common_rate(self) -> float | None:
        """`emulate.rate` if that is the limit of every host in both directions."""
        rate = self.config.emulate.rate
        return rate if self.config.hosts != "namespaces" and {*self.speeds.up, *self.speeds.down} == {rate} else None

    def _hosts(self) -> str:
        """The time that the traffic takes at the given rates and delays; empty without either."""
        speeds = self.speeds
        if not self.flows or not speeds.is_shaped:
            return ""
        lines = []
        if min(*speeds.up, *speeds.down) < math.inf:
            rate = self._common_rate()
            at = "its rate or cap" if self.config.hosts != "namespaces" else "1448/1514 of its rates"
            at = at if rate is None else f"{format_rate(rate)} in each direction"
            rows = []
            for stage in self.stages:
                sent, received = host_traffic(self.flows, stage)
                least_s = max(8 * sent / speeds.up[stage], 8 * received / speeds.down[stage])
                rows.append((stage, f"{sent:,}", f"{received:,}", f"{least_s:.3f}"))
            titles = ["stage", "bytes sent", "bytes received", "minimum s"]
            lines += [f"Traffic of each host per step over all its links, at {at}", plain_table(titles, rows)]
        wire_s = wire_only_step_s(self.config, speeds, self.schedule, self.flows, self.relaying)
        lines.append(
            f"  with infinitely fast computation, a step would take {wire_s:.3f} s (simulated from schedule, rates\n"
            f"  and a delay of {1000 * speeds.longest_delay_s:g} ms)"
        )
        return "\n".join(lines)


def _host_name(config: ClusterConfig, stage: int) -> str:
    if config.hosts == "namespaces":
        return f"host{stage}"
    if isinstance(config.hosts, str) or config.hosts[stage].local:
        return "local"
    name = config.hosts[stage].address
    return name if len(name) <= 24 else f"{name[:23]}…"


def _span(blocks: BlockRange) -> str:
    span = f"{blocks.start}-{blocks.stop - 1}" if len(blocks) > 1 else str(blocks.start)
    return f"{'embedding + ' if blocks.first else ''}{span}{' + norm, head' if blocks.last else ''}"


def installed_nbytes(device: torch.device) -> int:
    """Memory of a device of this machine; 0: there is no such device."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    exists = device.index < torch.cuda.device_count()
    return int(torch.cuda.get_device_properties(device).total_memory) if exists else 0


def _codecs(wire: WireConfig) -> list[str]:
    """The codecs at the start of a run, and those that it may change to."""
    rungs = wire.rungs()
    return [
        f"  {direction}: {spec}" + (f", adapted to the link among {', '.join(rungs[direction])}" if wire.follow else "")
        for direction, spec in wire.specs().items()
    ]


def _link_row(flow: StepFlow, rate_bits_per_s: float) -> list[object]:
    kind = "activations" if flow.direction is Direction.FORWARD else "gradients"
    carried = (f"{flow.source} → {flow.target}", "tied embedding" if flow.is_tie else kind, flow.num_frames)
    nbytes = (f"{flow.payload_nbytes:,}", f"{flow.bits_per_element:.3f}", f"{flow.step_nbytes:,}")
    return [flow.link, *carried, *nbytes, f"{8 * flow.step_nbytes / rate_bits_per_s:.3f}"]


def _grid(schedule: Schedule, may_change: bool) -> str:
    """The schedule as a picture; if it is too wide, in parts below each other, cut between its columns."""
    actions = [action for row in schedule.actions for action in row]
    splits = any(action.kind is ActionKind.I for action in actions)
    drawn = "I and W: gradients of input and weights" if splits else "backward B is drawn twice as long"
    lines, margin, column = draw_grid(schedule).splitlines(), len("stage 0  "), 1 + max(map(len, map(str, actions)))
    width = (WIDTH - margin) // column * column
    starts = range(margin, max(map(len, lines)), width)
    pictures = ["\n".join((line[:margin] + line[at : at + width]).rstrip() for line in lines) for at in starts]
    left = len(pictures) - _MAX_PICTURES
    note = f"\n({left} more parts of this width not shown)" if left > 0 else ""
    first = " at first" if may_change else ""
    title = f"Schedule {schedule.name}{first} (0F2: chunk 0, forward, micro-batch 2; {drawn})"
    return f"{title}\n" + "\n\n".join(pictures[:_MAX_PICTURES]) + note


def codec_memory(config: ClusterConfig, spec: ModelSpec) -> str:
    """The caches of AQ-SGD; empty for other codecs."""
    codec, stages = get_codec(config.wire.activations), config.pipeline.stages
    if not isinstance(codec, AqsgdCodec) or not codec.is_stateful or stages == 1:
        return ""
    shape = (config.training.micro_batch, config.data.seq_len, spec.hidden_size)
    num_samples, last = seen_samples(config), config.pipeline.num_chunks - 1
    rows = []
    for stage in range(stages):
        num_ends = sum((chunk > 0) + (chunk < last) for chunk in chunks_of(config, stage))
        nbytes = num_ends * codec.predicted_state_nbytes(shape, num_samples)
        rows.append((stage, num_ends, f"{nbytes:,}", format_size(nbytes)))
    sample_nbytes, later = codec.predicted_state_nbytes(shape, 1), codec.revisit_nbytes(shape)
    return (
        f"Cache of {codec.spec} at the ends of the cuts: on each host, and in every checkpoint\n"
        f"{plain_table(['stage', 'ends of cuts', 'bytes', ''], rows)}\n"
        f"  {num_samples:,} samples of {format_size(sample_nbytes)}, once all have been seen\n"
        f"  the payloads above are of first visits; each later visit takes {later:,} bytes, "
        f"{8 * later / math.prod(shape):.3f} bits/element"
    )


def seen_samples(config: ClusterConfig) -> int:
    """Training samples that a run will see: an epoch's, or fewer if the run is shorter than an epoch."""
    dataset = load_dataset(config.data, load_tokenizer(config.data), config.training.global_batch)
    num_samples = dataset.num_train_samples
    steps, epochs = config.training.steps, config.training.epochs
    if steps is not None:
        return min(num_samples, steps * config.training.global_batch)
    return min(num_samples, math.ceil((epochs or 0.0) * num_samples))


_BACKENDS = {
    "auto": "the kernel's netem if available, else a TUN device",
    "kernel": "the kernel's netem",
    "tun": "a TUN device",
}


def describe_network(config: ClusterConfig) -> str:
    """Hosts, exceptions and backend of a configuration without a profile; empty unless ``hosts: namespaces``."""
    if config.hosts != "namespaces":
        return ""
    network = config.emulate.network(config.pipeline.num_workers)
    control = network.congestion_control or "cubic"
    if network.tcp_slow_start_after_idle is not None:
        control += f", {'with' if network.tcp_slow_start_after_idle else 'without'} slow start after pauses"
    hosts = [
        [name, str(stage), _rate(host.up), _rate(host.down), *_path(host), host.site or ""]
        for stage, (name, host) in enumerate(network.hosts.items())
    ]
    lines = [
        f"Network of {len(network.hosts)} hosts, made by {_BACKENDS[network.backend]}; TCP is {control}.",
        "It is measured before the workers start (network.json)",
        _table(["host", "stage", "up", "down", "delay", "jitter", "loss", "reorder", "site"], hosts, left=(0, 8)),
    ]
    if network.pairs:
        pairs = [[" and ".join(p.between), _rate(p.rate) if p.rate else "", *_path(p)] for p in network.pairs]
        lines.append("  exceptions")
        lines.append(_table(["between", "rate", "delay", "jitter", "loss", "reorder"], pairs, left=(0,)))
    return "\n".join([*lines, "  the coordinator is not shaped; its delay to each host is that host's own"])


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """A table without the columns that are empty or zero everywhere."""
    kept = [index for index in range(len(titles)) if any(row[index] not in ("", "0", "0 ms", "0 %") for row in rows)]
    cells = [[row[index] for index in kept] for row in rows]
    return plain_table([titles[index] for index in kept], cells, [kept.index(i) for i in left if i in kept])


def _path(path: HostConfig | PairConfig) -> list[str]:
    times = [f"{1000 * seconds:g} ms" if seconds is not None else "" for seconds in (path.delay, path.jitter)]
    return times + [f"{100 * share:g} %" if share is not None else "" for share in (path.loss, path.reorder)]


def _rate(bits_per_s: float | None) -> str:
    return format_rate(bits_per_s) if bits_per_s is not None else "not shaped"
