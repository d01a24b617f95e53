"""The FP8 precision flow on a CUDA device: its kernels against the reference, products on FP8 units, a whole layer."""

import pytest
import torch
from support.device_waits import host_must_not_wait
from support.fp8_flow_checks import check_gated, check_norm, check_rotation, check_tensor_codes, matrices

from tahq.memory.coat.fp8_codes import E4M3, E5M2, has_fp8_units
from tahq.memory.coat.fp8_flow import use_fp8_flow
from tahq.memory.coat.fp8_linear import product
from tahq.memory.config import CoatConfig
from tahq.models.config import ModelConfig
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice, build_slice

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPES = [(5, 20), (70, 130), (256, 1024)]
every_shape = pytest.mark.parametrize(("tokens", "channels"), SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture
def kernels():
    from tahq.memory.coat import fp8_flow_triton

    return fp8_flow_triton


def on_device(tokens: int, channels: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: x.to(dtype).to(CUDA) for name, x in matrices(tokens, channels).items()}


@every_dtype
@every_shape
def test_codes_with_one_scale_equal_the_references(kernels, tokens, channels, dtype):
    for x in on_device(tokens, channels, dtype).values():
        check_tensor_codes(kernels, x)


@every_dtype
@every_shape
def test_norms_equal_the_references(kernels, tokens, channels, dtype):
    made = on_device(tokens, channels, dtype)
    weight = torch.randn(channels, generator=torch.Generator().manual_seed(1)).to(CUDA)
    for x in made.values():
        check_norm(kernels, x, None, weight)
        check_norm(kernels, x, made["outliers"], weight)


@every_shape
def test_gated_activations_equal_the_references(kernels, tokens, channels):
    made = on_device(tokens, channels, torch.float32)
    for gate in made.values():
        check_gated(kernels, gate, made["gaussian"])


def test_rotation_and_its_transpose_equal_the_references(kernels):
    check_rotation(kernels, CUDA)


@pytest.mark.parametrize("format_of_a", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_products_on_fp8_units_are_those_of_the_codes(format_of_a, dtype):
    if not has_fp8_units(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("the device has no FP8 units")
    a, b = torch.randn(48, 256, device=CUDA).to(format_of_a), torch.randn(32, 256, device=CUDA).to(E4M3)
    scales = torch.tensor([0.5], device=CUDA), torch.tensor([3.0], device=CUDA)
    got = product(a, b, scales, dtype, fast=False)
    expected = a.double() @ b.double().t() * 1.5
    # 256 products of at most 4·4 each are added in at least 14 bits; then rounded to bf16, 2⁻⁹.
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-8, atol=256 * 16 * 1.5 * 2.0**-14)


def layer(device: torch.device, products: str) -> ModelSlice:
    sizes = {"num_layers": 3, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 688}
    spec = load_spec(ModelConfig(family="llama", **sizes), vocab_size=100, seq_len=64)
    module = build_slice(spec, BlockRange(1, 2, 3), seed=0, device=device, random=RandomContext(0)).train()
    use_fp8_flow(module, CoatConfig(backward_products=products))
    return module


def gradients(
    device: torch.device, products: str, deferred: DeferredGradients | None = None
) -> dict[str, torch.Tensor]:
    module = layer(device, products)
    module.deferred = deferred
    generator = torch.Generator().manual_seed(3)
    x, flowing = torch.randn(2, 64, 256, generator=generator), torch.randn(2, 64, 256, generator=generator)
    x = x.to(device).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        y = module(x)
    y.backward(flowing.to(device))
    if deferred is not None:
        deferred.run()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: tensor.cpu() for name, tensor in (found | {"x": x.grad, "y": y.detach() - x.detach()}).items()}


@pytest.mark.parametrize("products", ["e5m2", "e4m3", "bf16"])
def test_a_layer_computes_what_it_computes_on_the_cpu(products):
    got, expected = gradients(CUDA, products), gradients(torch.device("cpu"), products)
    for name, value in expected.items():
        # bf16 roundings (2⁻⁹) and other orders of addition move some numbers over the edge between two codes; those
        # of E5M2 are twice as far apart.
        assert float((got[name] - value).norm() / value.norm()) < (0.1 if products == "e5m2" else 0.05), name


def test_a_split_backward_gives_the_bits_of_a_whole_one():
    whole, split = gradients(CUDA, "e5m2"), gradients(CUDA, "e5m2", DeferredGradients())
    assert [name for name in whole if not torch.equal(whole[name], split[name])] == []


def test_a_layer_does_not_wait_for_the_device():
    module, x = layer(CUDA, "e5m2"), torch.randn(2, 64, 256, device=CUDA, requires_grad=True)
    gradient = torch.randn(2, 64, 256, device=CUDA)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y = module(x)
        y.backward(gradient)

    step()
    with host_must_not_wait():
        step()
