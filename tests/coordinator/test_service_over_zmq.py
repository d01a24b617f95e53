"""The coordinator over real sockets: every message encoded, sent, decoded."""

import threading
import time
from dataclasses import replace

import pytest
from coordinator.conftest import ScriptedWorker

from tahq.comm.control.client import ControlClient
from tahq.comm.control.messages import Abort, Bye, Commit, Join, Refuse
from tahq.comm.control.server import ControlServer
from tahq.comm.link.shaping import Shaping
from tahq.coordinator.service import Coordinator
from tahq.pipeline.config import TrainingConfig

NUM_STAGES = 2


class ThreadWorker(ScriptedWorker):
    """A scripted worker in a thread, with a socket of its own."""

    def __init__(self, address, stage):
        super().__init__(None, stage, NUM_STAGES)
        self.client = ControlClient(address, f"stage {stage}", shaping=Shaping(), peer_timeout_s=5.0, heartbeat_s=0.2)
        self.latencies_s, self.prepared_s, self.last = [], 0.0, None
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def send(self, message):
        self.client.send(message)

    def work(self):
        try:
            self.send(Join(self.stage, self.version, "host", 1))
            while not isinstance(self.last, Bye | Abort | Refuse):
                self.last = self.client.recv(10.0)
                if isinstance(self.last, Commit):
                    self.latencies_s.append(time.monotonic() - self.prepared_s)
                self.receive(self.last)
        finally:
            self.client.close()

    def begin(self, step):
        self.prepared_s = time.monotonic()
        super().begin(step)


@pytest.fixture
def served(scene):
    """A coordinator bound to a free port of the loopback, its run going on in a thread."""
    server = ControlServer("127.0.0.1:0", heartbeat_s=0.2)
    training = TrainingConfig(epochs=0.8, eval_every=5, global_batch=8)
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


def test_whole_run_over_sockets(served, scene):
    coordinator, finish = served
    workers = [ThreadWorker(coordinator.address, stage) for stage in range(NUM_STAGES)]
    assert finish() == [0]
    for worker in workers:
        worker.thread.join(5.0)
    assert [worker.last for worker in workers] == [Bye(0), Bye(0)]
    assert scene.steps() == list(range(1, 11))
    assert [record.step for record in scene.observer.of("validated")] == [5, 10]
    assert [parts.step for parts in scene.published] == [10]
    # a round trip over the loopback and one decision take well under a millisecond; the machine may be busy
    assert sorted(workers[0].latencies_s)[5] < 0.1
