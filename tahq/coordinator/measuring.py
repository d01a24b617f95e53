"""Leads the workers of `tahq measure`: first each measures its own compute, all at once, then the paths between them.

A path that cannot be measured is noted and the next is measured; a lost worker ends the measurement, and the figures
so far are kept.
"""

from collections.abc import Sequence
from dataclasses import replace

from tahq.comm.control.messages import ComputeMeasured, MeasureCompute, MeasurePaths, PathsMeasured
from tahq.comm.topology import Endpoint
from tahq.coordinator.context import RunContext
from tahq.coordinator.joining.seats import Seat, stage_list
from tahq.errors import RemoteProtocolError
from tahq.plan.measure.measurement import Job, Measured, MeasureRequest, planned_jobs

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
    """

    def __init__(self, request: MeasureRequest, measured: Measured, machines: Sequence[str]) -> None:
        self.measured = measured
        self._request, self._machines = request, machines
        self._ctx: RunContext
        self._computing: set[int] = set()
        self._batches: list[list[Job]] = []
        self._num_batches = 0
        self._orders: dict[int, Job] = {}
        self._num_orders = 0

    def begin(self, ctx: RunContext) -> None:
        """All workers are there: order each to measure its own compute."""
        self._ctx = ctx
        self._computing = {seat.stage for seat in ctx.seats.held}
        request = self._request
        places = {
            seat.stage: (self.measured.computers[seat.stage], seat.hello.device if seat.hello else "")
            for seat in ctx.seats.held
        }
        for seat in ctx.seats.held:
            place = places[seat.stage]
            shares_gpu = place[1].startswith("cuda") and list(places.values()).count(place) > 1
            sizes, codecs = list(request.micro_batches), list(request.codecs)
            ctx.send(seat, MeasureCompute(sizes, codecs, request.compute_s, shares_gpu))
        ctx.tell_phase(self._activity())

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
        self._ctx.tell_phase(self._activity())

    def _take_compute(self, seat: Seat, figures: ComputeMeasured) -> None:
        is_asked = seat.stage in self._computing and bool(figures.times) == bool(self._request.micro_batches)
        if not is_asked or set(figures.codecs) - set(self._request.codecs):
            raise RemoteProtocolError(f"{seat.name} sent other times than it was asked for")
        self.measured.take_compute(figures, seat.hello.device if seat.hello else "", seat.name)
        self._computing.discard(seat.stage)
        if not self._computing:
            self._plan()

    def _take_paths(self, seat: Seat, figures: PathsMeasured) -> None:
        job = self._orders.get(figures.order)
        if job is None or job.dialler != seat.stage:
            raise RemoteProtocolError(f"{seat.name} sent figures of order {figures.order}, which is not its own")
        num_failures = len(self.measured.failures)
        self.measured.take_paths(job, figures, seat.name)
        for failure in self.measured.failures[num_failures:]:
            self._ctx.warn(failure)
        del self._orders[figures.order]

    def _plan(self) -> None:
        seats = self._ctx.seats.held
        endpoints = [Endpoint(seat.stage, seat.host, seat.hello.address if seat.hello else "") for seat in seats]
        self._batches, apart = planned_jobs(endpoints, self._machines, self._request)
        self._num_batches = len(self._batches)
        for pair in apart:
            self.measured.note_apart(pair)
            self._ctx.warn(self.measured.failures[-1])

    def _next_batch(self) -> None:
        """Order the next jobs, unless all are done, without the peers that could not be reached before."""
        while self._batches and not self._orders:
            for job in self._batches.pop(0):
                if job.kind != "path":
                    peers = tuple(peer for peer in job.peers if not self.measured.has_failed(job.dialler, peer))
                    job = replace(job, peers=peers)
                if job.kind == "path" or len(job.peers) > 1:
                    self._num_orders += 1
                    self._orders[self._num_orders] = job
                    self._ctx.send(self._ctx.seats[job.dialler], self._order(job))

    def _order(self, job: Job) -> MeasurePaths:
        """Streams of one path end when they have settled; those that share a link must end together."""
        hellos = {peer: self._ctx.seats[peer].hello for peer in job.peers}
        peers: list[list[str | int]] = [
            [peer, self.measured.names[peer], hello.address if (hello := hellos[peer]) else ""] for peer in job.peers
        ]
        least_s, most_s = self._request.seconds, MOST_S
        if job.kind != "path":
            least_s = most_s = max(self._request.seconds, TOGETHER_S)
        return MeasurePaths(self._num_orders, peers, least_s, most_s)

    def _activity(self) -> str:
        if self._computing:
            return f"{'compute' if self._request.micro_batches else 'memory'} of {stage_list(sorted(self._computing))}"
        if not self._orders:
            return ""
        jobs = ", ".join(self._in_words(job) for job in self._orders.values())
        return f"{self._num_batches - len(self._batches)}/{self._num_batches}  {jobs}"

    def _in_words(self, job: Job) -> str:
        names = self.measured.names
        if job.kind == "access":
            return f"{names[job.dialler]} and all others"
        over = f" over {len(job.peers)} connections" if len(job.peers) > 1 else ""
        return " and ".join(names[stage] for stage in job.pair) + over
