"""The kernels of the FP8 precision flow against the reference, in Triton's interpreter; on CUDA: tests/gpu.

The interpreter cuts off where bf16 rounds, so that tensors in and out are fp32 here.
"""

import pytest
import torch
from support.fp8_flow_checks import (
    check_gated,
    check_norm,
    check_rotation,
    check_tensor_codes,
    matrices,
    same,
)
from support.interpreter import in_interpreter
from support.samples import normal

from tahq.memory.coat import fp8_codes, fp8_linear
from tahq.memory.coat import fp8_flow_reference as reference
from tahq.memory.coat.fp8_flow import use_fp8_flow
from tahq.memory.config import CoatConfig
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.slice import Parts, build_slice

pytestmark = in_interpreter
acceptance = pytest.mark.acceptance
SHAPES = [(5, 20), pytest.param(1, 1, marks=acceptance), pytest.param(2, 130, marks=acceptance)]
SLOW_SORTS = ("gaussian", "outliers", "zeros", "constant", "tiny", "huge")
SORTS = ["awkward", "not finite", *(pytest.param(sort, marks=acceptance) for sort in SLOW_SORTS)]
every_shape = pytest.mark.parametrize(("tokens", "channels"), SHAPES, ids=str)
every_sort = pytest.mark.parametrize("sort", SORTS)


@pytest.fixture
def kernels():
    from tahq.memory.coat import fp8_flow_triton

    return fp8_flow_triton


@pytest.mark.parametrize(("tokens", "channels"), [*SHAPES, pytest.param(70, 130, marks=acceptance)], ids=str)
def test_codes_with_one_scale_equal_the_references(kernels, tokens, channels):
    for x in matrices(tokens, channels).values():
        check_tensor_codes(kernels, x)


@every_sort
@every_shape
def test_norms_equal_the_references(kernels, tokens, channels, sort):
    made = matrices(tokens, channels)
    weight = normal(channels, 1)
    check_norm(kernels, made[sort], None, weight)
    check_norm(kernels, made[sort], made["outliers"], weight)


@every_sort
@every_shape
def test_gated_activations_equal_the_references(kernels, tokens, channels, sort):
    made = matrices(tokens, channels)
    check_gated(kernels, made[sort], made["gaussian"])
    check_gated(kernels, made["gaussian"], made[sort])


def test_rotation_and_its_transpose_equal_the_references(kernels):
    check_rotation(kernels, torch.device("cpu"))


def test_every_code_comes_back(kernels):
    # All 256 codes, each as the largest but one of a group whose scale is 1: 448 is there too.
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = torch.stack([numbers.nan_to_num(1.0), torch.full_like(numbers, 448.0)], 1).repeat(1, 8).view(8, 512)
    got = kernels.norm_forward(numbers, None, torch.ones(512), 1e-5)
    assert same(reference.dequantize_groups(got.codes), numbers)


@acceptance
@pytest.mark.parametrize("products", ["e5m2", "bf16"])
def test_a_layer_of_kernels_computes_what_the_reference_does(kernels, monkeypatch, products):
    # As on a device with FP8 units: transposed codes are kept, and torch multiplies FP8.
    monkeypatch.setattr(fp8_linear, "has_fp8_units", lambda device: True)
    expected = layer_gradients(products)
    monkeypatch.setattr(fp8_codes, "_kernels_for", lambda device_type: kernels)
    got = layer_gradients(products)
    for name, value in expected.items():
        # Last bits of sums and of SiLU may move a number over the edge between two codes, by 2⁻³ of it at most.
        assert float((got[name] - value).norm() / value.norm()) < 1e-2, name


def layer_gradients(products: str) -> dict[str, torch.Tensor]:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 80}
    spec = load_spec(ModelConfig(family="llama", **sizes), vocab_size=100, seq_len=16)
    module = build_slice(spec, Parts(range(1)), seed=0, device="cpu", random=RandomContext(0)).train()
    use_fp8_flow(module, CoatConfig(backward_products=products))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 16, 32, generator=generator).requires_grad_()
    y = module(x)
    y.backward(torch.randn(y.shape, generator=generator))
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return found | {"x": x.grad, "y": (y - x).detach()}
