"""Kernels of INT8 and bf16 weights and INT4 projections against plain torch on the CPU, to the bit.

On CUDA or in Triton's interpreter.
"""

import pytest
import torch
from support.interpreter import DEVICE, on_device, sizes
from support.samples import normal

from tahq.memory.galore.stored_weight import FullWeight, Int8Weight
from tahq.memory.galore.subspace import Int4Projection

pytestmark = on_device
CPU = torch.device("cpu")
CUDA_SHAPES = [(3, 4097), (512, 1376), (11008, 512)]


@pytest.fixture
def kernels():
    from tahq.memory.galore import affine_kernels

    return affine_kernels


def weights(values: torch.Tensor) -> tuple[Int8Weight, Int8Weight]:
    """One on the CPU, and one for the kernels."""
    pair = tuple(Int8Weight(tuple(values.shape), device) for device in (CPU, DEVICE))
    for weight in pair:
        weight.assign(values.to(weight.codes.device))
    return pair


def assert_same(one: Int8Weight, other: Int8Weight) -> None:
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name].cpu()), name


def values_of(shape, seed=0) -> torch.Tensor:
    """Ordinary groups, one of one sign, zeros, tiny and huge ones."""
    values = normal(shape, seed)
    flat = values.view(-1)
    flat[:256] += 5
    flat[256:512] = 0
    flat[512:768] *= 1e-30
    flat[768:1024] *= 1e37
    return values


@pytest.mark.parametrize("shape", sizes([(7, 129), (16, 256)], [(1, 1), (33, 129)], CUDA_SHAPES), ids=str)
@pytest.mark.parametrize("key", [None, 5, 2**63 + 11])
def test_int8_update_and_decoding_equal_plain_torch(kernels, shape, key):
    plain, kernel = weights(values_of(shape))
    assert_same(plain, kernel)
    for round_, dtype in enumerate((torch.float32, torch.bfloat16)):
        update = values_of(shape, seed=round_ + 1).to(dtype)
        plain.add(update, keep=0.9997, rate=-0.013, key=key)
        kernels.add8(kernel, update.to(DEVICE), keep=0.9997, rate=-0.013, key=key)
        assert_same(plain, kernel)
        assert torch.equal(kernels.decoded8(kernel, dtype).cpu(), plain.decoded(dtype))


@pytest.mark.parametrize("shape", sizes([(1, 1), (7, 129), (33, 129)], [], CUDA_SHAPES), ids=str)
@pytest.mark.parametrize("key", [5, 2**63 + 11])
def test_bf16_update_equals_plain_torch(kernels, shape, key):
    plain = FullWeight(shape, CPU, torch.bfloat16)
    plain.assign(values_of(shape))
    kernel = plain.values.to(DEVICE, copy=True)
    for round_, dtype in enumerate((torch.float32, torch.bfloat16)):
        update = values_of(shape, seed=round_ + 1).to(dtype)
        plain.add(update, keep=0.9997, rate=-0.013, key=key)
        kernels.add16(kernel, update.to(DEVICE), keep=0.9997, rate=-0.013, key=key)
        assert torch.equal(kernel.cpu().view(torch.int16), plain.values.view(torch.int16))


def test_bf16_update_keeps_nan_and_infinity(kernels):
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000, 0x7F800000, -0x800000], dtype=torch.int32)
    values = torch.zeros(6, dtype=torch.bfloat16, device=DEVICE)
    kernels.add16(values, bits.view(torch.float32).to(DEVICE), keep=1.0, rate=1.0, key=7)
    assert values.isnan().tolist() == [True, True, True, True, False, False]
    assert values[4:].tolist() == [float("inf"), float("-inf")]


def test_nearest_rounding_takes_ties_to_even(kernels):
    halves = torch.arange(-127, 127.5, 0.5)
    plain, kernel = weights(torch.zeros(halves.numel()))
    plain.add(halves, keep=1.0, rate=1.0, key=None)
    kernels.add8(kernel, halves.to(DEVICE), keep=1.0, rate=1.0, key=None)
    assert_same(plain, kernel)


@pytest.mark.parametrize("shape", sizes([(1, 7), (3, 85), (33, 129)], [], [(256, 4096)]), ids=str)
def test_int4_projections_are_decoded_as_by_plain_torch(kernels, shape):
    plain, kernel = (Int4Projection(shape, device) for device in (CPU, DEVICE))
    for projection in (plain, kernel):
        projection.assign(normal(shape, 1).to(projection.packed.device))
    assert torch.equal(kernel.packed.cpu(), plain.packed)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(kernels.decoded4(kernel, dtype).cpu(), plain.decoded(dtype))
