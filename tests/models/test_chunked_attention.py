"""Attention in chunks of samples and heads: the bits of one call, in the same memory."""

import pytest
import torch
from support.samples import normal
from support.small_slices import MIDDLE, different, gradients, make_slice, make_spec, saved_storages
from torch.utils._python_dispatch import TorchDispatchMode

from tahq.memory.config import AgoqConfig, CoatConfig
from tahq.models.deferred_gradients import sharing_weight_copies
from tahq.models.fused_attention import attend_in_chunks
from tahq.models.model_spec import ModelSpec

CASES = {
    "gpt2": {},
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"overrides": {"sliding_window": 8}},
    "qwen2 with a window": {"overrides": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}},
}
every_family = pytest.mark.parametrize("case", CASES)
every_dtype = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])


def spec_of(case: str) -> ModelSpec:
    return make_spec(case.split()[0], **CASES[case])


class _Calls(TorchDispatchMode):
    """Shapes of the queries that fused kernels are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, given = function.overloadpacket.__name__, kwargs or {}
        if name.startswith("_scaled_dot_product"):
            query = given["query"] if "query" in given else args["backward" in name]
            self.shapes.append(("backward" if "backward" in name else "forward", list(query.shape[:2])))
        return function(*args, **given)


@every_family
@every_dtype
@pytest.mark.parametrize("num_chunks", [2, 3, 8])
def test_outputs_and_gradients_have_the_bits_of_one_call(case, bf16, num_chunks):
    """Two samples, four query heads, two key heads."""
    whole, chunked = make_slice(spec_of(case)), make_slice(spec_of(case))
    attend_in_chunks(chunked, num_chunks)
    with sharing_weight_copies():
        assert different(gradients(whole, bf16=bf16), gradients(chunked, bf16=bf16)) == []


@pytest.mark.parametrize(
    ("case", "num_chunks", "shapes"),
    [
        ("llama", 2, [[1, 4]] * 2),
        ("llama", 4, [[1, 2]] * 4),
        ("llama", 100, [[1, 2]] * 4),
        ("gpt2", 5, [[1, 1], [1, 1], [1, 2]] * 2),
        ("mistral", 4, [[1, 2]] * 4),
    ],
)
def test_a_kernel_is_called_for_one_chunk_at_a_time(case, num_chunks, shapes):
    module = make_slice(spec_of(case))
    attend_in_chunks(module, num_chunks)
    with _Calls() as calls:
        gradients(module)
    assert calls.shapes == [(direction, shape) for direction in ("forward", "backward") for shape in shapes]


@every_family
@pytest.mark.parametrize("level", ["swiglu", "ffn", "qkv", "att", "block"])
def test_recomputed_parts_have_the_same_bits(case, level):
    whole, chunked = make_slice(spec_of(case)), make_slice(spec_of(case), level)
    attend_in_chunks(chunked, 4)
    with sharing_weight_copies():
        assert different(gradients(whole, bf16=True), gradients(chunked, bf16=True)) == []
    with _Calls() as calls:
        gradients(chunked)
    of_forwards = [shape for direction, shape in calls.shapes if direction == "forward"]
    assert len(of_forwards) == {"att": 8, "block": 8}.get(level, 4)  # `qkv` keeps the kernel's outputs


@pytest.mark.parametrize("stored", [("norms", "mlp"), ("norms", "mlp", "attention")])
def test_stored_activations_have_the_same_bits(stored):
    config = AgoqConfig(bits=4, stored=stored)
    whole, chunked = make_slice(spec_of("qwen3"), config), make_slice(spec_of("qwen3"), config)
    attend_in_chunks(chunked, 4)
    assert different(gradients(whole), gradients(chunked)) == []


def test_fp8_flow_has_the_same_bits():
    whole, chunked = (make_slice(spec_of("llama"), CoatConfig()) for _ in range(2))
    attend_in_chunks(chunked, 4)
    assert different(gradients(whole), gradients(chunked)) == []
    with _Calls() as calls:
        gradients(chunked)
    assert len(calls.shapes) == 8


@every_family
@every_dtype
def test_no_more_is_kept_for_the_backward(case, bf16):
    found = []
    for num_chunks in (1, 4):
        module = make_slice(spec_of(case), blocks=MIDDLE)
        attend_in_chunks(module, num_chunks)
        x = torch.randn(2, 48, 64, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16), sharing_weight_copies():
            saved = saved_storages(lambda module=module, x=x: module(x))
        parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
        found.append(sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in parameters))
    assert found[1] == found[0]


@pytest.mark.gpu
@pytest.mark.usefixtures("repeatable_kernels")
def test_grouped_heads_in_fp32_have_a_fused_kernel_on_cuda():
    found = []
    for device in ("cuda", "cpu"):
        module, x = make_slice(spec_of("llama"), device=device), normal((2, 48, 64)).to(device).requires_grad_()
        with _Calls() as calls:
            y = module(x)
        y.backward(normal(y.shape, seed=1).to(device))
        found.append({"y": y, "x": x.grad} | {name: p.grad for name, p in module.named_parameters()})
        assert len(calls.shapes) == 1
    for name, value in found[0].items():
        torch.testing.assert_close(value.cpu(), found[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("repeatable_kernels")
@pytest.mark.parametrize("case", ["gpt2", "llama", "qwen2 with a window"])
@every_dtype
def test_bits_are_those_of_one_call_on_cuda(case, bf16):
    """320 heads, more than two chunks need, of 24 channels, not for own kernels. In fp32 keys are repeated."""
    spec = make_spec(case.split()[0], **CASES[case], hidden_size=960, num_heads=40)
    found = []
    for num_chunks in (1, 2, 100):
        module = make_slice(spec, device="cuda")
        attend_in_chunks(module, num_chunks)
        x = normal((8, 256, 960)).cuda().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16), _Calls() as calls:
            y = module(x)
        assert (len(calls.shapes) > 1) == (num_chunks > 1)
        y.float().backward(normal(y.shape, seed=1).cuda())
        found.append({"y": y, "x": x.grad} | {name: p.grad for name, p in module.named_parameters()})
    assert different(found[0], found[1]) == []
    assert different(found[0], found[2]) == []
