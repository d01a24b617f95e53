"""The FP8 precision flow on a CUDA device: products on FP8 units, a whole layer."""

import pytest
import torch
from support.device_waits import host_must_not_wait
from support.small_slices import different, gradients, make_slice, make_spec, relative_distance

from tahq.memory.coat.fp8_codes import E4M3, E5M2, has_fp8_units, product
from tahq.memory.config import CoatConfig
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.slice import ModelSlice

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


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


def layer(products: str = "e5m2", device: torch.device = CUDA) -> ModelSlice:
    spec = make_spec("llama", hidden_size=256, intermediate_size=688)
    return make_slice(spec, CoatConfig(backward_products=products), device=device)


@pytest.mark.parametrize("products", ["e5m2", "e4m3", "bf16"])
def test_a_layer_computes_what_it_computes_on_the_cpu(products):
    got, expected = (gradients(layer(products, torch.device(name)), bf16=True) for name in ("cuda", "cpu"))
    for name, value in expected.items():
        # bf16 roundings (2⁻⁹) and other orders of addition move some numbers over the edge between two codes; those
        # of E5M2 are twice as far apart.
        assert relative_distance(got[name], value) < (0.1 if products == "e5m2" else 0.05), name


def test_a_split_backward_gives_the_bits_of_a_whole_one():
    whole, split = (gradients(layer(), bf16=True, deferred=deferred) for deferred in (None, DeferredGradients()))
    assert different(whole, split) == []


def test_a_layer_does_not_wait_for_the_device():
    module, x = layer(), torch.randn(2, 64, 256, device=CUDA, requires_grad=True)
    gradient = torch.randn(2, 64, 256, device=CUDA)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y = module(x)
        y.backward(gradient)

    step()
    with host_must_not_wait():
        step()
