"""Which backend runs, what is imported for it, and what is refused."""

import subprocess
import sys

import pytest
import torch
from support.codec_backends import KERNELS, can_run, device_of, every_codec_and_backend

from tahq.errors import CodecError, ConfigError
from tahq.quant import BACKENDS, backends, get_codec
from tahq.quant.backends import Dispatch, Kernels

REFERENCE = Kernels(lambda *args, **kwargs: torch.zeros(0), lambda *args, **kwargs: torch.zeros(0))
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


STEPS = """
import sys

def report(step):
    print(step, *{"numba", "triton", "matplotlib"} & set(sys.modules), sep=",")

import torch
import tahq, tahq.quant, tahq.config.cluster
report("import")
from tahq.quant import get_codec
get_codec("tah").encoded_nbytes((2, 3, 64))
report("length")
get_codec("raw").encode(torch.zeros(2, 64))
get_codec("tah", backend="reference").encode(torch.zeros(2, 64))
get_codec("tah", backend="cpu").encode(torch.zeros(0, 64))
report("reference")
get_codec("tah").encode(torch.zeros(2, 64))
report("cpu")
"""


def test_a_compiler_is_imported_with_the_first_tensor_of_its_backend():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["import", "length", "reference", "cpu,numba"]


@pytest.mark.parametrize("codec", KERNELS)
def test_auto_goes_by_the_device(codec, monkeypatch):
    chosen = []
    monkeypatch.setattr(backends, "_load", lambda codec, backend: chosen.append((codec, backend)) or REFERENCE)
    monkeypatch.setattr(backends, "find_spec", lambda name: object())  # as if triton were installed
    dispatch = Dispatch(codec, REFERENCE)
    for device in (CPU, CUDA, CPU, torch.device("meta")):
        dispatch.kernels(device, 1)
    assert chosen == [(codec, "cpu"), (codec, "triton")]


def test_auto_takes_the_reference_on_cuda_where_triton_is_not_installed(monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == "triton" else object())
    assert Dispatch("tah", REFERENCE).kernels(CUDA, 1) is REFERENCE


def test_codec_without_kernels_takes_the_reference_and_refuses_others():
    assert Dispatch("young", REFERENCE, kernels=()).kernels(CPU, 1) is REFERENCE
    assert Dispatch("young", REFERENCE, kernels=()).kernels(CUDA, 1) is REFERENCE
    with pytest.raises(CodecError, match="codec young has no backend triton; it has reference and cpu"):
        Dispatch("young", REFERENCE, "triton", kernels=("cpu",)).kernels(CUDA, 1)


def test_forced_backend_that_is_not_installed_is_refused(monkeypatch):
    def not_installed(name):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(backends, "import_module", not_installed)
    with pytest.raises(CodecError, match=r"triton cannot be loaded \(No module named 'triton'\); install what"):
        Dispatch("tah", REFERENCE, "triton").kernels(CUDA, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_is_tested_here(backend):
    """Tests that run over backends leave out those that cannot; here it is said."""
    if not can_run(backend):
        pytest.skip("triton's kernels need a CUDA device, or TRITON_INTERPRET=1")
    for codec in (codec for codec, kernels in KERNELS.items() if backend in ("reference", *kernels)):
        x = torch.ones(2, 64, device=device_of(backend))
        assert get_codec(codec, backend=backend).encode(x).device == x.device


@every_codec_and_backend(KERNELS)
def test_empty_tensors_take_the_reference(spec, backend):
    dispatch = Dispatch(spec, REFERENCE, backend)
    assert dispatch.kernels(CUDA if backend == "triton" else CPU, 0) is REFERENCE


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("cpu", CUDA, "codec tah: backend cpu takes tensors on cpu, got one on cuda:0; use backend auto, which looks"),
        ("triton", CPU, "codec tah: backend triton takes tensors on cuda, got one on cpu; use backend auto"),
        ("cpu", torch.device("meta"), "backend cpu takes tensors on cpu, got one on meta"),
    ],
)
def test_forced_backend_refuses_other_devices(backend, device, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(CodecError, match=message):
        Dispatch("tah", REFERENCE, backend).kernels(device, 1)


def test_interpreted_triton_takes_tensors_on_the_cpu_if_it_is_forced(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    chosen = []
    monkeypatch.setattr(backends, "_load", lambda codec, backend: chosen.append(backend) or REFERENCE)
    Dispatch("tah", REFERENCE, "triton").kernels(CPU, 1)
    Dispatch("tah", REFERENCE).kernels(CPU, 1)
    assert chosen == ["triton", "cpu"]


@pytest.mark.parametrize("spec", ["tah", "fixed", "raw"])
def test_unknown_backend_and_no_threads_are_refused(spec):
    with pytest.raises(ConfigError, match="backend must be auto, reference, cpu or triton; got 'gpu'"):
        get_codec(spec, backend="gpu")
    with pytest.raises(ConfigError, match="at least one thread; got threads=0"):
        get_codec(spec, threads=0)
    assert BACKENDS == ("reference", "cpu", "triton")
