"""Which backend runs, what is imported for it, and what is refused."""

import subprocess
import sys

import pytest
import torch
from support.codec_backends import KERNELS, can_run, device_of

from tahq.errors import CodecError, ConfigError
from tahq.quant import BACKENDS, backends, get_codec
from tahq.quant.backends import kernels_for

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


@pytest.fixture
def load(monkeypatch):
    """Backends are named, not loaded, as if Triton were installed."""
    monkeypatch.setattr(backends, "load", lambda codec, backend: f"{codec} {backend}")
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    backends._automatic.cache_clear()
    yield
    backends._automatic.cache_clear()


@pytest.mark.parametrize(("device", "backend"), [(CPU, "cpu"), (CUDA, "triton"), (torch.device("meta"), "reference")])
def test_auto_goes_by_the_device(device, backend, load, monkeypatch):
    assert kernels_for("tah", "auto", device, 1) == f"tah {backend}"
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    backends._automatic.cache_clear()
    assert kernels_for("tah", "auto", CUDA, 1) == "tah reference"


def test_forced_backend_that_is_not_installed_is_refused(monkeypatch):
    def not_installed(name):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(backends, "import_module", not_installed)
    backends.load.cache_clear()
    with pytest.raises(CodecError, match=r"triton cannot be loaded \(No module named 'triton'\); install what"):
        kernels_for("tah", "triton", CUDA, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_is_tested_here(backend):
    """Tests over all backends leave out those that cannot run here; this one reports them as skipped."""
    if not can_run(backend):
        pytest.skip("triton's kernels need a CUDA device, or TRITON_INTERPRET=1")
    for codec in (codec for codec, kernels in KERNELS.items() if backend in ("reference", *kernels)):
        x = torch.ones(2, 64, device=device_of(backend))
        assert get_codec(codec, backend=backend).encode(x).device == x.device


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_tensors_take_the_reference(backend, load):
    assert kernels_for("tah", backend, CUDA if backend == "triton" else CPU, 0) == "tah reference"


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        (
            "cpu",
            CUDA,
            "codec tah: backend cpu takes tensors on cpu, got one on cuda:0; use backend auto, which chooses",
        ),
        ("triton", CPU, "codec tah: backend triton takes tensors on cuda, got one on cpu; use backend auto"),
        ("cpu", torch.device("meta"), "backend cpu takes tensors on cpu, got one on meta"),
    ],
)
def test_forced_backend_refuses_other_devices(backend, device, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(CodecError, match=message):
        kernels_for("tah", backend, device, 1)


@pytest.mark.parametrize("spec", ["tah", "fixed", "raw"])
def test_unknown_backend_and_no_threads_are_refused(spec):
    with pytest.raises(ConfigError, match="backend must be auto, reference, cpu or triton; got 'gpu'"):
        get_codec(spec, backend="gpu")
    with pytest.raises(ConfigError, match="at least one thread; got threads=0"):
        get_codec(spec, threads=0)
    assert BACKENDS == ("reference", "cpu", "triton")
