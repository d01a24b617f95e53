"""Choosing kernels and dealing out jobs; on CUDA, tests/gpu/test_adamw_kernels.py."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.memory.adam import loop


def test_jobs_on_the_cpu_run_once_each_in_their_order():
    ran: list[int] = []
    jobs = [(torch.empty(size), lambda number=number: ran.append(number)) for number, size in enumerate((3, 7, 0, 7))]
    loop.run_side_by_side([])
    loop.run_side_by_side(jobs)
    assert ran == [0, 1, 2, 3]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 5))
def test_streams_get_all_jobs_and_none_is_idle_for_longer_than_the_largest(sizes, count):
    jobs = [(torch.empty(size, device="meta"), lambda: None) for size in sizes]
    parts = loop._dealt_out(jobs, count)
    assert sorted(id(job) for part in parts for job in part) == sorted(map(id, jobs))
    loads = [sum(tensor.numel() for tensor, _ in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes)


def test_kernels_with_ptx_are_for_nvidias_devices(monkeypatch):
    monkeypatch.setattr("tahq.memory.adam.loop.find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", None)
    assert (loop.has_ptx.__wrapped__("cuda"), loop.has_ptx.__wrapped__("cpu")) == (True, False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not loop.has_ptx.__wrapped__("cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("tahq.memory.adam.loop.find_spec", lambda name: None)
    assert not loop.has_ptx.__wrapped__("cuda")
