"""The coordinator over real sockets: every message encoded, sent, decoded."""

import threading
import time
from dataclasses import replace

import pytest

from tahq.comm.control.client import ControlClient
from tahq.comm.control.messages import (
    Abort,
    Assign,
    Bye,
    Commit,
    Evaluated,
    Join,
    Plan,
    Ready,
    Refuse,
    Snapshotted,
    Start,
)
from tahq.comm.control.server import ControlServer
from tahq.comm.link.shaping import Shaping
from tahq.coordinator.service import Coordinator
from tahq.pipeline.config import TrainingConfig

NUM_STAGES = 2


class ThreadWorker:
    """The protocol of a worker, in a thread, without a model."""

    def __init__(self, address, stage, hello, prepare):
        self.stage, self.hello, self.prepare = stage, hello, prepare
        self.client = ControlClient(address, f"stage {stage}", shaping=Shaping(), peer_timeout_s=5.0, heartbeat_s=0.2)
        self.latencies_s = []
        self.last = None
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def work(self):
        try:
            self.client.send(Join(self.stage, "0.1.0", "host", 1))
            while not isinstance(self.last, Bye | Abort | Refuse):
                self.last = self.client.recv(10.0)
                self.react(self.last)
        finally:
            self.client.close()

    def react(self, message):
        match message:
            case Assign():
                self.client.send(self.hello(self.stage, num_train_samples=80))
            case Plan():
                self.client.send(Ready(self.stage))
            case Start(step):
                self.prepare_step(step)
            case Commit():
                self.latencies_s.append(time.monotonic() - self.prepared_s)
                if message.evaluate and self.stage == NUM_STAGES - 1:
                    self.client.send(Evaluated(message.step, 10, 30.0, 25.0))
                if message.snapshot:
                    self.client.send(Snapshotted(message.step + 1, self.stage, "f", "ab", 10))
                if not message.stop:
                    self.prepare_step(message.step + 1)

    def prepare_step(self, step):
        self.prepared_s = time.monotonic()
        self.client.send(self.prepare(step, self.stage, NUM_STAGES))


@pytest.fixture
def served(scene):
    """A coordinator bound to a free port of the loopback, its run going on in a thread."""
    server = ControlServer("127.0.0.1:0", heartbeat_s=0.2)
    training = TrainingConfig(epochs=1.0, eval_every=5, global_batch=8)
    options = replace(scene.options, num_stages=NUM_STAGES, training=training, peer_timeout_s=5.0)
    coordinator = Coordinator(options, server, scene.observer, publish=scene.publish, executor=scene.executor)
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(coordinator.run(lambda: None)))
    thread.start()
    yield coordinator, lambda: (thread.join(20.0), statuses)[1]
    coordinator.request_stop(2)
    coordinator.request_stop(2)
    thread.join(20.0)
    server.close()


def test_whole_run_over_sockets(served, scene, hello, prepare):
    coordinator, finish = served
    workers = [ThreadWorker(coordinator.address, stage, hello, prepare) for stage in range(NUM_STAGES)]
    assert finish() == [0]
    for worker in workers:
        worker.thread.join(5.0)
    assert [worker.last for worker in workers] == [Bye(0), Bye(0)]
    assert [record.step for record in scene.observer.of("step_committed")] == list(range(1, 11))
    assert [record.step for record in scene.observer.of("validated")] == [5, 10]
    assert [parts.step for parts in scene.published] == [10]
    # a round trip over the loopback and one decision take well under a millisecond; the machine may be busy
    assert sorted(workers[0].latencies_s)[5] < 0.1


def test_duplicate_worker_is_refused_over_sockets(served, hello, prepare):
    coordinator, _ = served
    first = ThreadWorker(coordinator.address, 0, hello, prepare)
    deadline_s = time.monotonic() + 5.0
    while not isinstance(first.last, Assign) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    second = ThreadWorker(coordinator.address, 0, hello, prepare)
    second.thread.join(5.0)
    assert isinstance(second.last, Refuse)
    assert "stage 0 already has a worker: stage 0 (host, pid 1)" in second.last.reason
    coordinator.request_stop(2)
    first.thread.join(5.0)
    assert first.last == Abort("the coordinator got SIGINT before the first step", 130)
