"""The fused kernel against plain torch in Triton's interpreter; on CUDA, tests/gpu/test_fp8_adamw.py."""

import pytest
import torch
from support.fp8_moments import FORMATS, Trained, Unaligned, awkward_groups, same_bits, step_on_groups
from support.interpreter import in_interpreter

from tahq.memory.coat.fp8_adamw import step_in_torch

pytestmark = in_interpreter
acceptance = pytest.mark.acceptance


def step_in_triton(*arguments) -> None:
    from tahq.memory.coat.fp8_adamw_kernels import step_on_cuda

    step_on_cuda(*arguments)


def assert_equal_steps(numel, formats="coat", steps=3, gradient_scale=1.0, trained=Trained):
    got = trained(step_in_triton, numel, formats).take_steps(range(1, steps + 1), gradient_scale)
    expected = Trained(step_in_torch, numel, formats).take_steps(range(1, steps + 1), gradient_scale)
    for left, right in zip(got.tensors(), expected.tensors(), strict=True):
        assert torch.equal(left, right)
    got.assert_nothing_else_was_written()


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("numel", [300, *(pytest.param(n, marks=acceptance) for n in (1, 127, 128, 4097, 33 * 77))])
def test_steps_are_equal_to_the_bit_and_write_nothing_else(numel, formats):
    """300 elements are a full program and a partial one."""
    assert_equal_steps(numel, formats, steps=2 if numel == 300 else 3)


@acceptance
def test_tensors_may_be_at_any_address():
    assert_equal_steps(4100, steps=2, trained=Unaligned)


@acceptance
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-22, 1e-19, 1e15], ids=str)
def test_steps_are_equal_for_gradients_of_every_size(scale):
    assert_equal_steps(4097, gradient_scale=scale)


@pytest.mark.parametrize("formats", ["coat", *(pytest.param(each, marks=acceptance) for each in list(FORMATS)[1:])])
def test_steps_are_equal_for_groups_of_every_sort(formats):
    """As old moments, and as gradients: zeros, constants, subnormal, huge, not finite."""
    groups = torch.cat(list(awkward_groups(2).values()))
    for left, right in zip(*(step_on_groups(f, groups, formats) for f in (step_in_triton, step_in_torch)), strict=True):
        assert same_bits(left, right)
