"""The FP8 optimizer on a CUDA device: its kernel gives the CPU's codes, and states go from one device to the other.

Codes, scales and powers are equal to the bit. A weight is not: its update is within 2⁻²¹ of the CPU's, relative, and
the sum is rounded once more.
"""

import pytest
import torch
from support.device_waits import host_must_not_wait
from support.fp8_moments import (
    FORMATS,
    Trained,
    Unaligned,
    awkward_groups,
    formats_of,
    numbers_of,
    parts_of,
    same_bits,
    step_on_groups,
)
from torch.nn import Parameter

from tahq.memory.coat.fp8_adamw import step_in_torch
from tahq.memory.coat.fp8_groups import StoredMoment
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.update.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors

pytestmark = pytest.mark.gpu
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = TrainingConfig(steps=10, optimizer="fp8_adamw", lr=1e-3)
every_format = pytest.mark.parametrize("formats", FORMATS)


def assert_weights_agree(got: torch.Tensor, expected: torch.Tensor, moved: float, steps: int) -> None:
    """Within 2⁻²¹ of what a weight moved by at most, and 2⁻²³ of itself a step (rounded to the other side)."""
    finite = expected.isfinite()
    assert torch.equal(got.isfinite(), finite)
    error = (got - expected).abs()[finite]
    assert (error <= 2.0**-21 * moved + steps * 2.0**-23 * expected[finite].abs()).all()


def step_on_device(*arguments) -> None:
    from tahq.memory.coat.fp8_adamw_kernels import step_on_cuda

    step_on_cuda(*arguments)


@every_format
@pytest.mark.parametrize("numel", [1, 127, 128, 4097, 33 * 77, 1 << 22])
def test_steps_are_the_cpus_to_the_bit_and_write_nothing_else(numel, formats):
    expected = Trained(step_in_torch, numel, formats).take_steps(range(1, 4))
    for step in (step_on_device, step_in_torch):
        got = Trained(step, numel, formats, CUDA).take_steps(range(1, 4))
        (weights, *states), (expected_weights, *expected_states) = got.tensors(), expected.tensors()
        for left, right in zip(states, expected_states, strict=True):
            assert torch.equal(left, right), step.__name__
        # |m̂|/√v̂ ≤ max(1, (1 − β₁)/√(1 − β₂)) = 1 in the long run, below 5 in the first steps: three of 10⁻³
        assert_weights_agree(weights, expected_weights, 3 * 5e-3, 3)
        if step is step_in_torch:
            assert torch.equal(weights, expected_weights)
        got.assert_nothing_else_was_written()


def test_tensors_may_be_at_any_address():
    """After aligned ones of the same shape, for which a launch is kept."""
    expected = Trained(step_on_device, 4100, "coat", CUDA).take_steps(range(1, 4))
    got = Unaligned(step_on_device, 4100, "coat", CUDA).take_steps(range(1, 4))
    for left, right in zip(got.tensors(), expected.tensors(), strict=True):
        assert torch.equal(left, right)
    got.assert_nothing_else_was_written()


@every_format
def test_steps_are_equal_for_groups_of_every_sort(formats):
    for sort, groups in awkward_groups().items():
        on_device = step_on_groups(step_on_device, groups, formats, CUDA)
        on_cpu = step_on_groups(step_in_torch, groups, formats)
        for left, right in zip(on_device[1:], on_cpu[1:], strict=True):
            assert same_bits(left, right), sort


@pytest.mark.parametrize("power", range(-149, 128, 12))
def test_magnitudes_of_every_size_are_coded_alike(power):
    """Scales, powers and codes of groups about 2^power: the guesses of logarithms are corrected everywhere."""
    generator = torch.Generator().manual_seed(power)
    spread = 2.0 ** (torch.rand(500, 1, generator=generator) * 120)
    groups = (
        torch.randn(500, 128, generator=generator).double().sign()
        * spread ** torch.rand(500, 128, generator=generator).double()
    )
    groups = (groups * 2.0**power).clamp(-1e38, 1e38).float()
    outcomes = []
    for device, step in ((CUDA, step_on_device), (CPU, step_in_torch)):
        count, total = len(groups), groups.numel()
        moments = tuple(
            StoredMoment(
                torch.zeros(total, dtype=torch.uint8, device=device),
                torch.zeros(count, dtype=torch.bfloat16, device=device),
                torch.zeros(count, dtype=torch.uint8, device=device),
                by,
            )
            for by in formats_of("coat", device)
        )
        # β₁ = 0: the first moment is the gradient itself
        numbers = numbers_of(1, 1e-3, (0.0, 0.95), 1e-8, 0.0)
        step(torch.zeros(total, device=device), groups.view(-1).to(device), moments, numbers)
        outcomes.append([part.cpu().float() for part in parts_of(moments)])
    for left, right in zip(*outcomes, strict=True):
        assert same_bits(left, right)


def test_states_saved_on_the_cpu_go_on_on_cuda_with_equal_bits():
    def trained_on(device: torch.device, weights: torch.Tensor, states, steps: range):
        parameters = {"w": Parameter(weights.to(device, copy=True))}
        optimizer = build_optimizer(CONFIG, parameters, lambda name, parameter: True)
        load_optimizer_tensors(CONFIG, optimizer, parameters, states)
        for step in steps:
            gradient = torch.randn(weights.shape, generator=torch.Generator().manual_seed(step))
            parameters["w"].grad = gradient.to(device)
            optimizer.step()
        tensors = optimizer_tensors(optimizer, parameters)
        return parameters["w"].detach().cpu(), {name: tensor.cpu() for name, tensor in tensors.items()}

    start = torch.randn(129, 77, generator=torch.Generator().manual_seed(99))
    weights, states = trained_on(CPU, start, {}, range(3))
    expected_weights, expected = trained_on(CPU, weights, states, range(3, 6))
    got_weights, got = trained_on(CUDA, weights, states, range(3, 6))
    assert_weights_agree(got_weights, expected_weights, 3 * 5e-3, 3)
    assert got.keys() == expected.keys()
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def test_the_host_does_not_wait():
    parameter = Parameter(torch.ones(1 << 20, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = build_optimizer(CONFIG, {"w": parameter}, lambda name, each: True)
    optimizer.step()
    with host_must_not_wait():
        optimizer.step()
