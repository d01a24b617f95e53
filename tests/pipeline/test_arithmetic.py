"""What computes is recorded, and another processor, library or number of threads is told from the same."""

import pytest
import torch

from tahq.pipeline.checkpoint import manifest
from tahq.pipeline.checkpoint.manifest import arithmetic_differences, arithmetic_of

EPYC = {"device": "AMD EPYC 7B13", "torch": "2.13.0", "threads": "4", "codec backend": "cpu"}


def test_this_machine_is_like_itself():
    here = arithmetic_of(torch.device("cpu"), "auto")
    assert {"device", "torch", "threads", "codec backend", "vector instructions", "matrix library"} == set(here)
    assert here["torch"] == torch.__version__
    assert here["threads"] == str(torch.get_num_threads())
    assert all(here.values())
    assert arithmetic_differences(here, arithmetic_of(torch.device("cpu"), "cpu")) == ()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ()),
        ({"threads": "8"}, ("threads: 4 -> 8",)),
        (
            {"device": "NVIDIA H200", "codec backend": "triton"},
            ("device: AMD EPYC 7B13 -> NVIDIA H200", "codec backend: cpu -> triton"),
        ),
        ({"torch": "2.14.0+cu128"}, ("torch: 2.13.0 -> 2.14.0+cu128",)),
        ({"cuDNN": "91002"}, ()),  # a name that a later version of tahq records as well
    ],
)
def test_differences_name_what_was_and_what_is(change, expected):
    assert arithmetic_differences(EPYC, EPYC | change) == expected


def test_processor_without_a_model_name_has_its_architecture(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "CPU_INFO", tmp_path / "cpuinfo")
    for content in (None, "processor\t: 0\nBogoMIPS\t: 50.00\n"):
        if content:
            (tmp_path / "cpuinfo").write_text(content)
        assert arithmetic_of(torch.device("cpu"), "auto")["device"]
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some: CPU\n")
    assert arithmetic_of(torch.device("cpu"), "auto")["device"] == "Some: CPU"
