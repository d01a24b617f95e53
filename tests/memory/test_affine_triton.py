"""The Triton kernels of INT8 and bf16 weights and INT4 projections against plain torch, to the bit, interpreted."""

import pytest
import torch
from support.interpreter import in_interpreter
from support.samples import normal

from tahq.memory.galore.stored_weight import FullWeight, Int8Weight
from tahq.memory.galore.subspace import Int4Projection

pytestmark = in_interpreter


@pytest.fixture
def kernels():
    from tahq.memory.galore import affine_kernels

    return affine_kernels


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
    values = normal(shape, seed)
    flat = values.view(-1)
    flat[:256] += 5
    flat[256:512] = 0
    flat[512:768] *= 1e-30
    flat[768:1024] *= 1e37
    return values


@pytest.mark.parametrize(
    "shape",
    [
        (7, 129),
        (16, 256),
        pytest.param((1, 1), marks=pytest.mark.acceptance),
        pytest.param((33, 129), marks=pytest.mark.acceptance),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", [None, 5, 2**63 + 11])
def test_int8_update_and_decoding_equal_plain_torch(kernels, shape, key):
    values = values_of(shape)
    plain, kernel = weights(values)
    for round_, dtype in enumerate((torch.float32, torch.bfloat16)):
        update = values_of(shape, seed=round_ + 1).to(dtype)
        plain.add(update, keep=0.9997, rate=-0.013, key=key)
        kernels.add8(kernel, update, keep=0.9997, rate=-0.013, key=key)
        assert_same(plain, kernel)
        assert torch.equal(kernels.decoded8(kernel, dtype), plain.decoded(dtype))


@pytest.mark.parametrize("shape", [(1, 1), (7, 129), (33, 129)], ids=str)
@pytest.mark.parametrize("key", [5, 2**63 + 11])
def test_bf16_update_equals_plain_torch(kernels, shape, key):
    plain = FullWeight(shape, torch.device("cpu"), torch.bfloat16)
    plain.assign(values_of(shape))
    kernel = plain.values.clone()
    for round_, dtype in enumerate((torch.float32, torch.bfloat16)):
        update = values_of(shape, seed=round_ + 1).to(dtype)
        plain.add(update, keep=0.9997, rate=-0.013, key=key)
        kernels.add16(kernel, update, keep=0.9997, rate=-0.013, key=key)
        assert torch.equal(kernel.view(torch.int16), plain.values.view(torch.int16))


def test_bf16_update_keeps_nan_and_infinity(kernels):
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000, 0x7F800000, -0x800000], dtype=torch.int32)
    values = torch.zeros(6, dtype=torch.bfloat16)
    kernels.add16(values, bits.view(torch.float32), keep=1.0, rate=1.0, key=7)
    assert values.isnan().tolist() == [True, True, True, True, False, False]
    assert values[4:].tolist() == [float("inf"), float("-inf")]


def test_nearest_rounding_takes_ties_to_even(kernels):
    halves = torch.arange(-127, 127.5, 0.5)
    plain, kernel = weights(torch.zeros(halves.numel()))
    plain.add(halves, keep=1.0, rate=1.0, key=None)
    kernels.add8(kernel, halves, keep=1.0, rate=1.0, key=None)
    assert_same(plain, kernel)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 85), (33, 129)], ids=str)
def test_int4_projections_are_decoded_as_by_plain_torch(kernels, shape):
    projection = Int4Projection(shape, torch.device("cpu"))
    projection.assign(normal(shape, 1))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(kernels.decoded4(projection, dtype), projection.decoded(dtype))
