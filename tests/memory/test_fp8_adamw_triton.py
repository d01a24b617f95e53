"""The fused kernel of `fp8_adamw` against plain torch on the CPU, on CUDA or in Triton's interpreter.

Codes, scales and powers are equal to the bit, in the interpreter weights too. On CUDA a weight's update is within 2⁻²¹
of the CPU's, relative, and the sum is rounded once more.
"""

import pytest
import torch
from support.fp8_moments import (
    FORMATS,
    Trained,
    awkward_groups,
    formats_of,
    numbers_of,
    parts_of,
    same_bits,
    step_on_groups,
)
from support.interpreter import DEVICE, on_device, sizes

from tahq.memory.coat.fp8_adamw import step_in_torch
from tahq.memory.coat.fp8_groups import StoredMoment

pytestmark = on_device
CPU = torch.device("cpu")


def step_by_kernel(weights, gradients, moments, numbers) -> None:
    from tahq.memory.coat.fp8_adamw_kernels import bind_step

    bind_step(weights, gradients, moments)(gradients, numbers)


STEPS = [step_by_kernel] if DEVICE == CPU else [step_by_kernel, step_in_torch]


def assert_same_steps(numel, formats="coat", steps=3, scale=1e-3, step=step_by_kernel):
    got = Trained(step, numel, formats, DEVICE).take_steps(range(1, steps + 1), scale)
    expected = Trained(step_in_torch, numel, formats).take_steps(range(1, steps + 1), scale)
    (weights, *states), (expected_weights, *expected_states) = got.tensors(), expected.tensors()
    assert all(torch.equal(*pair) for pair in zip(states, expected_states, strict=True))
    if DEVICE == CPU or step is step_in_torch:
        assert torch.equal(weights, expected_weights)
    else:
        # A step is at most 5 rates of 10⁻³: |m̂|/√v̂ is below 5 at first. 2⁻²³ of itself: rounded to the other side.
        error = (weights - expected_weights).abs()
        assert (error <= steps * (2.0**-21 * 5e-3 + 2.0**-23 * expected_weights.abs())).all()
    got.assert_nothing_else_was_written()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("numel", sizes([300], [1, 127, 128, 4097, 33 * 77], [1 << 22]))
def test_steps_are_equal_to_the_bit_and_write_nothing_else(numel, formats, step):
    """300 elements are a full program and a partial one."""
    assert_same_steps(numel, formats, steps=2 if numel == 300 else 3, step=step)


@pytest.mark.acceptance
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-22, 1e-19, 1e15], ids=str)
def test_steps_are_equal_for_gradients_of_every_size(scale):
    assert_same_steps(4097, scale=scale)


@pytest.mark.parametrize("formats", sizes(["coat"], list(FORMATS)[1:], []))
def test_steps_are_equal_for_groups_of_every_sort(formats):
    """As old moments, and as gradients: zeros, constants, subnormal, huge, not finite."""
    groups = torch.cat(list(awkward_groups(2 if DEVICE == CPU else 40).values()))
    got, expected = (
        step_on_groups(step_by_kernel, groups, formats, DEVICE),
        step_on_groups(step_in_torch, groups, formats),
    )
    for left, right in list(zip(got, expected, strict=True))[0 if DEVICE == CPU else 1 :]:
        assert same_bits(left, right)


@pytest.mark.gpu
@pytest.mark.parametrize("power", range(-149, 128, 12))
def test_magnitudes_of_every_size_are_coded_alike(power):
    """Scales, powers and codes of groups about 2^power: the guesses of logarithms are corrected everywhere."""
    generator = torch.Generator().manual_seed(power)
    spread = 2.0 ** (torch.rand(500, 1, generator=generator) * 120)
    sizes = spread ** torch.rand(500, 128, generator=generator).double()
    groups = (torch.randn(500, 128, generator=generator).double().sign() * sizes * 2.0**power).clamp(-1e38, 1e38)
    outcomes = []
    for device, step in ((DEVICE, step_by_kernel), (CPU, step_in_torch)):
        kinds = ((groups.numel(), torch.uint8), (500, torch.bfloat16), (500, torch.uint8))
        moments = tuple(
            StoredMoment(*(torch.zeros(count, dtype=dtype, device=device) for count, dtype in kinds), by)
            for by in formats_of("coat", device)
        )
        # β₁ = 0: the first moment is the gradient itself
        numbers = numbers_of(1, 1e-3, (0.0, 0.95), 1e-8, 0.0)
        step(torch.zeros(groups.numel(), device=device), groups.float().view(-1).to(device), moments, numbers)
        outcomes.append([part.cpu().float() for part in parts_of(moments)])
    assert all(same_bits(*pair) for pair in zip(*outcomes, strict=True))
