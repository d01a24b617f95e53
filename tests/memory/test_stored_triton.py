"""The kernels of stored inputs against `quantize_blocks` and torch's layers, on CUDA or in Triton's interpreter.

The interpreter cuts off where bf16 rounds, so that tensors in and out are fp32 there.
"""

import math
from typing import Any

import pytest
import torch
from support.interpreter import DEVICE, on_device, sizes
from support.samples import normal
from support.small_slices import different, gradients, make_slice, make_spec, relative_distance
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tahq.memory.coat.fp8_codes import E4M3
from tahq.memory.config import AgoqConfig
from tahq.memory.small_floats.block_codes import BlockCodes, dequantize_blocks, quantize_blocks
from tahq.models.deferred_gradients import DeferredGradients

pytestmark = on_device
BITS = (4, 5, 6, 8)
every_format = pytest.mark.parametrize("bits", BITS)
every_format_or_unchanged = pytest.mark.parametrize("bits", [None, *BITS])
every_dtype = pytest.mark.parametrize("dtype", sizes([torch.float32], [], [torch.bfloat16]), ids=str)
ROWS = sizes([(3, 384)], [(5, 128)], [(2, 300, 768), (64, 4096)])


@pytest.fixture
def kernels():
    from tahq.memory.agoq import stored_triton

    return stored_triton


def awkward(shape: tuple[int, ...]) -> torch.Tensor:
    """Normal numbers with blocks of zeros, of tiny and huge numbers, outliers, and each of NaN and the infinities."""
    x = normal(shape)
    flat = x.view(-1)
    for block, value in enumerate((0.0, 2.0**-130, 3e38, float("nan"), float("inf"), -float("inf"), 1e4)):
        flat[128 * block : 128 * block + (128 if block < 3 else 1)] = value
    return x


def same_codes(got: BlockCodes, expected: BlockCodes) -> bool:
    """Equal scales, and equal codes where scales are numbers: of NaN any code."""
    known = ~expected.scales.isnan()
    scales = torch.equal(got.scales.nan_to_num(1.0), expected.scales.nan_to_num(1.0))
    return scales and torch.equal(got.codes[known], expected.codes[known])


def close(got: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert got is not None
    assert got.dtype == expected.dtype
    got, expected = got.detach(), expected.detach()
    tolerance = 1e-5 if got.dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(got, expected, atol=tolerance * float(expected.abs().max()), rtol=tolerance)


@every_dtype
@every_format
@pytest.mark.parametrize("shape", sizes([(9, 130)], [(1,), (40, 128)], [(3, 1000, 1000)]), ids=str)
def test_codes_and_numbers_equal_the_references(kernels, bits, shape, dtype):
    x = (awkward(shape) if len(shape) > 1 else normal(shape)).to(DEVICE, dtype)
    expected = quantize_blocks(x, bits)
    assert same_codes(kernels.quantize(x, bits), expected)
    decoded = kernels.dequantize(expected, x.shape, torch.float32)
    assert torch.equal(decoded.nan_to_num(7.0), dequantize_blocks(expected, x.shape).nan_to_num(7.0))


def decoded(kept: list[torch.Tensor], bits: int | None, x: torch.Tensor) -> torch.Tensor:
    """What is kept of x, which must be x itself without bits, as a leaf in fp32."""
    if bits is None:
        assert torch.equal(kept[0], x)
        return x.float().clone().requires_grad_()
    assert same_codes(BlockCodes(*kept), quantize_blocks(x, bits))
    return dequantize_blocks(BlockCodes(*kept), x.shape).requires_grad_()


def norms(channels: int) -> list[nn.Module]:
    made = [LlamaRMSNorm(channels), nn.LayerNorm(channels)]
    for module in made:
        for seed, parameter in enumerate(module.parameters()):
            parameter.data.copy_(normal(parameter.shape, seed=seed + 5))
    return [module.to(DEVICE) for module in made]


@every_dtype
@every_format_or_unchanged
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_norms_equal_torch_at_exact_and_decoded_inputs(kernels, bits, shape, dtype):
    check_norms(kernels, bits, shape, dtype)


@every_dtype
def test_unchanged_inputs_of_norms_have_any_number_of_channels(kernels, dtype):
    check_norms(kernels, None, (3, 200), dtype)


def check_norms(kernels: Any, bits: int | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, flowing = (3 + normal(shape)).to(DEVICE, dtype), normal(shape, seed=2).to(DEVICE, dtype)
    for module in norms(shape[-1]):
        module.gives_maxima = True
        layer = kernels.StoredNorm(module, bits, x, dtype)
        y, tensors = layer.run(x)
        check_scale(y)
        close(y, module(x.float()).to(dtype))
        leaf = decoded(tensors, bits, x)
        expected = module(leaf)
        close(layer.output(tensors), expected.detach().to(dtype))
        expected.backward(flowing.float())
        got = layer.gradients(tensors, flowing, [True] * (1 + len(layer.parameters)))
        close(got[0], leaf.grad.to(dtype))
        for gradient, parameter in zip(got[1:], layer.parameters, strict=True):
            close(gradient, parameter.grad)


@every_dtype
@every_format_or_unchanged
@pytest.mark.parametrize("shape", sizes([(3, 100)], [(17, 128)], [(2, 300, 3072)]), ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_activations_equal_torch_at_exact_and_decoded_inputs(kernels, bits, shape, gated, dtype):
    inputs = [2 * normal(shape, seed=seed).to(DEVICE, dtype) for seed in range(1 + gated)]
    flowing = normal(shape, seed=4).to(DEVICE, dtype)

    def function(x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return F.gelu(x, approximate="tanh") if up is None else F.silu(x) * up

    layer = kernels.StoredActivation(bits, *inputs, gives_maxima=True)
    y, tensors = layer.run(*inputs)
    check_scale(y)
    close(y, function(*(x.float() for x in inputs)).to(dtype))
    num = len(tensors) // len(inputs)
    leaves = [decoded(tensors[num * at : num * (at + 1)], bits, x) for at, x in enumerate(inputs)]
    expected = function(*leaves)
    close(layer.output(tensors), expected.detach().to(dtype))
    expected.backward(flowing.float())
    for gradient, leaf in zip(layer.gradients(tensors, flowing, [True] * len(inputs)), leaves, strict=True):
        close(gradient, leaf.grad.to(dtype))
        check_scale(gradient)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_maxima_of_awkward_outputs_are_kept(kernels, value):
    gate, up = normal((3, 100)).to(DEVICE), normal((3, 100), 1).to(DEVICE)
    gate[1, 7] = value
    layer = kernels.StoredActivation(None, gate, up * (value != 0), gives_maxima=True)
    check_scale(layer.run(gate, up * (value != 0))[0])


def check_scale(x: torch.Tensor) -> None:
    """What x keeps of its magnitudes gives the scale that another pass over it finds."""
    from tahq.memory.coat import fp8_flow_triton

    scale = fp8_flow_triton.tensor_scale(fp8_flow_triton.group_maxima(x), E4M3)
    kept = fp8_flow_triton.tensor_scale(x.maxima[0], E4M3)
    torch.testing.assert_close(kept, scale, rtol=0, atol=0, equal_nan=True)


@every_dtype
@pytest.mark.parametrize("numel", sizes([300], [1], [1_000_001]))
def test_gradients_are_added_as_in_torch(kernels, numel, dtype):
    first, second = (normal(numel, seed=seed).to(DEVICE, dtype) for seed in (1, 2))
    coded = kernels.accumulated(first, None)
    expected = quantize_blocks(first, 8, torch.float32)
    assert same_codes(coded, expected)
    again = kernels.accumulated(second, coded)
    assert again.codes is coded.codes
    total = second.float() + dequantize_blocks(expected, second.shape)
    assert same_codes(again, quantize_blocks(total, 8, torch.float32))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CPU's layers use no kernels")
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stored", [("norms", "mlp"), ("norms", "mlp", "attention")], ids=["default", "everything"])
def test_layers_on_cuda_are_those_of_the_cpu(family, bf16, stored):
    spec, config = make_spec(family, hidden_size=256, num_heads=2), AgoqConfig(bits=6, stored=stored)
    module = make_slice(spec, config, device=DEVICE)
    module.owns_products = True  # as on CUDA in a worker: gradients of weights are added in fp32
    got, expected = gradients(module, bf16=bf16), gradients(make_slice(spec, config), bf16=bf16)
    names = [name for name in got if not name.endswith("k_proj.bias")]
    # codes of numbers at the border of two may differ
    assert max(relative_distance(got[name], expected[name]) for name in names) < 0.03
    module.zero_grad()
    assert different(gradients(module, bf16=bf16, deferred=DeferredGradients()), got) == []
