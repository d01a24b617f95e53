"""Kernels of tahq's AdamWs against plain torch on the CPU, on CUDA or in Triton's interpreter."""

from functools import partial

import pytest
import torch
from support.adamw_checks import GRADIENTS, check_8bit, check_every_border, check_plain
from support.interpreter import DEVICE, in_interpreter, on_device, sizes
from support.samples import normal
from torch.nn import Parameter

from tahq.memory.adam.adamw import BlockwiseAdamW, plain_adamw_states
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.optimizer import build_optimizer, optimizer_tensors

pytestmark = on_device
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("shape", sizes([(1,), (127,), (2048,), (4097,), (33, 77)], [], [(1000, 1024)]), ids=str)
def test_codes_scales_and_weights_equal_the_reference_for_any_shape(shape):
    check_8bit(shape, DEVICE)


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_codes_scales_and_weights_equal_the_reference_for_any_gradients(gradients):
    """In a program that is filled and in one that is not."""
    check_8bit((70000,) if DEVICE.type == "cuda" else (1724,), DEVICE, gradients=gradients)


@pytest.mark.parametrize("block", [64, 512, 2048])
def test_kernels_equal_the_reference_with_other_block_sizes(block):
    check_8bit((3000,), DEVICE, block=block)


@in_interpreter
def test_kernels_equal_the_reference_without_gather_as_in_triton_3_2(monkeypatch):
    monkeypatch.setattr("tahq.memory.adam.blockwise8_kernels._HAS_GATHER", False)
    monkeypatch.delattr("triton.language.gather")
    check_8bit((1500,), DEVICE)


@pytest.mark.parametrize(("weight", "gradient"), [(BF16, BF16), (FP32, BF16), (BF16, FP32)], ids=str)
def test_kernels_equal_the_reference_with_bf16_weights_and_gradients(weight, gradient):
    check_8bit((1500,), DEVICE, weight_dtype=weight, gradient_dtype=gradient)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(1,), (127,), (1024,), (33, 77)], ids=str)
def test_kernels_equal_the_reference_with_unquantised_moments(shape, dtype):
    check_plain(shape, DEVICE, dtype)


# Moments of some are subnormal, which the interpreter converts to bf16 and back wrongly.
CONVERTED = [each for each in GRADIENTS if DEVICE.type == "cuda" or each not in ("tiny", "subnormal")]


@pytest.mark.parametrize("gradients", CONVERTED)
@pytest.mark.parametrize(("weight", "gradient"), [(BF16, BF16), (FP32, BF16), (BF16, FP32)], ids=str)
def test_kernels_equal_the_reference_with_stochastic_rounding(weight, gradient, gradients):
    types = {"weight_dtype": weight, "gradient_dtype": gradient}
    check_plain((1300,), DEVICE, BF16, gradients=gradients, is_stochastic=True, **types)


@in_interpreter
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_many_parameters_in_one_launch_equal_the_reference(dtype, monkeypatch):
    """Some larger than a chunk; one without a gradient in the first step, one that no kernel can read."""
    shapes = {
        "large": (2, 16385),
        "norm": (7,),
        "late": (33, 77),
        "odd": (40, 50),
        "filled": (1 << 14,),
        "last": (1025,),
    }

    def trained(uses_kernels: bool) -> dict[str, torch.Tensor]:
        monkeypatch.setattr("tahq.memory.adam.adamw._has_kernels", lambda _: uses_kernels)
        parameters = {name: Parameter(normal(shape, len(name))) for name, shape in shapes.items()}
        draws = {each: (3, name) for name, each in parameters.items()}
        groups = [
            {"params": [each for each in draws if (each.ndim > 1) == matrices], "weight_decay": decay, "draws": draws}
            for matrices, decay in ((True, 0.1), (False, 0.0))
        ]
        states = partial(plain_adamw_states, dtype=dtype)
        optimizer = BlockwiseAdamW(groups, states, lr=1e-2, is_stochastic=dtype == BF16)
        for step in range(3):
            for number, (name, each) in enumerate(parameters.items()):
                gradient = normal(each.shape, 10 * step + number)
                each.grad = gradient.t().contiguous().t() if name == "odd" else gradient
            if step == 0:
                parameters["late"].grad = None
            optimizer.step()
        weights = {name: each.detach() for name, each in parameters.items()}
        return weights | optimizer_tensors(optimizer, parameters)

    got, expected = trained(True), trained(False)
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


@pytest.mark.parametrize("signed", [True, False])
def test_codes_equal_the_reference_at_every_border(signed):
    check_every_border(DEVICE, signed)


@in_interpreter
def test_kernels_are_bound_anew_when_tensors_are_replaced(monkeypatch):
    """An optimizer whose weights, gradients and states are replaced in between, against one that has no kernels."""

    def trained(uses_kernels: bool) -> dict[str, torch.Tensor]:
        monkeypatch.setattr("tahq.memory.adam.adamw._has_kernels", lambda _: uses_kernels)
        parameter = Parameter(normal((16, 24), 0))
        config = TrainingConfig(steps=1, optimizer="adamw8bit", lr=1e-2, adamw8bit={"min_elements": 0})
        optimizer = build_optimizer(config, {"w": parameter}, lambda *_: True)
        for step in range(1, 10):
            gradient = normal((16, 24), step)
            if step == 3:  # of odd strides
                gradient = gradient.t().contiguous().t()
            if step == 4:  # not where a kernel could read it
                gradient = torch.cat((torch.zeros(1), gradient.view(-1)))[1:].view(16, 24)
            if step == 6:
                parameter.data = parameter.data.clone()
            if step == 8:
                optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"].clone()
            parameter.grad = gradient
            optimizer.step()
        return {"weight": parameter.detach(), **optimizer_tensors(optimizer, {"w": parameter})}

    got, expected = trained(True), trained(False)
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []
