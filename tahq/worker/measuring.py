"""A worker of `tahq measure`: carries out the coordinator's orders to measure, and answers other workers.

Times one block, the embedding, and the head with the loss. Weights are random, because only their sizes matter.
Gradients are added up as in a step. Every part is built, timed and dropped before the next, so that the largest part
is all that must fit.

Shapes: B samples, S positions, C hidden channels, V vocabulary.
"""

import dataclasses
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Self, TypeVar, cast

import torch

from tahq import __version__
from tahq.comm.control.messages import Assign, Bye, ComputeMeasured, Hello, MeasureCompute, MeasurePaths, PathsMeasured
from tahq.comm.zmq.addresses import format_address, parse_address
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_hash
from tahq.config.stage_estimate import autocast_dtype, block_ranges, matrix_dtype, micro_batch_shape
from tahq.errors import CodecError, PeerLostError, RemoteProtocolError
from tahq.memory.free_memory import free_bytes, is_out_of_memory
from tahq.memory.saved_tensors import saved_by_block
from tahq.memory.small_floats.nf4 import packed_weight
from tahq.memory.stored_slice import materialise
from tahq.models.adapters.lora import without_adapters
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.keyed_dropout import RandomContext
from tahq.models.slice import ModelSlice, Parts, sharing_copies_of
from tahq.pipeline.boundary import BOUNDARY_DTYPE
from tahq.plan.cluster_numbers import LayerTimes
from tahq.plan.measure.meter import Meter, MeterServer, Peer
from tahq.plan.measure.meter_wire import LONGEST_S, WINDOW_S, Kind, MeterRequest
from tahq.quant import get_codec
from tahq.quant.config import WireConfig
from tahq.worker.assembly import keep_as_configured, resolved_spec
from tahq.worker.control import WorkerControl, WorkerOptions
from tahq.worker.links import listening_addresses

_TRIPS = 15
_MOST_PEERS = 1024
BUDGET_S = 0.3
"""Repeat a measurement for at least this long …"""
FEWEST = 3
"""… but at least this often, and …"""
MOST = 50
"""… at most this often, after one repetition that is not counted."""
NO_FASTER = 0.95
"""A larger micro-batch whose samples take more than this share of the time is about as slow."""
MOST_SLOWER = 1.3
"""Samples of a larger micro-batch that take this many times as long are implausible: something else ran."""
AGAIN = 3
_COPIED = 1 << 24
"""Numbers in fp32, 64 MiB, that are copied at a time."""


def measure(
    control: WorkerControl, options: WorkerOptions, assign: Assign, config: ClusterConfig, device: torch.device
) -> int:
    """Carry out orders to measure until there are no more; returns the exit status."""
    listening = listening_addresses(options, config, assign.stage)
    relay_host, _ = parse_address(options.peer, "coordinator")
    with MeasuringMember(assign, config, device, listening, control.working, relay_host) as member:
        control.working("waiting for the others")
        control.send(
            Hello(
                stage=assign.stage,
                version=__version__,
                config_hash=config_hash(config),
                tokenizer_hash="",
                data_hash="",
                address=member.address,
                device=str(device),
                torch_version=str(torch.__version__),
                num_parameters=0,
                num_train_samples=0,
            )
        )
        while not isinstance(order := control.receive(MeasureCompute, MeasurePaths, Bye), Bye):
            control.send(member.carry_out(order))
        return order.exit_status


class MeasuringMember:
    """Carries out orders to measure and answers other workers; as a context, it listens until its end.

    `listening` are the address to bind, and the address that others dial if it differs; `working` is called with the
    present activity, for the heartbeats. `relay_host` is where this worker reaches the coordinator's machine.
    UserError: it cannot listen there.
    """

    def __init__(
        self,
        assign: Assign,
        config: ClusterConfig,
        device: torch.device,
        listening: tuple[str, str | None],
        working: Callable[[str], None],
        relay_host: str = "",
    ) -> None:
        self._stage = assign.stage
        self._relay_host = relay_host
        self._config = config
        self._device = device
        self._working = working
        self._server = MeterServer(assign.run_id, assign.stage, *listening)
        self._meter = Meter(assign.run_id, assign.stage)
        self.address = self._server.address
        """host:port that others dial; empty: this host only dials out."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def carry_out(self, order: MeasureCompute | MeasurePaths) -> ComputeMeasured | PathsMeasured:
        """Measure, and return the report.

        Raises:
            RemoteProtocolError: a malformed order.
            Exception: torch's, where not even the smallest micro-batch fits (`is_out_of_memory`).
        """
        report = self._compute(order) if isinstance(order, MeasureCompute) else self._paths(order)
        self._working("waiting for the others")
        return report

    def _compute(self, order: MeasureCompute) -> ComputeMeasured:
        sizes = sorted(set(order.micro_batches))
        if sizes and sizes[0] < 1:
            raise RemoteProtocolError(f"the coordinator asked for micro-batches of {order.micro_batches}")
        free, notes = free_bytes(self._device), list[str]()
        rows: list[LayerTimes] = []
        codecs: dict[str, list[float]] = {}
        begun = 0

        def working(activity: str) -> None:
            self._working(f"{activity} ({begun}/{len(sizes) + len(order.codecs)})")

        measurement = ComputeMeasurement(
            self._config, self._stage % self._config.pipeline.stages, self._device, working
        )
        began_s = time.monotonic()
        for size in sizes:
            taken_s = time.monotonic() - began_s - measurement.compiled_s
            if order.limit_s and len(rows) > 1 and (taken_s > order.limit_s or _is_no_faster(rows)):
                break
            begun += 1
            try:
                rows.append(measurement.layer_times(size))
            except Exception as error:
                if not rows or not is_out_of_memory(error):
                    raise
                notes.append(f"micro-batches of {size} do not fit into the memory of {self._device}")
                break
            measure_again(rows, measurement.layer_times)
        notes += implausible(rows)
        shape = (self._config.training.micro_batch, self._config.data.seq_len, measurement.hidden_size)
        for spec in order.codecs:
            begun += 1
            working(f"timing {spec}, compiled first if new")
            try:
                codecs[spec] = list(seconds_per_element(spec, self._config.wire, shape, self._device))
            except CodecError as error:
                notes.append(str(error))
        is_gpu = self._device.type == "cuda"
        return ComputeMeasured(
            *(self._stage, free, [row.model_dump() for row in rows], codecs, notes),
            host_memory_bytes=free_bytes(torch.device("cpu")) if is_gpu else 0,
            host_link=copy_bits_per_s(self._device) if is_gpu and sizes else 0.0,
        )

    def _paths(self, order: MeasurePaths) -> PathsMeasured:
        peers = [_peer(row, self._relay_host) for row in order.peers]
        if not 0 < len(peers) <= _MOST_PEERS or not 0 <= order.least_s <= order.most_s <= LONGEST_S:
            raise RemoteProtocolError(f"the coordinator asked for {len(peers)} streams of {order.most_s} s at most")
        self._working(f"measuring the path to {', '.join(dict.fromkeys(peer.host for peer in peers))}")
        trips_s, outward, inward, error = list[float](), list[float](), list[float](), ""
        try:
            trips_s = [self._meter.round_trip_s(peer, _TRIPS) for peer in peers]
            windows_s = [min(max(WINDOW_S, trip_s), LONGEST_S) for trip_s in trips_s]
            for kind, rates in ((Kind.TAKE, outward), (Kind.GIVE, inward)):
                requests = [MeterRequest(kind, window_s, order.least_s, order.most_s) for window_s in windows_s]
                rates += self._meter.rates(peers, requests)
        except (PeerLostError, RemoteProtocolError) as lost:
            error = str(lost)
        return PathsMeasured(self._stage, order.order, trips_s, outward, inward, error)


def _peer(row: list[str | int], relay_host: str) -> Peer:
    match row:
        case [int(stage), str(host), str(address)] if address.startswith(":") and address[1:].isdecimal():
            return Peer(stage, host, format_address(relay_host, int(address[1:])))
        case [int(stage), str(host), str(address)] if address:
            return Peer(stage, host, address)
        case _:
            raise RemoteProtocolError(f"the coordinator sent a malformed peer: {row}")


# -- implausible figures -----------------------------------------------------------------------------


def sample_s(times: LayerTimes) -> float:
    """Seconds of one sample in a block, forward and backward."""
    return (times.block_forward + times.block_backward) / times.micro_batch


def _is_no_faster(rows: Sequence[LayerTimes]) -> bool:
    """Whether samples of the largest size take about as long as those of the one before."""
    return len(rows) > 1 and sample_s(rows[-1]) > NO_FASTER * sample_s(rows[-2])


def measure_again(rows: list[LayerTimes], measure: Callable[[int], LayerTimes]) -> None:
    """Measure sizes of `rows` again, in place, `AGAIN` times at most, while two do not fit together.

    More samples must not take less time in all, nor much more time each: then something else used the machine, and the
    faster figures count.
    """
    for _ in range(AGAIN):
        number = _slowed_down(rows)
        if number is None:
            return
        again = measure(rows[number].micro_batch)
        rows[number] = min(rows[number], again, key=sample_s)


def implausible(rows: Sequence[LayerTimes]) -> list[str]:
    """A note if two sizes still do not fit together."""
    number = _slowed_down(rows)
    if number is None:
        return []
    times = ", ".join(f"{1000 * sample_s(row):.3g} ms in micro-batches of {row.micro_batch}" for row in rows)
    return [
        f"implausible times, even when measured again: a sample takes {times}; "
        f"was the machine busy at {rows[number].micro_batch}?"
    ]


def _slowed_down(rows: Sequence[LayerTimes]) -> int | None:
    """The number of a size that does not fit its neighbour, from the largest on; None: all fit."""
    for number in range(len(rows) - 1, 0, -1):
        less, more = rows[number - 1], rows[number]
        if sample_s(more) > MOST_SLOWER * sample_s(less):
            return number
        if sample_s(more) * more.micro_batch < NO_FASTER * sample_s(less) * less.micro_batch:
            return number - 1
    return None


# -- timing a device ---------------------------------------------------------------------------------

Mark = float | torch.cuda.Event
"""Seconds, or a place in a GPU's queue."""
_Lap = TypeVar("_Lap")


def _between_s(start: Mark, end: Mark) -> float:
    if isinstance(start, float):
        return cast(float, end) - start
    return float(start.elapsed_time(cast(torch.cuda.Event, end))) / 1000


class DeviceTimer:
    """Times work on a device; `clock` gives monotonic seconds.

    `medians_s` is for laps that wait for the device before and after each part. Laps for `medians_between_s` set marks
    in its queue instead, so that it goes from one to the next as in a step, and is not idle while work is submitted.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._clock = clock
        self.compiled_s = 0.0
        """Seconds that first repetitions took more than others, to compile kernels."""

    def now_s(self) -> float:
        """The time when the device has finished its queue."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    def mark(self) -> Mark:
        """The time when the device has finished what is in its queue so far."""
        if self._device.type != "cuda":
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def medians_s(self, laps: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Medians over repetitions of `laps`, which does the work and returns the seconds of each of its parts."""
        rows = self._repeated(laps)
        return tuple(statistics.median(column) for column in zip(*rows, strict=True))

    def medians_between_s(self, laps: Callable[[], tuple[Mark, ...]]) -> tuple[float, ...]:
        """Medians of the seconds between the marks of a lap; at most two laps are queued."""
        last: deque[Mark] = deque(maxlen=2)

        def lap() -> tuple[Mark, ...]:
            if len(last) == last.maxlen and not isinstance(last[0], float):
                last[0].synchronize()
            marks = laps()
            last.append(marks[-1])
            return marks

        rows = [[_between_s(*pair) for pair in pairwise(marks)] for marks in self._repeated(lap)]
        return tuple(statistics.median(column) for column in zip(*rows, strict=True))

    def _repeated(self, laps: Callable[[], _Lap]) -> list[_Lap]:
        """What `laps` returns, again and again, without the first time, which may compile kernels."""
        first_s = self.now_s()
        laps()
        rows: list[_Lap] = []
        begun_s = self.now_s()
        while len(rows) < FEWEST or (len(rows) < MOST and self._clock() < begun_s + BUDGET_S):
            rows.append(laps())
        self.compiled_s += max(0.0, begun_s - first_s - (self.now_s() - begun_s) / len(rows))
        return rows


class ComputeMeasurement:
    """Times the parts of a resolved configuration's model on one worker's device.

    `working` is called with the part that is being timed. Under `emulate.sleep` the stage's own time counts: it is set.
    """

    def __init__(self, config: ClusterConfig, stage: int, device: torch.device, working: Callable[[str], None]) -> None:
        # compiling for each size would take longer than all the rest
        training = config.training.model_copy(update={"compile": False})
        self._config = config = config.model_copy(update={"training": training})
        self._stage = stage % config.pipeline.stages
        self._device = device
        self._working = working
        self._timer = DeviceTimer(device)
        # every block as if it were trained; `tahq.plan` knows which are not
        self._spec = dataclasses.replace(resolved_spec(config, None), folder=None, first_trainable=0)
        self._dtype = autocast_dtype(config, device)
        self.hidden_size = self._spec.hidden_size

    @property
    def compiled_s(self) -> float:
        """Seconds that compiling kernels took so far."""
        return self._timer.compiled_s

    def layer_times(self, micro_batch: int) -> LayerTimes:
        """The times of a micro-batch of this many samples.

        Raises:
            Exception: torch's, where it does not fit (`is_out_of_memory`).
        """
        shape = micro_batch_shape(self._config, self._spec, micro_batch, device=self._device.type, stage=self._stage)
        activations = max(saved_by_block(self._spec, block, shape) for block in range(self._spec.num_layers))
        if self._config.emulate.sleep is not None:
            blocks = sum(map(len, block_ranges(self._config, self._spec)[self._stage :: self._config.pipeline.stages]))
            forward_s, backward_s = self._config.emulate.sleep.of(self._stage)
            return LayerTimes(
                micro_batch=micro_batch,
                block_forward=forward_s / blocks,
                block_backward=backward_s / blocks,
                block_activation_bytes=activations,
            )
        block = self._block(micro_batch)
        first = self._parts(Parts(range(0), embedding=True), "the embedding", micro_batch)
        last = self._parts(Parts(range(0), head=True), "the head", micro_batch)
        return LayerTimes(
            micro_batch=micro_batch,
            block_forward=block[0],
            block_backward=block[1],
            block_input_gradient=min(block[2], block[1]),
            first_forward=first[0],
            first_backward=first[1],
            last_forward=last[0],
            last_backward=last[1],
            block_activation_bytes=activations,
        )

    def _block(self, micro_batch: int) -> list[float]:
        """Forward, backward and input gradient, the mean over all blocks: those with one window count as equal."""
        spec = self._spec
        windows = [spec.layout.window(spec.hf_config, block) for block in range(spec.num_layers)]
        counts = Counter(windows)
        firsts = [windows.index(window) for window in counts]
        rows = [self._parts(Parts(range(first, first + 1)), "a block", micro_batch) for first in firsts]
        return [statistics.fmean(column, counts.values()) for column in zip(*rows, strict=True)]

    def _parts(self, parts: Parts, name: str, micro_batch: int) -> tuple[float, ...]:
        self._working(f"timing {name}, micro-batches of {micro_batch}")
        random, matrices = RandomContext(0), matrix_dtype(self._config, self._device)
        model = ModelSlice(self._spec, parts, random, matrices)
        materialise(model, self._device)
        keep_as_configured(self._config, model, self._stage, micro_batch)
        if model.graphs is not None:
            model.graphs.begin()
            model.graphs.begin()  # as in a second step
        with torch.no_grad():
            for parameter in model.parameters():
                if packed_weight(parameter) is None:
                    parameter.normal_(std=0.02)
        try:
            return self._timed(model, micro_batch)
        finally:
            model.graphs = None  # they and the model hold each other

    def _timed(self, model: ModelSlice, micro_batch: int) -> tuple[float, ...]:
        """Seconds of forward, of backward, and of the input's gradient alone (0 where the input has none)."""
        mark, training = self._timer.mark, self._config.training
        size = (micro_batch * training.rows_per_sample, self._config.data.seq_len)
        generator = torch.Generator("cpu").manual_seed(0)
        if model.parts.embedding:
            x = torch.randint(self._spec.vocab_size, size, generator=generator).to(self._device)
        else:
            x = torch.randn(*size, self.hidden_size, generator=generator).to(self._device).requires_grad_()
        labels = torch.zeros(*size, dtype=torch.int64, device=self._device)

        def forward() -> tuple[torch.Tensor, torch.Tensor | None]:
            with torch.autocast(self._device.type, self._dtype or torch.bfloat16, enabled=self._dtype is not None):
                if training.dpo is not None:
                    with torch.no_grad(), without_adapters():
                        model(x)
                y = model(x)
                if model.parts.head:
                    return model.loss(y, labels)[0], None
            return y, torch.ones_like(y)

        def lap() -> tuple[Mark, ...]:
            start = mark()
            y, gradient = forward()
            between = mark()
            if y.requires_grad:  # not an embedding beside adapters
                y.backward(gradient)  # type: ignore[no-untyped-call]
            return start, between, mark()

        def input_lap() -> tuple[Mark, ...]:
            # autograd omits gradients that are not requested, but not within our own autograd functions
            has_own = self._config.memory.activations == "coat" or self._config.training.precision == "fp8"
            model.deferred = deferred = DeferredGradients() if has_own or model.graphs is not None else None
            y, gradient = forward()
            model.deferred = None
            start = mark()
            torch.autograd.grad(y, x, gradient)
            end = mark()
            if deferred is not None and model.graphs is not None:
                deferred.run()  # a graph's memory is then free for the next pass
            return start, end

        with sharing_copies_of([model]):
            times_s = self._timer.medians_between_s(lap)
            return (*times_s, *(self._timer.medians_between_s(input_lap) if model.parts.blocks else (0.0,)))


def copy_bits_per_s(gpu: torch.device) -> float:
    """Bits per second of copies between pinned memory and a GPU, each way while both are busy."""
    ends = [(torch.empty(_COPIED, device=gpu), torch.empty(_COPIED, pin_memory=True)) for _ in range(2)]
    streams, timer = [torch.cuda.Stream(gpu) for _ in ends], DeviceTimer(gpu)  # type: ignore[no-untyped-call]

    def lap() -> tuple[float]:
        start_s = timer.now_s()
        for (on_gpu, on_host), stream, to_host in zip(ends, streams, (True, False), strict=True):
            with torch.cuda.stream(stream):
                target, source = (on_host, on_gpu) if to_host else (on_gpu, on_host)
                target.copy_(source, non_blocking=True)
        return (timer.now_s() - start_s,)

    return 8 * 4 * _COPIED / timer.medians_s(lap)[0]


def seconds_per_element(spec: str, wire: WireConfig, shape: Sequence[int], device: torch.device) -> tuple[float, float]:
    """Seconds to encode and to decode with a codec, each divided by the elements; medians, kernels loaded before.

    Tensors of this shape, [B, S, C], are normal, with channels of different size, as activations are. A codec that
    remembers samples is timed on samples that it has seen. CodecError: it does not run here, or not on such tensors.
    """
    codec = get_codec(spec, backend=wire.backend, threads=wire.threads)
    codec.prepare(shape, BOUNDARY_DTYPE, device)
    generator = torch.Generator("cpu").manual_seed(0)
    scales = torch.rand(shape[-1], generator=generator) * 3 + 0.1
    x = (torch.randn(*shape, generator=generator) * scales).to(device)
    samples: dict[str, Any] = {"sample_ids": range(shape[0])} if codec.is_stateful else {}
    timer = DeviceTimer(device)

    def lap() -> tuple[float, float]:
        start_s = timer.now_s()
        payload = codec.encode(x, key=1, **samples).cpu()
        encoded_s = timer.now_s()
        codec.decode(payload.to(device), shape, BOUNDARY_DTYPE, key=1, **samples)
        return encoded_s - start_s, timer.now_s() - encoded_s

    if codec.is_stateful:
        lap()
    encode_s, decode_s = timer.medians_s(lap)
    return encode_s / x.numel(), decode_s / x.numel()
