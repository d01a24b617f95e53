"""Times of work on CUDA, by events that are read when the step is over."""

import threading
import time
from itertools import pairwise

import pytest
import torch

from tahq.pipeline.spans import CudaMarks, Stopwatch

pytestmark = pytest.mark.gpu


@pytest.fixture
def stopwatch():
    return Stopwatch(CudaMarks(torch.device("cuda")))


def busy_work(x: torch.Tensor) -> None:
    for _ in range(50):
        x @ x


def test_queued_work_is_timed_by_the_device_and_not_waited_for(stopwatch):
    """50 products of 8192² are 55 TFLOP: some 50 ms at the least on any GPU, and microseconds to queue."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    busy_work(x)
    torch.cuda.synchronize()
    begin_s = time.monotonic()
    with stopwatch.measure("forward"):
        busy_work(x)
    queued_s = time.monotonic() - begin_s
    torch.cuda.synchronize()
    took_s = time.monotonic() - begin_s
    total_s = stopwatch.take()["forward"]
    assert queued_s < 0.5 * total_s
    assert total_s == pytest.approx(took_s, rel=0.1)


def test_spans_of_the_device_lie_where_the_host_saw_them(stopwatch):
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    busy_work(x)
    torch.cuda.synchronize()
    stopwatch.is_recording = True
    begin_s = time.monotonic()
    for number in range(5):
        with stopwatch.measure("forward", number):
            busy_work(x)
        with stopwatch.measure("backward", number):
            busy_work(x)
    torch.cuda.synchronize()
    end_s = time.monotonic()
    stopwatch.take()
    spans = sorted(stopwatch.take_spans(), key=lambda span: span.begin_s)
    assert [span.activity for span in spans] == ["forward", "backward"] * 5
    assert all(before.end_s <= after.begin_s + 1e-4 for before, after in pairwise(spans))
    assert begin_s - 1e-3 <= spans[0].begin_s
    assert spans[-1].end_s <= end_s + 1e-3


def test_stream_of_another_lane_is_timed_too(stopwatch):
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()

    def encode() -> None:
        with torch.cuda.stream(stream), stopwatch.measure("encode"):
            busy_work(x)

    thread = threading.Thread(target=encode)
    thread.start()
    thread.join()
    assert stopwatch.take()["beside:encode"] > 0
