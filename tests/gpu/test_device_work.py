"""Work beside the computing on a CUDA device: times by events, copies of a stage, `tahq measure`'s timing."""

import threading
import time
from itertools import pairwise

import pytest
import torch
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.memory.free_memory import free_bytes, shares_of_memory
from tahq.pipeline.checkpoint.writer import SnapshotBuffer
from tahq.pipeline.spans import CudaMarks, Stopwatch
from tahq.quant.config import WireConfig
from tahq.worker.measuring import ComputeMeasurement, seconds_per_element

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")
NUM, LENGTH = 4, 64 * 1024 * 1024


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
    assert 0.7 * took_s < total_s < 1.02 * took_s


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


# -- copies of a stage ---------------------------------------------------------------------------


def stage() -> dict[str, torch.Tensor]:
    """A gibibyte on the device, a strided tensor, and a counter that the host has."""
    large = {str(n): torch.full((LENGTH,), float(n), device="cuda") for n in range(NUM)}
    return large | {"strided": torch.arange(12.0, device="cuda").view(3, 4).T, "step": torch.tensor(7.0)}


def test_copy_is_of_the_moment_although_the_device_goes_on():
    buffer, tensors = SnapshotBuffer(), stage()
    for expected in (1.0, 2.0):  # the second time in the same memory, which has what the first has left
        for n in range(NUM):
            tensors[str(n)].fill_(expected + n)
        buffer.fill(tensors)
        buffer.hold_back_changes()
        for n in range(NUM):
            tensors[str(n)].zero_()
        buffer.wait()
        assert all(bool((buffer.tensors[str(n)] == expected + n).all()) for n in range(NUM))
        assert all(tensor.is_pinned() for name, tensor in buffer.tensors.items() if name != "step")
        assert torch.equal(buffer.tensors["strided"], tensors["strided"].cpu())
        assert buffer.tensors["step"].item() == 7.0


def test_host_goes_on_while_the_device_copies():
    """A gibibyte over PCIe 5 takes 16 ms at the least; queueing six copies takes microseconds each."""
    buffer, tensors = SnapshotBuffer(), stage()
    buffer.fill(tensors)  # takes the memory
    buffer.wait()
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    buffer.fill(tensors)
    queued_s = time.perf_counter() - begin_s
    buffer.wait()
    assert queued_s < 0.5 * (time.perf_counter() - begin_s)


def test_sources_that_are_given_back_are_copied_all_the_same():
    buffer = SnapshotBuffer()
    for _ in range(3):
        buffer.fill({"x": torch.full((LENGTH,), 5.0, device="cuda")})
        buffer.hold_back_changes()
        torch.zeros(LENGTH, device="cuda")  # would get the same memory, if nobody held it
        buffer.wait()
        assert bool((buffer.tensors["x"] == 5.0).all())


# -- what `tahq measure` times -------------------------------------------------------------------


def test_parts_are_timed_under_autocast_and_free_memory_is_the_drivers():
    config = ClusterConfig.model_validate(tiny(model={"vocab_size": 256}))
    times = ComputeMeasurement(config, 0, CUDA, lambda activity: None).layer_times(4)
    assert 0 < times.block_input_gradient <= times.block_backward < 1
    assert min(times.block_forward, times.last_backward) > 0
    for spec in ("raw:dtype=bf16", "fixed:bits=4"):
        assert all(0 < each_s < 1e-3 for each_s in seconds_per_element(spec, WireConfig(), (2, 128, 256), CUDA))
    free, whole = torch.cuda.mem_get_info(CUDA)
    assert 0 < free_bytes(CUDA) <= whole
    assert free_bytes(CUDA) == pytest.approx(free, rel=0.1)
    assert shares_of_memory([CUDA, CUDA]) == pytest.approx([free / 2 - (600 << 20)] * 2, rel=0.1)
