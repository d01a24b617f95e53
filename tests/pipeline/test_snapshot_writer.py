"""Snapshots written beside the training: what is written is what was there, in order, in bounded memory."""

import logging
import threading

import pytest
import torch

from tahq.pipeline.checkpoint import writer as snapshot_writer
from tahq.pipeline.checkpoint.writer import SnapshotBuffer, SnapshotWriter
from tahq.pipeline.spans import Stopwatch


class Disk:
    """Writes when it is let; keeps what was written, and in which thread."""

    def __init__(self) -> None:
        self.may_write = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.written: list[tuple[int, dict[str, torch.Tensor]]] = []
        self.threads: list[str] = []
        self.addresses: list[int] = []
        self.error: Exception | None = None

    def __call__(self, step, tensors) -> None:
        self.begun.release()
        assert self.may_write.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        self.threads.append(threading.current_thread().name)
        self.addresses += [tensor.data_ptr() for tensor in tensors.values() if tensor.numel()]
        self.written.append((step, {name: tensor.clone() for name, tensor in tensors.items()}))

    def let(self, count: int) -> None:
        self.may_write.release(count)

    @property
    def steps(self) -> list[int]:
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


def odd_tensors() -> dict[str, torch.Tensor]:
    """All kinds: strided, of no dimension, empty, of other types, NaN with a payload."""
    payload = torch.tensor([0x7FC00001, -0x00400001], dtype=torch.int32).view(torch.float32)
    return {
        "strided": torch.arange(12.0).view(3, 4).T,
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
        "half": torch.randn(7).bfloat16(),
        "ids": torch.tensor([5, 2**40]),
        "flags": torch.tensor([True, False]),
        "nan": payload,
    }


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_what_changes_after_the_copy_is_not_in_the_snapshot(disk, writer):
    tensors = odd_tensors()
    expected = {name: bits(tensor) for name, tensor in tensors.items()}
    writer.take(5, tensors)
    writer.hold_back_changes()
    assert disk.begun.acquire(timeout=30)
    for tensor in tensors.values():
        tensor.zero_()
    disk.let(1)
    writer.finish()
    ((step, written),) = disk.written
    assert step == 5
    assert {name: bits(tensor) for name, tensor in written.items()} == expected
    assert {name: (t.shape, t.dtype) for name, t in written.items()} == {
        name: (t.shape, t.dtype) for name, t in tensors.items()
    }


def test_writing_is_done_in_another_thread_in_the_order_of_steps(disk, writer):
    for step in (1, 2):
        writer.take(step, {"x": torch.full((4,), float(step))})
    assert disk.written == []
    disk.let(2)
    writer.finish()
    assert disk.threads == ["tahq-snapshot"] * 2
    assert [(step, tensors["x"][0].item()) for step, tensors in disk.written] == [(1, 1.0), (2, 2.0)]


def test_third_snapshot_waits_for_the_disk_and_says_so_once(disk, caplog):
    stopwatch = Stopwatch()
    writer = SnapshotWriter(disk, 2, stopwatch)
    for step in (1, 2):
        writer.take(step, {"x": torch.ones(4)})
    stopwatch.take()
    later = [threading.Timer(0.2 * (1 + n), disk.let, [1]) for n in range(4)]
    for timer in later:
        timer.start()
    with caplog.at_level(logging.WARNING):
        for step in (3, 4):
            writer.take(step, {"x": torch.ones(4)})
        writer.finish()
    assert disk.steps == [1, 2, 3, 4]
    assert len(set(disk.addresses)) == 2
    totals = stopwatch.take()
    assert totals["snapshot"] >= 0.3  # two waits, of 0.2 s each but for how late the timers were begun
    assert totals["beside:snapshot"] > 0
    assert [record.message.partition(" waited ")[0] for record in caplog.records] == ["the checkpoint after step 3"]
    assert "run.snapshot_every" in caplog.text


def test_memory_is_used_again_and_grows_with_what_is_copied(disk, writer):
    disk.let(100)
    for length in (100, 40, 100, 200, 200):
        writer.take(length, {"x": torch.full((length,), float(length))})
        writer.finish()
    assert [tensors["x"].tolist() for _, tensors in disk.written] == [[float(n)] * n for n in (100, 40, 100, 200, 200)]
    first, second, third, fourth, fifth = disk.addresses
    assert first == second == third
    assert fourth == fifth


def test_without_buffers_the_thread_that_computes_writes(disk):
    disk.let(1)
    SnapshotWriter(disk, 0, Stopwatch()).take(1, {"x": torch.ones(4)})
    assert disk.threads == [threading.current_thread().name]


def test_what_is_not_copied_is_written_here_after_what_was_due_before(disk, writer):
    writer.take(1, {"x": torch.ones(4)})
    threading.Timer(0.1, disk.let, [2]).start()
    source = torch.ones(4)
    writer.take(2, {"x": source}, copy=False)
    assert disk.steps == [1, 2]
    assert disk.threads == ["tahq-snapshot", threading.current_thread().name]
    assert disk.addresses[-1] == source.data_ptr()


def test_no_memory_for_a_copy_means_that_training_waits_and_that_it_is_said(disk, monkeypatch, caplog):
    class Huge(SnapshotBuffer):
        def fill(self, tensors):
            torch.empty(1 << 50)

    writer = SnapshotWriter(disk, 2, Stopwatch())
    monkeypatch.setattr(snapshot_writer, "SnapshotBuffer", Huge)
    disk.let(3)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            writer.take(step, {"x": torch.ones(4)})
    assert disk.steps == [1, 2, 3]
    assert caplog.text.count("run.snapshot_buffers: 0") == 1


def test_failure_of_the_writers_own_is_raised_where_training_is(disk, writer):
    disk.error = ValueError("a mistake in tahq")
    disk.let(100)
    writer.take(1, {"x": torch.ones(4)})
    with pytest.raises(ValueError, match="a mistake in tahq"):
        writer.finish()
    with pytest.raises(ValueError, match="a mistake in tahq"):
        writer.take(2, {"x": torch.ones(4)})
