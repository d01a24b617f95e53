"""Leads the workers of `tahq measure`: first each measures its own compute, all at once, then the paths between them,
last its codecs if these can matter. Of workers that share a GPU one measures for all, so that it has the GPU alone.

If a host cannot dial another, the other dials; if neither can, both dial this machine, which would relay their link.
A path that cannot be measured is noted and the next is measured; a lost worker ends the measurement, and the figures
so far are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tahq.comm.control.messages import ComputeMeasured, MeasureCompute, MeasurePaths, PathsMeasured
from tahq.comm.topology import Endpoint
from tahq.coordinator.context import RunContext
from tahq.coordinator.joining.seats import Seat, stage_list
from tahq.errors import RemoteProtocolError
from tahq.plan.measure.measurement import RELAY, Job, Measured, MeasureRequest, Pair, planned_jobs, relay_jobs

MOST_S = 30.0
"""Longest measurement of a stream whose rate does not settle."""
TOGETHER_S = 1.5
"""Shortest measurement of streams that share a link: they end together, settled or not."""


class Measuring:
    """Orders measurements, and takes their figures.

    Args:
        request: what to measure.
        measured: where the figures go.
        machines: the machine of each stage; stages of one machine share its uplink.
        open_relay: called once if there is a path that a run would relay; returns the port on this machine where it
            can be measured. None: no path is relayed.
        needs_codecs: called when everything else is measured, says whether to time the codecs. None: they are first.
    """

    def __init__(
        self,
        request: MeasureRequest,
        measured: Measured,
        machines: Sequence[str],
        open_relay: Callable[[], int] | None = None,
        needs_codecs: Callable[[], bool] | None = None,
    ) -> None:
        self.measured = measured
        self._needs_codecs = needs_codecs
        self._open_relay = open_relay
        self._relay_port = 0
        self._apart: list[Pair] = []
        self._undialled: set[tuple[int, int]] = set()
        """The stage that could not measure, and the one that it dialled."""
        self._request, self._machines = request, machines
        self._ctx: RunContext
        self._computing: set[int] = set()
        self._compute_order = MeasureCompute([], [])
        self._batches: list[list[Job]] = []
        self._num_batches = 0
        self._is_planned = False
        self._orders: dict[int, Job] = {}
        self._num_orders = 0

    def begin(self, ctx: RunContext) -> None:
        """All workers are there: order each to measure its own compute."""
        self._ctx = ctx
        codecs = () if self._needs_codecs is not None else self._request.codecs
        self._measure_compute(self._request.micro_batches, codecs)
        ctx.tell_phase(self._activity())

    def _measure_compute(self, sizes: Sequence[int], codecs: Sequence[str]) -> None:
        self._compute_order = MeasureCompute(list(sizes), list(codecs), self._request.compute_s)
        first = {self._device_of(seat): seat for seat in reversed(self._ctx.seats.held)}
        self._computing = {seat.stage for seat in first.values()}
        for seat in first.values():
            self._ctx.send(seat, self._compute_order)

    def _device_of(self, seat: Seat) -> tuple[Any, ...]:
        """What is the same for workers of which one measures for all."""
        device = seat.hello.device if seat.hello else ""
        is_shared = device.startswith("cuda") and not self._request.each
        return (self.measured.computers[seat.stage], device) if is_shared else (seat.stage,)

    @property
    def is_finished(self) -> bool:
        """Whether everything was ordered and has been answered."""
        return not self._computing and not self._batches and not self._orders

    def take(self, seat: Seat, figures: ComputeMeasured | PathsMeasured) -> None:
        """Take a worker's figures, and give the next orders.

        Raises:
            RemoteProtocolError: it was not asked for them, or they are impossible.
        """
        if isinstance(figures, ComputeMeasured):
            self._take_compute(seat, figures)
        else:
            self._take_paths(seat, figures)
        if not self._computing and not self._orders:
            self._next_batch()
        if self.is_finished and self._needs_codecs is not None:
            needs_codecs, self._needs_codecs = self._needs_codecs, None
            if needs_codecs():
                self._measure_compute((), self._request.codecs)
        self._ctx.tell_phase(self._activity())

    def _take_compute(self, seat: Seat, figures: ComputeMeasured) -> None:
        order = self._compute_order
        is_asked = seat.stage in self._computing and bool(figures.times) == bool(order.micro_batches)
        if not is_asked or set(figures.codecs) - set(order.codecs):
            raise RemoteProtocolError(f"{seat.name} sent other times than it was asked for")
        self.measured.take_compute(figures, seat.hello.device if seat.hello else "", seat.name)
        for other in self._ctx.seats.held:
            if other is not seat and self._device_of(other) == self._device_of(seat):
                same = replace(figures, stage=other.stage, notes=[])
                self.measured.take_compute(same, other.hello.device if other.hello else "", seat.name)
        self._computing.discard(seat.stage)
        if not self._computing and not self._is_planned:
            self._plan()

    def _take_paths(self, seat: Seat, figures: PathsMeasured) -> None:
        job = self._orders.get(figures.order)
        if job is None or job.dialler != seat.stage:
            raise RemoteProtocolError(f"{seat.name} sent figures of order {figures.order}, which is not its own")
        self.measured.take_paths(job, figures, seat.name)
        del self._orders[figures.order]
        if not figures.error:
            return
        self._undialled |= {(job.dialler, peer) for peer in job.peers}
        if job.kind == "path" and not figures.round_trips:  # it could not be dialled
            hello, ends = seat.hello, (job.peers[0], job.dialler)
            if hello is not None and hello.address and ends not in self._undialled:
                counts = (1, *self._request.connections)
                self._add(
                    [[Job("path" if count == 1 else "connections", ends[0], ends[1:] * count)] for count in counts]
                )
                return
            if self._open_relay is not None:
                self._apart.append(job.pair)
                return
        self._ctx.warn(self.measured.failures[-1])

    def _add(self, batches: list[list[Job]]) -> None:
        """Order these jobs next."""
        self._batches[:0] = batches
        self._num_batches += len(batches)

    def _plan(self) -> None:
        self._is_planned = True
        seats = self._ctx.seats.held
        endpoints = [Endpoint(seat.stage, seat.host, seat.hello.address if seat.hello else "") for seat in seats]
        batches, apart = planned_jobs(endpoints, self._machines, self._request)
        self._add(batches)
        for pair in apart:
            self.measured.note_apart(pair)
            if self._open_relay is None:
                self._ctx.warn(self.measured.failures[-1])
            else:
                self._apart.append(pair)

    def _next_batch(self) -> None:
        """Order the next jobs, unless all are done, without the peers that could not be reached before."""
        while (self._batches or self._apart) and not self._orders:
            if not self._batches:
                self._relay()
            for job in self._batches.pop(0) if self._batches else ():
                peers = tuple(peer for peer in job.peers if (job.dialler, peer) not in self._undialled)
                job = replace(job, peers=peers)
                if len(job.peers) >= (2 if job.kind in ("connections", "access") else 1):
                    self._num_orders += 1
                    self._orders[self._num_orders] = job
                    self._ctx.send(self._ctx.seats[job.dialler], self._order(job))

    def _relay(self) -> None:
        """Have the hosts measure that need the relay; when they have, their paths are known."""
        assert self._open_relay is not None, "else no pair is kept for it"
        if not self._relay_port:
            self._relay_port = self._open_relay()
            self._add(relay_jobs(sorted({stage for pair in self._apart for stage in pair})))
            return
        for pair in self._apart:
            self._ctx.warn(self.measured.note_relayed(pair))
        self._apart.clear()

    def _order(self, job: Job) -> MeasurePaths:
        """Streams of one path end when they have settled; those that share a link must end together."""
        peers: list[list[str | int]] = [[peer, self.measured.name_of(peer), self._address(peer)] for peer in job.peers]
        least_s, most_s = self._request.seconds, MOST_S
        if job.kind not in ("path", "leg"):
            least_s = most_s = max(self._request.seconds, TOGETHER_S)
        return MeasurePaths(self._num_orders, peers, least_s, most_s)

    def _address(self, peer: int) -> str:
        if peer == RELAY:
            return f":{self._relay_port}"
        hello = self._ctx.seats[peer].hello
        return hello.address if hello else ""

    def _activity(self) -> str:
        if self._computing:
            order = self._compute_order
            what = "compute" if order.micro_batches else "codecs" if order.codecs else "memory"
            return f"{what} of {stage_list(sorted(self._computing))}"
        if not self._orders:
            return ""
        jobs = ", ".join(self._in_words(job) for job in self._orders.values())
        return f"{self._num_batches - len(self._batches)}/{self._num_batches}  {jobs}"

    def _in_words(self, job: Job) -> str:
        names = self.measured.names
        if job.kind == "access":
            return f"{names[job.dialler]} and all others"
        over = f" over {len(job.peers)} connections" if len(job.peers) > 1 else ""
        return " and ".join(map(self.measured.name_of, job.pair)) + over
