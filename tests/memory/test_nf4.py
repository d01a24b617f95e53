"""NF4 against a search in fp64 and against bitsandbytes."""

import pytest
import torch
from support.samples import normal

from tahq.memory.adam import blockwise8
from tahq.memory.small_floats.nf4 import BLOCK, VALUES, Nf4Weight, nf4_nbytes

CPU = torch.device("cpu")
SHAPES = [(7, 129), (64, 96), (1, 1), (300, 64)]


def filled(values: torch.Tensor, *, is_transposed: bool = False) -> Nf4Weight:
    weight = Nf4Weight(values.shape, CPU, is_transposed=is_transposed)
    weight.copy_(values)
    return weight


def values_of(shape: tuple[int, int]) -> torch.Tensor:
    """Rows of different sizes, some outliers, and a block of zeros where there is room."""
    values = 0.02 * normal(shape) * (1 + torch.arange(shape[0])[:, None])
    values.view(-1)[5::97] *= 20
    values.view(-1)[BLOCK : 2 * BLOCK] = 0
    return values


def codes_of(weight: Nf4Weight) -> torch.Tensor:
    return torch.stack((weight.codes >> 4, weight.codes & 15), dim=-1).view(-1, BLOCK)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_weight_gets_the_nearest_value_and_scales_the_nearest_code(shape):
    values = values_of(shape)
    weight = filled(values)
    padded = torch.zeros(len(weight.codes) * BLOCK, dtype=torch.float64)
    padded[: values.numel()] = values.view(-1)
    blocks = padded.view(-1, BLOCK)
    exact = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(VALUES, dtype=torch.float64)
    distances = (levels * exact[:, :, None] - blocks[:, :, None]).abs()
    chosen = distances.gather(2, codes_of(weight).long()[:, :, None])[:, :, 0]
    assert bool((chosen <= distances.amin(2) + 1e-6 * exact).all())

    scales = blockwise8.decode(weight.scales, weight.groups, signed=True).double() + weight.mean.double()
    centred, step = exact[:, 0] - weight.mean.double(), float(weight.groups.max()) if len(weight.groups) == 1 else 0
    of_map = blockwise8.dynamic_map(True).double() * step
    nearest = (of_map[None] - centred[:, None]).abs().amin(1)
    assert bool(((scales - exact[:, 0]).abs() <= nearest + 1e-6 * exact.max()).all())

    decoded = (levels[codes_of(weight).long()] * scales[:, None]).view(-1)[: values.numel()].view(shape)
    torch.testing.assert_close(weight.decoded(torch.float32).double(), decoded, rtol=1e-6, atol=0)
    assert torch.equal(weight.decoded(torch.bfloat16), weight.decoded(torch.float32).bfloat16())


def test_a_weight_takes_a_little_more_than_four_bits():
    weight = filled(values_of((256, 512)))
    assert weight.nbytes == nf4_nbytes(256 * 512) == 256 * 512 * (1 / 2 + 1 / 64 + 4 / (64 * 256)) + 4


def test_blocks_of_a_transposed_matrix_run_along_its_columns():
    values = values_of((64, 96))
    assert torch.equal(filled(values, is_transposed=True).decoded(torch.float32), decoded(values.t()).t())
    stack = torch.stack((values, 2 * values))
    assert torch.equal(decoded(stack), decoded(stack.view(128, 96)).view(2, 64, 96))


def decoded(values: torch.Tensor) -> torch.Tensor:
    return filled(values).decoded(torch.float32)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden(number):
    values = values_of((64, 96))
    values[3, 3] = number
    assert not bool(decoded(values).isfinite().all())
    assert not bool(decoded(torch.zeros(64, 96)).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_values_are_those_of_bitsandbytes(dtype):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    values = values_of((192, 256)).to(dtype)
    weight = filled(values)
    packed, state = bitsandbytes.functional.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
    assert torch.equal(packed.view(-1, BLOCK // 2), weight.codes)
    # they sum the mean of scales in fp32, so a scale between two codes may get the other one
    same = state.absmax == weight.scales
    assert float(same.float().mean()) > 0.99
    assert int((state.absmax.int() - weight.scales.int()).abs().max()) <= 1
    other = bitsandbytes.functional.dequantize_4bit(packed, state).view(-1, BLOCK)
    own = weight.decoded(dtype).view(-1, BLOCK)
    torch.testing.assert_close(own[same], other[same], rtol=1e-5 if dtype == torch.float32 else 0.008, atol=0)
