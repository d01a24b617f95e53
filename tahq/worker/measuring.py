"""A worker of `tahq measure`: carries out the coordinator's orders to measure, and answers other workers."""

from collections.abc import Callable
from typing import Self

import torch

from tahq import __version__
from tahq.comm.control.messages import Assign, Bye, ComputeMeasured, Hello, MeasureCompute, MeasurePaths, PathsMeasured
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_hash
from tahq.errors import CodecError, PeerLostError, RemoteProtocolError
from tahq.memory.free_memory import free_bytes, is_out_of_memory
from tahq.plan.measure.meter import Meter, MeterServer, Peer
from tahq.plan.measure.meter_wire import LONGEST_S, WINDOW_S, Kind, MeterRequest
from tahq.worker.assembly import resolved_spec
from tahq.worker.control import WorkerControl
from tahq.worker.timing import ComputeMeasurement, seconds_per_element

_TRIPS = 15
_MOST_PEERS = 1024


def measure(
    control: WorkerControl,
    assign: Assign,
    config: ClusterConfig,
    device: torch.device,
    listening: tuple[str, str | None],
) -> int:
    """Carry out orders to measure until there are no more; returns the exit status."""
    with MeasuringMember(assign, config, device, listening, control.working) as member:
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

    Args:
        assign: the stage, and the number of the run.
        config: resolved.
        device: where this worker computes.
        listening: host:port to bind, and the address that others dial if it is another.
        working: called with the present activity, for the heartbeats.

    Raises:
        UserError: it cannot listen there.
    """

    def __init__(
        self,
        assign: Assign,
        config: ClusterConfig,
        device: torch.device,
        listening: tuple[str, str | None],
        working: Callable[[str], None],
    ) -> None:
        self._stage = assign.stage
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
        if not sizes or sizes[0] < 1:
            raise RemoteProtocolError(f"the coordinator asked for micro-batches of {order.micro_batches}")
        notes: list[str] = []
        free = free_bytes(self._device)
        times = self._layer_times(sizes, notes)
        return ComputeMeasured(self._stage, free, times, self._codecs(order.codecs, notes), notes)

    def _layer_times(self, sizes: list[int], notes: list[str]) -> list[dict[str, int | float | None]]:
        measurement = ComputeMeasurement(self._config, self._stage, self._device, self._working)
        rows: list[dict[str, int | float | None]] = []
        for size in sizes:
            try:
                rows.append(measurement.layer_times(size).model_dump())
            except Exception as error:
                if not rows or not is_out_of_memory(error):
                    raise
                notes.append(f"micro-batches of {size} do not fit into the memory of {self._device}")
                break
        return rows

    def _codecs(self, specs: list[str], notes: list[str]) -> dict[str, list[float]]:
        config = self._config
        hidden_size = config.model.hidden_size or resolved_spec(config, None).hidden_size
        shape = (config.training.micro_batch, config.data.seq_len, hidden_size)
        times: dict[str, list[float]] = {}
        for spec in specs:
            self._working(f"timing {spec}")
            try:
                times[spec] = list(seconds_per_element(spec, config.wire, shape, self._device))
            except CodecError as error:
                notes.append(str(error))
        return times

    def _paths(self, order: MeasurePaths) -> PathsMeasured:
        peers = [_peer(row) for row in order.peers]
        if not 0 < len(peers) <= _MOST_PEERS or not 0 <= order.least_s <= order.most_s <= LONGEST_S:
            raise RemoteProtocolError(f"the coordinator asked for {len(peers)} streams of {order.most_s} s at most")
        self._working(f"measuring the path to {', '.join(dict.fromkeys(peer.host for peer in peers))}")
        trips_s: list[float] = []
        outward: list[float] = []
        inward: list[float] = []
        error = ""
        try:
            trips_s = [self._meter.round_trip_s(peer, _TRIPS) for peer in peers]
            windows_s = [min(max(WINDOW_S, trip_s), LONGEST_S) for trip_s in trips_s]
            for kind, rates in ((Kind.TAKE, outward), (Kind.GIVE, inward)):
                requests = [MeterRequest(kind, window_s, order.least_s, order.most_s) for window_s in windows_s]
                rates += self._meter.rates(peers, requests)
        except (PeerLostError, RemoteProtocolError) as lost:
            error = str(lost)
        return PathsMeasured(self._stage, order.order, trips_s, outward, inward, error)


def _peer(row: list[str | int]) -> Peer:
    match row:
        case [int(stage), str(host), str(address)] if address:
            return Peer(stage, host, address)
        case _:
            raise RemoteProtocolError(f"the coordinator sent a malformed peer: {row}")
