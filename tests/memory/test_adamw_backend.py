"""Which devices the kernels of our AdamWs are for."""

import torch

from tahq.memory.adam.loop import has_ptx


def test_kernels_with_ptx_are_for_nvidias_devices(monkeypatch):
    monkeypatch.setattr("tahq.memory.adam.loop.find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", None)
    assert (has_ptx.__wrapped__("cuda"), has_ptx.__wrapped__("cpu")) == (True, False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not has_ptx.__wrapped__("cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("tahq.memory.adam.loop.find_spec", lambda name: None)
    assert not has_ptx.__wrapped__("cuda")
