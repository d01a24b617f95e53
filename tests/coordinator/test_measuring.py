"""Whole measurements: scripted workers, virtual clock, the real coordinator."""

import signal
from dataclasses import dataclass, field, replace

import pytest

from tahq.comm.control.messages import (
    Abort,
    Assign,
    Bye,
    ComputeMeasured,
    Heartbeat,
    Hello,
    Join,
    MeasureCompute,
    MeasurePaths,
    Message,
    PathsMeasured,
    StartOver,
)
from tahq.coordinator.measuring import Measuring
from tahq.coordinator.service import Coordinator
from tahq.plan.measure.measurement import RELAY, Imitated, Measured, MeasureRequest

CODEC = "raw:dtype=fp32"
REQUEST = MeasureRequest(micro_batches=(1, 2), codecs=(CODEC,))
TIMES = {"micro_batch": 1, "block_forward": 0.01, "block_backward": 0.02, "block_input_gradient": 0.01}


@dataclass
class Measurer:
    """A worker that answers every order at once; `unreachable` stages refuse it."""

    server: object
    stage: int
    hello: dict = field(default_factory=dict)
    unreachable: tuple = ()
    replies: bool = True
    orders: list = field(default_factory=list)
    say: Message | None = None

    def __post_init__(self):
        self.identity = f"worker-{self.stage}".encode()
        self.server.workers[self.identity] = self

    def send(self, message):
        self.server.inbox.append((self.identity, message))

    def beat(self):
        self.send(Heartbeat(self.stage))

    def receive(self, message):
        match message:
            case Assign():
                assert message.is_measuring
                hello = Hello(self.stage, "0.1.0", "c0ffee", "", "", f"10.0.0.{self.stage}:9", "cpu", "2", 0, 0)
                self.send(replace(hello, **self.hello))
            case MeasureCompute() | MeasurePaths():
                self.orders.append(message)
                if self.replies:
                    self.send(self.say or self.answer(message))

    def answer(self, order):
        if isinstance(order, MeasureCompute):
            times = [TIMES] if order.micro_batches else []
            return ComputeMeasured(self.stage, 10**9, times, {spec: [1e-9, 2e-9] for spec in order.codecs})
        refused = [host for stage, host, _ in order.peers if stage in self.unreachable]
        if refused:
            return PathsMeasured(self.stage, order.order, [], [], [], f"{refused[0]}: Connection refused")
        count = len(order.peers)
        return PathsMeasured(self.stage, order.order, [0.02] * count, [1e7] * count, [2e7] * count)


@pytest.fixture
def begin(scene):
    """`begin(stage1={…})` builds a coordinator and three workers that measure; returns its figures."""

    def make(request=REQUEST, join_again=None, computers="abc", open_relay=None, needs_codecs=None, **changes_by_stage):
        measured = Measured(["host0", "host1", "host2"], computers)
        scene.coordinator = Coordinator(
            replace(scene.options, is_measuring=True, join_again=join_again),
            scene.server,
            scene.observer,
            measuring=Measuring(request, measured, "abc", open_relay, needs_codecs),
            clock=scene.clock,
        )
        scene.measurers = [
            Measurer(scene.server, stage, **changes_by_stage.get(f"stage{stage}", {})) for stage in range(3)
        ]
        for stage, worker in enumerate(scene.measurers):
            worker.send(Join(stage, "0.1.0", f"host{stage}", 100 + stage))
        return measured

    return make


@pytest.mark.parametrize(
    ("devices", "each", "asked", "known"),
    [
        (("cuda:0", "cuda:0", "cuda:1"), False, [0, 2], ["a cuda:0", "a cuda:0", None]),
        (("cuda:0", "cuda:0", "cuda:1"), True, [0, 1, 2], ["a cuda:0", "a cuda:0", None]),
        (("cpu", "cpu", "cuda:0"), False, [0, 1, 2], [None, None, None]),
    ],
)
def test_of_workers_that_share_a_gpu_one_measures_for_all(scene, begin, devices, each, asked, known):
    hellos = {f"stage{stage}": {"hello": {"device": device}} for stage, device in enumerate(devices)}
    measured = begin(replace(REQUEST, each=each), computers="aaa", **hellos)
    assert scene.run() == 0
    orders = [[type(order) for order in worker.orders] for worker in scene.measurers]
    assert [stage for stage, own in enumerate(orders) if MeasureCompute in own] == asked
    hosts = measured.numbers(Imitated(), "").hosts
    assert [host.device for host in hosts] == known
    assert [host.compute for host in hosts] == [hosts[0].compute] * 3
    assert [host.memory for host in hosts] == [10**9 // devices.count(device) for device in devices]


def paths_of(scene, stage):
    return [[row[0] for row in order.peers] for order in scene.measurers[stage].orders[1:]]


def test_everything_is_measured_and_all_workers_leave(scene, begin):
    measured = begin()
    assert scene.run() == 0
    numbers = measured.numbers(Imitated(), "")
    assert [host.name for host in numbers.hosts] == ["host0", "host1", "host2"]
    assert len(numbers.paths) == 6
    assert all(path.rate in (1e7, 2e7) for path in numbers.paths)
    assert [host.up for host in numbers.hosts] == [2e7] * 3
    assert paths_of(scene, 2) == [[1], [0], [0, 1]]
    for stage in range(3):
        assert scene.server.told(f"worker-{stage}".encode(), Bye) == [Bye(0)]
    assert scene.end.message == ""
    told = [detail for phase, detail in scene.observer.of("phase_changed") if phase == "measuring"]
    assert {"compute of stages 0, 1, 2", "1/6  host1 and host2", "6/6  host2 and all others"} <= set(told)


@pytest.mark.parametrize("are_needed", [True, False])
def test_codecs_are_timed_after_everything_else_if_the_other_figures_say_so(scene, begin, are_needed):
    known = []

    def needs_codecs():
        known.append(measured.numbers(Imitated(), ""))
        return are_needed

    measured = begin(needs_codecs=needs_codecs)
    assert scene.run() == 0
    (numbers,) = known
    assert len(numbers.paths) == 6
    assert [host.codecs for host in numbers.hosts] == [{}] * 3
    for worker in scene.measurers:
        orders = [(order.micro_batches, order.codecs) for order in worker.orders if isinstance(order, MeasureCompute)]
        assert orders == [([1, 2], []), *([([], [CODEC])] if are_needed else [])]
    after = measured.numbers(Imitated(), "")
    assert [list(host.codecs) for host in after.hosts] == [[CODEC] if are_needed else []] * 3
    assert [host.compute for host in after.hosts] == [host.compute for host in numbers.hosts]
    assert scene.observer.of("warned") == []


def test_a_peer_that_cannot_be_reached_is_named_and_not_tried_again_and_the_rest_measured(scene, begin):
    measured = begin(replace(REQUEST, connections=(2,)), stage0={"unreachable": (2,)}, stage2={"unreachable": (0,)})
    assert scene.run() == 3
    assert paths_of(scene, 2) == [[1], [1, 1], [0]]
    assert paths_of(scene, 1) == [[0], [0, 0], [0, 2]]
    both = "from host2 to host0: host0: Connection refused; from host0 to host2: host2: Connection refused"
    assert scene.end.message == both
    assert scene.observer.of("warned") == [both]
    numbers = measured.numbers(Imitated(), "")
    failed = {(path.source, path.target) for path in numbers.paths if path.failure}
    assert failed == {("host0", "host2"), ("host2", "host0")}
    assert sum(path.rate is not None for path in numbers.paths) == 4


def test_host_that_cannot_dial_another_is_dialled(scene, begin):
    measured = begin(replace(REQUEST, connections=(2,), access=False), stage2={"unreachable": (0,)})
    assert scene.run() == 0
    assert paths_of(scene, 2) == [[1], [1, 1], [0]]
    assert paths_of(scene, 0) == [[2], [2, 2]]
    assert scene.observer.of("warned") == []
    numbers = measured.numbers(Imitated(), "")
    assert numbers.relay is None
    assert all(path.rate is not None and path.failure is None for path in numbers.paths)


@pytest.mark.parametrize("hello", [{}, {"address": ""}])
def test_path_that_a_run_would_relay_is_composed_of_its_legs(scene, begin, hello):
    """Each leg is 10 Mbit/s to the relay and 20 from there, alone and when both are measured at once."""
    opened = []
    measured = begin(
        replace(REQUEST, access=False),
        open_relay=lambda: opened.append(7699) or 7699,
        stage0={"unreachable": (2,), "hello": hello},
        stage2={"unreachable": (0,), "hello": hello},
    )
    assert scene.run() == 0
    assert opened == [7699]
    for stage in (0, 2):
        assert scene.measurers[stage].orders[-1].peers == [[RELAY, "the coordinator's machine", ":7699"]]
    assert [RELAY] not in paths_of(scene, 1)
    (warning,) = scene.observer.of("warned")
    assert warning.startswith("as neighbours host0 and host2 would be relayed through the coordinator's machine: ")
    numbers = measured.numbers(Imitated(), "")
    relayed = {(path.source, path.target): path for path in numbers.paths if path.relayed}
    assert set(relayed) == {("host0", "host2"), ("host2", "host0")}
    assert all((path.rate, path.round_trip, path.failure) == (1e7, 0.04, None) for path in relayed.values())
    assert (numbers.relay.host, numbers.relay.up, numbers.relay.down) == (None, 4e7, 2e7)


def test_path_stays_failed_if_the_relay_cannot_be_reached_either(scene, begin):
    measured = begin(
        open_relay=lambda: 7699, stage0={"unreachable": (2, RELAY)}, stage2={"unreachable": (0,)}, request=REQUEST
    )
    assert scene.run() == 3
    assert "from host2 to host0: host0: Connection refused" in scene.end.message
    assert "from host0 to the coordinator's machine: the coordinator's machine: Connection refused" in (
        scene.observer.of("warned")
    )
    numbers = measured.numbers(Imitated(), "")
    assert numbers.relay is None
    assert {path.source for path in numbers.paths if path.failure} == {"host0", "host2"}


def test_workers_join_again_where_a_run_follows_even_if_a_path_failed(scene, begin):
    begin(join_again=frozenset({0, 2}), stage0={"unreachable": (2,)}, stage2={"unreachable": (0,)})
    assert scene.run() == 0
    told = [scene.server.told(f"worker-{stage}".encode(), StartOver) for stage in range(3)]
    assert [bool(orders) for orders in told] == [True, False, True]


def test_hosts_that_only_dial_out_are_told_and_the_rest_measured(scene, begin):
    measured = begin(stage0={"hello": {"address": ""}}, stage1={"hello": {"address": ""}})
    assert scene.run() == 3
    assert "host0 and host1: both only dial out" in scene.end.message
    assert sum(path.rate is not None for path in measured.numbers(Imitated(), "").paths) == 4


def test_worker_that_dies_ends_the_measurement_and_its_figures_so_far_are_kept(scene, begin):
    measured = begin(stage2={"replies": False})

    scene.when(lambda: scene.clock.now_s > 1001, lambda: scene.coordinator.worker_exited(2, -9))
    assert scene.run() == 3
    assert "stage 2 (host2, pid 102): its worker exited with status -9 (SIGKILL)" in scene.end.message
    assert "resume" not in scene.end.message
    assert [host.name for host in measured.numbers(Imitated(), "").hosts] == ["host0", "host1"]


def test_signal_ends_the_measurement_at_once_and_no_path_is_measured_while_a_worker_computes(scene, begin):
    begin(stage1={"replies": False})
    scene.when(lambda: scene.clock.now_s > 1005, lambda: scene.coordinator.request_stop(signal.SIGTERM))
    assert scene.run() == 143
    assert scene.end.message == "the coordinator got SIGTERM while measuring"
    assert scene.server.told(b"worker-0", Abort)
    assert paths_of(scene, 0) == paths_of(scene, 2) == []


@pytest.mark.parametrize(
    "said",
    [
        ComputeMeasured(1, 1, [], {}),
        ComputeMeasured(1, 1, [TIMES], {"tah": [1.0, 1.0]}),
        ComputeMeasured(0, 1, [TIMES], {}),
        PathsMeasured(1, 1, [0.1], [1.0], [1.0]),
    ],
)
def test_figures_that_were_not_asked_for_end_the_measurement(scene, begin, said):
    begin(stage1={"say": said})
    assert scene.run() == 3
    assert "stage 1 (host1, pid 101)" in scene.end.message
