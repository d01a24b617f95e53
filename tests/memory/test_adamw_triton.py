"""Kernels of our AdamWs against plain torch, in Triton's interpreter; on CUDA, tests/gpu/test_adamw_kernels.py."""

import pytest
import torch
from support.adamw_checks import GRADIENTS, check_8bit, check_every_border, check_plain
from support.interpreter import in_interpreter
from support.samples import normal
from torch.nn import Parameter

from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.update.optimizer import build_optimizer, optimizer_tensors

pytestmark = in_interpreter
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(1,), (127,), (128,), (2048,), (4097,), (33, 77)], ids=str)
def test_codes_scales_and_weights_equal_the_reference_for_any_shape(shape):
    check_8bit(shape, CPU)


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_codes_scales_and_weights_equal_the_reference_for_any_gradients(gradients):
    """In a program that is filled and in one that is not."""
    check_8bit((1724,), CPU, gradients=gradients)


@pytest.mark.parametrize("block", [64, 512, 2048])
def test_kernels_equal_the_reference_with_other_block_sizes(block):
    check_8bit((3000,), CPU, block=block)


def test_kernels_equal_the_reference_without_gather_as_in_triton_3_2(monkeypatch):
    monkeypatch.setattr("tahq.memory.adam.blockwise8_kernels._HAS_GATHER", False)
    monkeypatch.delattr("triton.language.gather")
    check_8bit((1500,), CPU)


def test_kernels_equal_the_reference_with_bf16_weights_and_gradients():
    check_8bit((1500,), CPU, weight_dtype=torch.bfloat16, gradient_dtype=torch.bfloat16)
    check_8bit((1500,), CPU, gradient_dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (127,), (1024,), (33, 77)], ids=str)
def test_kernels_equal_the_reference_with_unquantised_moments(shape, dtype):
    check_plain(shape, CPU, dtype)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_equal_the_reference_at_every_border(signed):
    check_every_border(CPU, signed)


def test_kernels_are_bound_anew_when_tensors_are_replaced(monkeypatch):
    """An optimizer whose weights, gradients and states are replaced in between, against one that has no kernels."""

    def trained(uses_kernels: bool) -> dict[str, torch.Tensor]:
        monkeypatch.setattr("tahq.memory.adam.adamw._has_kernels", lambda _: uses_kernels)
        parameter = Parameter(normal((60, 70), 0))
        config = TrainingConfig(steps=1, optimizer="adamw8bit", lr=1e-2, adamw8bit={"min_elements": 0})
        optimizer = build_optimizer(config, {"w": parameter}, lambda *_: True)
        for step in range(1, 11):
            gradient = normal((60, 70), step)
            if step == 3:  # of odd strides
                gradient = gradient.t().contiguous().t()
            if step == 4:  # not where a kernel could read it
                gradient = torch.cat((torch.zeros(1), gradient.view(-1)))[1:].view(60, 70)
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
