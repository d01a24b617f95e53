"""The kernels of the FP8 precision flow against the reference on the CPU, on CUDA or in Triton's interpreter.

The interpreter cuts off where bf16 rounds, so that tensors in and out are fp32 there.
"""

from importlib import import_module

import pytest
import torch
from support.fp8_flow_checks import check_gated, check_norm, check_rotation, check_tensor_codes, matrices, same
from support.interpreter import DEVICE, in_interpreter, on_device, sizes
from support.samples import normal
from support.small_slices import different, gradients, make_slice, make_spec, relative_distance

from tahq.memory import fp8_products, recompute
from tahq.memory.agoq import stored_inputs
from tahq.memory.coat import fp8_codes
from tahq.memory.coat import fp8_flow_reference as reference
from tahq.memory.config import CoatConfig, Fp8Config
from tahq.memory.rotary import Rotation

pytestmark = on_device
SHAPES = sizes([(5, 20)], [(1, 1), (2, 130)], [(70, 130), (256, 1024)])
SORTS = sizes(["awkward", "not finite"], ["gaussian", "outliers", "zeros", "constant", "tiny", "huge"], [])
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_sort = pytest.mark.parametrize("sort", SORTS)
every_dtype = pytest.mark.parametrize("dtype", sizes([torch.float32], [], [torch.bfloat16]), ids=str)


@pytest.fixture
def kernels():
    from tahq.memory.coat import fp8_flow_triton

    return fp8_flow_triton


def on_this(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: x.to(DEVICE, dtype) for name, x in matrices(*shape).items()}


@every_dtype
@pytest.mark.parametrize("shape", [*SHAPES, *sizes([], [(70, 130)], [])], ids=str)
def test_codes_with_one_scale_equal_the_references(kernels, shape, dtype):
    for x in on_this(shape, dtype).values():
        check_tensor_codes(kernels, x)


@every_dtype
@every_sort
@every_shape
def test_norms_equal_the_references(kernels, shape, sort, dtype):
    made = on_this(shape, dtype)
    weight = normal(shape[1], 1).to(DEVICE)
    check_norm(kernels, made[sort], None, weight)
    check_norm(kernels, made[sort], made["outliers"], weight)


@every_sort
@every_shape
def test_gated_activations_equal_the_references(kernels, shape, sort):
    made = on_this(shape, torch.float32)
    check_gated(kernels, made[sort], made["gaussian"])
    check_gated(kernels, made["gaussian"], made[sort])


def test_rotation_and_its_transpose_equal_the_references(kernels):
    check_rotation(kernels, DEVICE)


@pytest.mark.parametrize("positions", [[[0, 1, 2, 3, 4]], [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]], ids=["one", "packed"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "dtypes",
    sizes([(torch.float32, torch.float32)], [], [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]),
    ids=str,
)
def test_rotation_and_its_gradient_are_those_of_transformers(kernels, monkeypatch, name, dtypes, positions):
    monkeypatch.setattr(fp8_codes, "_kernels_for", lambda device_type: kernels)
    theirs = import_module(f"transformers.models.{name}.modeling_{name}").apply_rotary_pos_emb
    given, rounded = dtypes
    query, key = (normal((2, 5, heads, 12), heads).to(DEVICE, given).requires_grad_() for heads in (6, 2))
    angles = torch.tensor(positions)[..., None] * torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 0.003]).repeat(2)
    tables = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    wide = [x.detach().float().transpose(1, 2).requires_grad_() for x in (query, key)]
    for x, like, expected in zip((query, key), wide, theirs(*wide, *tables), strict=True):
        got = Rotation.apply(x, *tables, rounded)
        assert got.dtype == rounded
        flowing = normal(got.shape, 1).to(DEVICE, rounded)
        got.backward(flowing)
        expected.backward(flowing.float().transpose(1, 2))
        torch.testing.assert_close(got, expected.transpose(1, 2).to(rounded))
        torch.testing.assert_close(x.grad, like.grad.transpose(1, 2).to(given))


def test_every_code_comes_back(kernels):
    # All 256 codes, each as the largest but one of a group whose scale is 1: 448 is there too.
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = torch.stack([numbers.nan_to_num(1.0), torch.full_like(numbers, 448.0)], 1).repeat(1, 8).view(8, 512)
    got = kernels.norm_forward(numbers.to(DEVICE), None, torch.ones(512, device=DEVICE), 1e-5)
    assert same(reference.dequantize_groups(got.codes), numbers)


@pytest.mark.acceptance
@in_interpreter
@pytest.mark.parametrize("products", ["e5m2", "bf16"])
def test_a_layer_of_kernels_computes_what_the_reference_does(kernels, monkeypatch, products):
    # As on a device with FP8 units: transposed codes are kept, and torch multiplies FP8.
    monkeypatch.setattr(fp8_codes, "has_fp8_units", lambda device: True)
    keys = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 80}
    spec, config = make_spec("llama", **keys), CoatConfig(backward_products=products)
    expected = gradients(make_slice(spec, config), seq_len=8)
    monkeypatch.setattr(fp8_codes, "_kernels_for", lambda device_type: kernels)
    got = gradients(make_slice(spec, config), seq_len=8)
    for name, value in expected.items():
        # Last bits of sums and of SiLU may move a number over the edge between two codes, by 2⁻³ of it at most.
        assert relative_distance(got[name], value) < 1e-2, name


@in_interpreter
def test_products_in_fp8_by_kernels_are_those_of_the_reference(kernels, monkeypatch):
    monkeypatch.setattr(fp8_codes, "has_fp8_units", lambda device: True)
    spec = make_spec("gpt2", hidden_size=16, num_heads=2)
    expected = gradients(make_slice(spec, fp8=Fp8Config()), seq_len=8)
    monkeypatch.setattr(fp8_codes, "_kernels_for", lambda device_type: kernels)
    assert different(gradients(make_slice(spec, fp8=Fp8Config()), seq_len=8), expected) == []


@in_interpreter
def test_maxima_from_norms_and_activations_replace_passes_over_their_outputs(kernels, monkeypatch):
    from tahq.memory.agoq import stored_triton

    monkeypatch.setattr(fp8_codes, "has_fp8_units", lambda device: True)
    monkeypatch.setattr(fp8_codes, "_kernels_for", lambda device_type: kernels)
    monkeypatch.setattr(recompute, "has_kernels", lambda device_type: True)
    monkeypatch.setattr(stored_inputs, "_triton_for", lambda device: stored_triton)
    passes, find = [], kernels.group_maxima
    monkeypatch.setattr(kernels, "group_maxima", lambda x: passes.append(x.shape) or find(x))
    spec = make_spec("llama", hidden_size=16, num_heads=2, intermediate_size=32)

    def found() -> tuple[dict[str, torch.Tensor], int]:
        passes.clear()
        return gradients(make_slice(spec, "none", fp8=Fp8Config()), seq_len=8), len(passes)

    with_maxima, few = found()
    for module in (fp8_codes, fp8_products):
        monkeypatch.setattr(module, "kept_scale", lambda x, fp8: None)
    without, many = found()
    assert different(with_maxima, without) == []
    assert many - few == 5  # outputs of two norms and the activation, gradients of gate and up
