"""Checkpoints written beside the training have the tensors of their step, in order, in bounded memory."""

import logging
import threading

import pytest
import torch

from tahq.pipeline.checkpoint import writer as snapshot_writer
from tahq.pipeline.checkpoint.writer import SnapshotBuffer, SnapshotWriter
from tahq.pipeline.spans import Stopwatch


class Disk:
    """Writes when allowed; records the writes and their threads."""

    def __init__(self):
        self.may_write = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.written = []
        self.threads = []
        self.addresses = []
        self.error = None

    def __call__(self, step, tensors):
        self.begun.release()
        assert self.may_write.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        self.threads.append(threading.current_thread().name)
        self.addresses += [tensor.data_ptr() for tensor in tensors.values() if tensor.numel()]
        self.written.append((step, {name: tensor.clone() for name, tensor in tensors.items()}))

    def let(self, count):
        self.may_write.release(count)

    @property
    def steps(self):
        return [step for step, _ in self.written]


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def writer(disk):
    made = SnapshotWriter(disk, 2, Stopwatch())
    yield made
    disk.let(100)
    if disk.error is None:
        made.finish()


def filled(length, value=1.0):
    return {"x": torch.full((length,), float(value))}


def described(tensors):
    """Shape, type and bits of each tensor."""
    return {n: (t.shape, t.dtype, t.contiguous().reshape(-1).view(torch.uint8).tolist()) for n, t in tensors.items()}


def test_changes_after_the_copy_are_not_in_the_checkpoint(disk, writer):
    tensors = {
        "strided": torch.arange(12.0).view(3, 4).T,
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
        "half": torch.randn(7).bfloat16(),
        "ids": torch.tensor([5, 2**40]),
        "flags": torch.tensor([True, False]),
        "NaN with a payload": torch.tensor([0x7FC00001, -0x00400001], dtype=torch.int32).view(torch.float32),
    }
    expected = described(tensors)
    writer.take(5, tensors)
    writer.hold_back_changes()
    assert disk.begun.acquire(timeout=30)
    for tensor in tensors.values():
        tensor.zero_()
    disk.let(1)
    writer.finish()
    ((step, written),) = disk.written
    assert step == 5
    assert described(written) == expected


def test_third_checkpoint_waits_for_the_disk_with_one_warning(disk, caplog):
    stopwatch = Stopwatch()
    writer = SnapshotWriter(disk, 2, stopwatch)
    for step in (1, 2):
        writer.take(step, filled(4))
    stopwatch.take()
    for n in range(4):
        threading.Timer(0.1 * (1 + n), disk.let, [1]).start()
    with caplog.at_level(logging.WARNING):
        for step in (3, 4):
            writer.take(step, filled(4))
        writer.finish()
    assert disk.steps == [1, 2, 3, 4]
    assert len(set(disk.addresses)) == 2
    totals = stopwatch.take()
    assert totals["snapshot"] >= 0.15  # two waits of 0.1 s each, less the time to start the timers
    assert totals["beside:snapshot"] > 0
    assert [record.message.partition(" waited ")[0] for record in caplog.records] == ["the checkpoint after step 3"]
    assert "run.checkpoint_every" in caplog.text


def test_tensors_that_are_not_copied_are_written_here_after_everything_due_before(disk, writer):
    writer.take(1, filled(4))
    threading.Timer(0.1, disk.let, [2]).start()
    source = filled(4)
    writer.take(2, source, copy=False)
    assert disk.steps == [1, 2]
    assert disk.threads == ["tahq-snapshot", threading.current_thread().name]
    assert disk.addresses[-1] == source["x"].data_ptr()


def test_training_waits_with_one_warning_if_there_is_no_memory_for_a_copy(disk, monkeypatch, caplog):
    class Huge(SnapshotBuffer):
        def fill(self, tensors):
            torch.empty(1 << 50)

    writer = SnapshotWriter(disk, 2, Stopwatch())
    monkeypatch.setattr(snapshot_writer, "SnapshotBuffer", Huge)
    disk.let(3)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            writer.take(step, filled(4))
    assert disk.steps == [1, 2, 3]
    assert caplog.text.count("run.checkpoint_buffers: 0") == 1


def test_training_waits_if_a_copy_would_not_fit_beside_those_of_other_stages(disk, caplog):
    writer = SnapshotWriter(disk, 2, Stopwatch(), num_stages=10**15)
    disk.let(1)
    with caplog.at_level(logging.WARNING):
        writer.take(1, filled(4))
    assert disk.threads == [threading.current_thread().name]
    assert "no memory for a copy" in caplog.text


def test_unexpected_error_of_the_thread_is_raised_in_the_compute_thread(disk, writer):
    disk.error = ValueError("a mistake in tahq")
    disk.let(100)
    writer.take(1, filled(4))
    for use in (writer.finish, lambda: writer.take(2, filled(4))):
        with pytest.raises(ValueError, match="a mistake in tahq"):
            use()
