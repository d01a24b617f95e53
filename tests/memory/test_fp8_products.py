"""Products in FP8: each against the formula in plain torch, and layers and training against those in bf16."""

import math

import pytest
import torch
from support.exactness import plain
from support.runs import tiny
from support.samples import normal
from support.small_slices import (
    SEQ_LEN,
    VOCAB,
    different,
    gradients,
    make_slice,
    make_spec,
    relative_distance,
    saved_storages,
)

from tahq.errors import ConfigError
from tahq.memory.coat import fp8_codes
from tahq.memory.coat.fp8_codes import E4M3, FP8_FORMATS, WeightCodes
from tahq.memory.config import AgoqConfig, Fp8Config
from tahq.memory.fp8_products import check_fp8_units
from tahq.models.deferred_gradients import DeferredGradients, shared_copies, sharing_weight_copies
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice

pytestmark = pytest.mark.ci

ODD = {"hidden_size": 72, "num_heads": 6, "intermediate_size": 100}
LAYERS = [
    ("llama", "model.layers.1.mlp.down_proj"),
    ("llama", "model.layers.1.self_attn.o_proj"),  # whose input is kept as it is
    ("qwen2", "model.layers.1.self_attn.q_proj"),  # with a bias
    ("gpt2", "transformer.h.1.mlp.c_fc"),  # whose weight is transposed
]


def sample(sort: str, tokens: int, channels: int, seed: int) -> torch.Tensor:
    x = torch.zeros(tokens, channels) if sort == "zeros" else normal((tokens, channels), seed)
    if sort == "outliers":
        x[tokens // 2, 1] = 1e5
    return x


def decoded(x: torch.Tensor, fp8: torch.dtype = E4M3) -> torch.Tensor:
    scale = (x.abs().max() * (1 / torch.finfo(fp8).max)).clamp(min=2.0**-120)
    return (x * (1 / scale)).to(fp8).double() * scale


@pytest.mark.parametrize("backward", ["e4m3", "e5m2"])
@pytest.mark.parametrize("sort", ["normal", "outliers", "zeros"])
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize(("family", "name"), LAYERS, ids=[name for _, name in LAYERS])
def test_product_and_its_gradients_follow_the_formula(family, name, tokens, sort, backward):
    layer = make_slice(make_spec(family, **ODD), fp8=Fp8Config(backward=backward)).get_submodule(name)
    with torch.no_grad():
        layer.weight.copy_(sample("outliers" if sort == "zeros" else sort, *layer.weight.shape, 2))
    weight = layer.weight if isinstance(layer, torch.nn.Linear) else layer.weight.t()
    x = sample(sort, tokens, weight.shape[1], 0).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    flowing = sample(sort, *y.shape, 1).bfloat16()
    y.backward(flowing)
    coded_x, coded_weight = decoded(x.detach()), decoded(weight.detach())
    coded_gradient = decoded(flowing.float(), FP8_FORMATS[backward])
    bias = 0 if layer.bias is None else layer.bias.detach().double()
    expected = [coded_x @ coded_weight.t() + bias, coded_gradient @ coded_weight, coded_gradient.t() @ coded_x]
    of_weight = layer.weight.grad if isinstance(layer, torch.nn.Linear) else layer.weight.grad.t()
    assert (y.dtype, x.grad.dtype, of_weight.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    # y and the input's gradient are rounded to bf16; what fp32 rounds while it adds is less by orders of magnitude,
    # except where large numbers cancel
    for got, right in zip((y, x.grad, of_weight), expected, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=2.0**-7, atol=2.0**-18 * float(right.abs().max()))
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, flowing.float().sum(0))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["input", "weight", "gradient"])
def test_numbers_that_are_not_finite_reach_the_results(place, bad):
    layer = make_slice(make_spec("llama"), fp8=Fp8Config()).get_submodule("model.layers.1.mlp.gate_proj")
    x = normal((5, 64))
    flowing = normal((5, layer.out_features), 1)
    {"input": x, "weight": layer.weight.detach(), "gradient": flowing}[place][3, 7] = bad
    y = layer(x.requires_grad_())
    y.backward(flowing)
    assert y.isnan().any() == (place != "gradient")
    assert x.grad.isnan().any() == (place != "input")
    assert layer.weight.grad.isnan().any() == (place != "weight")


@pytest.mark.parametrize("backward", ["e4m3", "e5m2"])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_split_backward_and_shared_codes_change_no_bit(family, backward):
    modules = [make_slice(make_spec(family), fp8=Fp8Config(backward=backward)) for _ in range(3)]
    alone = gradients(modules[0], bf16=True)
    assert different(alone, gradients(modules[1], bf16=True, deferred=DeferredGradients())) == []
    with sharing_weight_copies():
        assert different(alone, gradients(modules[2], bf16=True)) == []
        coded = [codes for codes in shared_copies().values() if isinstance(codes, WeightCodes)]
        before = [codes.codes(for_gradient=False) for codes in coded]
        gradients(modules[2], bf16=True)
        assert all(codes.codes(for_gradient=False) is each for codes, each in zip(coded, before, strict=True))
    assert len(coded) == sum(p.ndim == 2 for p in modules[2].parameters())


def test_products_of_one_input_share_its_codes():
    module = make_slice(make_spec("llama"), fp8=Fp8Config())
    x = normal((2, SEQ_LEN, 64)).requires_grad_()
    saved = saved_storages(lambda: module(x))
    codes = [tensor for tensor in saved.values() if tensor.dtype == E4M3 and tensor.numel() % (2 * SEQ_LEN) == 0]
    assert len(codes) == 3  # of both norms' outputs, and of what the MLP's last product takes


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("stored", [("norms", "mlp"), ("norms", "mlp", "attention")], ids=["default", "everything"])
def test_stored_inputs_leave_the_forward_alone_and_are_coded_again(stored, is_split):
    spec, agoq = make_spec("llama"), AgoqConfig(bits=8, stored=stored)
    expected = gradients(make_slice(spec, fp8=Fp8Config()), bf16=True)
    deferred = DeferredGradients() if is_split else None
    got = gradients(make_slice(spec, agoq, fp8=Fp8Config()), bf16=True, deferred=deferred)
    assert torch.equal(got["y"], expected["y"])
    # inputs of norms and of SiLU are rounded to E4M3, and what is recomputed from them once more for the products
    assert max(relative_distance(got[name], expected[name]) for name in got) < 0.15


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_fp8_units_multiply_the_same_codes(monkeypatch, family):
    spec = make_spec(family, **({"intermediate_size": 176} if family == "llama" else {}))
    emulated = gradients(make_slice(spec, fp8=Fp8Config()))
    # torch multiplies FP8 on a CPU too; the paths for matrix units, transposed codes among them, run there
    monkeypatch.setattr(fp8_codes, "has_fp8_units", lambda device: True)
    for context in (sharing_weight_copies(), torch.enable_grad()):
        with context:
            on_units = gradients(make_slice(spec, fp8=Fp8Config()))
        for name, value in emulated.items():
            # sums in another order may move a number over the edge between two codes, which moves it by 2⁻³ at most
            assert relative_distance(on_units[name], value) < 1e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize("backward", ["e4m3", "e5m2"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_layers_on_cuda_are_those_of_the_cpu(family, backward):
    spec = make_spec(family, hidden_size=256, **({} if family == "gpt2" else {"intermediate_size": 688}))
    module = make_slice(spec, fp8=Fp8Config(backward=backward), device="cuda")
    with sharing_weight_copies():
        got = gradients(module, bf16=True)
    expected = gradients(make_slice(spec, fp8=Fp8Config(backward=backward)), bf16=True)
    for name, value in expected.items():
        if not name.endswith(("k_proj.bias", "c_attn.bias")):
            # bf16 roundings and other orders of addition move some numbers over the edge between two codes
            assert relative_distance(got[name], value) < (0.1 if backward == "e5m2" else 0.05), name
    module.zero_grad()
    assert different(gradients(module, bf16=True, deferred=DeferredGradients()), got) == []


def test_a_gpu_without_fp8_units_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"needs an NVIDIA GPU of compute capability 8\.9 .*precision: bf16"):
        check_fp8_units(torch.device("cuda", 7))
    check_fp8_units(torch.device("cpu"))


# -- whole models ---------------------------------------------------------------------------------


def step(slices: list[ModelSlice]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) % VOCAB
    x = tokens
    for part in slices:
        with torch.autocast("cpu", torch.bfloat16):
            x = part(x if x is tokens else x.float())
    loss = slices[-1].loss(x, tokens)[0]
    loss.backward()
    return loss.detach(), {name: p.grad for part in slices for name, p in part.named_parameters()}


def test_two_stages_compute_what_one_does():
    spec, ranges = make_spec("llama"), ([BlockRange(0, 3, 3)], [BlockRange(0, 1, 3), BlockRange(1, 3, 3)])
    (one, of_one), (two, of_two) = (
        step([make_slice(spec, blocks=blocks, fp8=Fp8Config()) for blocks in each]) for each in ranges
    )
    assert torch.equal(one, two)
    assert different(of_one, of_two) == []


@pytest.mark.acceptance
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("backward", ["e4m3", "e5m2"])
def test_training_follows_bf16(family, backward):
    def losses(**training) -> list[float]:
        config = tiny(model={"family": family}, training={"steps": 8, "lr": 3e-3, **training})
        return plain(config).losses

    in_bf16, in_fp8 = losses(precision="bf16"), losses(precision="fp8", fp8={"backward": backward})
    fallen = in_bf16[0] - in_bf16[-1]
    assert fallen > 0.3
    assert 0 < max(abs(a - b) for a, b in zip(in_fp8, in_bf16, strict=True)) < 0.1 * fallen
