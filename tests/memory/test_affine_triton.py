"""The Triton kernels of INT8 and bf16 weights and INT4 projections against plain torch, to the bit, interpreted."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tahq.memory.galore.stored_weight import FullWeight, Int8Weight
from tahq.memory.galore.subspace import Int4Projection
from tahq.quant.backends import interprets_triton

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
interpreted = pytest.mark.skipif(not interprets_triton(), reason="needs TRITON_INTERPRET=1; the first test sets it")
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(interprets_triton(), reason="the interpreter is already chosen: they run in this process")
def test_kernels_pass_their_tests_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


def weights(values: torch.Tensor) -> tuple[Int8Weight, Int8Weight]:
    pair = Int8Weight(tuple(values.shape), values.device), Int8Weight(tuple(values.shape), values.device)
    for weight in pair:
        weight.assign(values)
    return pair


def assert_same(one: Int8Weight, other: Int8Weight) -> None:
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.zero, other.zero)
    assert torch.equal(one.scale.view(torch.int16), other.scale.view(torch.int16))


def values_of(shape, seed=0) -> torch.Tensor:
    """Ordinary groups, one of one sign, zeros, tiny and huge ones."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    flat = values.view(-1)
    flat[:256] += 5
    flat[256:512] = 0
    flat[512:768] *= 1e-30
    flat[768:1024] *= 1e37
    return values


@interpreted
@pytest.mark.parametrize("shape", [(1, 1), (7, 129), (33, 129), (16, 256)], ids=str)
@pytest.mark.parametrize("key", [None, 5, 2**63 + 11])
def test_update_and_decoding_are_the_plain_ones(shape, key):
    from tahq.memory.galore import affine_kernels as affine_triton

    values = values_of(shape)
    plain, kernel = weights(values)
    for round_, dtype in enumerate((torch.float32, torch.bfloat16)):
        update = values_of(shape, seed=round_ + 1).to(dtype)
        plain.add(update, keep=0.9997, rate=-0.013, key=key)
        affine_triton.add8(kernel, update, keep=0.9997, rate=-0.013, key=key)
        assert_same(plain, kernel)
        assert torch.equal(affine_triton.decoded8(kernel, dtype), plain.decoded(dtype))


@interpreted
@pytest.mark.parametrize("shape", [(1, 1), (7, 129), (33, 129)], ids=str)
@pytest.mark.parametrize("key", [5, 2**63 + 11])
def test_bf16_is_updated_as_by_plain_torch(shape, key):
    from tahq.memory.galore import affine_kernels as affine_triton

    plain = FullWeight(shape, torch.device("cpu"), torch.bfloat16)
    plain.assign(values_of(shape))
    kernel = plain.values.clone()
    for round_, dtype in enumerate((torch.float32, torch.bfloat16)):
        update = values_of(shape, seed=round_ + 1).to(dtype)
        plain.add(update, keep=0.9997, rate=-0.013, key=key)
        affine_triton.add16(kernel, update, keep=0.9997, rate=-0.013, key=key)
        assert torch.equal(kernel.view(torch.int16), plain.values.view(torch.int16))


@interpreted
def test_bf16_keeps_what_is_not_finite():
    from tahq.memory.galore import affine_kernels as affine_triton

    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000, 0x7F800000, -0x800000], dtype=torch.int32)
    values = torch.zeros(6, dtype=torch.bfloat16)
    affine_triton.add16(values, bits.view(torch.float32), keep=1.0, rate=1.0, key=7)
    assert values.isnan().tolist() == [True, True, True, True, False, False]
    assert values[4:].tolist() == [float("inf"), float("-inf")]


@interpreted
def test_nearest_is_half_to_even():
    from tahq.memory.galore import affine_kernels as affine_triton

    halves = torch.arange(-127, 127.5, 0.5)
    plain, kernel = weights(torch.zeros(halves.numel()))
    plain.add(halves, keep=1.0, rate=1.0, key=None)
    affine_triton.add8(kernel, halves, keep=1.0, rate=1.0, key=None)
    assert_same(plain, kernel)


@interpreted
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 85), (33, 129)], ids=str)
def test_projections_are_decoded_as_by_plain_torch(shape):
    from tahq.memory.galore import affine_kernels as affine_triton

    projection = Int4Projection(shape, torch.device("cpu"))
    projection.assign(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(affine_triton.decoded4(projection, dtype), projection.decoded(dtype))
