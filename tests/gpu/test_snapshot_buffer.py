"""Copies of a stage on a CUDA device: whole whatever the device is given next, and the host waits for nothing."""

import time

import pytest
import torch

from tahq.pipeline.checkpoint.writer import SnapshotBuffer

pytestmark = pytest.mark.gpu

NUM, LENGTH = 4, 64 * 1024 * 1024


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
