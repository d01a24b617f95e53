"""The FP8 optimizer on a CUDA device: its kernel gives the CPU's codes, and states go from one device to the other.

Codes, scales and powers are equal to the bit. A weight is not: its update is within 2⁻²¹ of the CPU's, relative, and
the sum is rounded once more.
"""

import pytest
import torch
from support.device_waits import host_must_not_wait
from support.fp8_moments import Trained, Unaligned, awkward_groups, moment_format, numbers_of, same_bits
from torch.nn import Parameter

from tahq.memory.coat.fp8_adamw import step_in_torch
from tahq.memory.coat.fp8_adamw_numba import step_on_cpu
from tahq.memory.coat.fp8_groups import E4M3, E5M2, StoredGroups, encode
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.update.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors

pytestmark = pytest.mark.gpu
WAYS = {
    "coat": ((E4M3, True), (E4M3, True)),
    "plain": ((E4M3, False), (E4M3, False)),
    "e5m2": ((E5M2, True), (E5M2, True)),
    "mixed": ((E5M2, False), (E4M3, True)),
}
every_way = pytest.mark.parametrize("way", WAYS)
CONFIG = TrainingConfig(steps=10, optimizer="fp8_adamw", lr=1e-3)


def formats_on(device: str, way: str):
    return tuple(moment_format(format, expand, device) for format, expand in WAYS[way])


def assert_weights_agree(got: torch.Tensor, expected: torch.Tensor, moved: float, steps: int) -> None:
    """Within 2⁻²¹ of what a weight moved by at most, and 2⁻²³ of itself a step (rounded to the other side)."""
    finite = expected.isfinite()
    assert torch.equal(got.isfinite(), finite)
    error = (got - expected).abs()[finite]
    assert (error <= 2.0**-21 * moved + steps * 2.0**-23 * expected[finite].abs()).all()


def step_on_device(*arguments) -> None:
    from tahq.memory.coat.fp8_adamw_kernels import step_on_cuda

    step_on_cuda(*arguments)


@every_way
@pytest.mark.parametrize("numel", [1, 127, 128, 4097, 33 * 77, 1 << 22])
def test_steps_are_the_cpus_to_the_bit_and_write_nothing_else(numel, way):
    expected = Trained(step_on_cpu, numel, formats_on("cpu", way)).take_steps(range(1, 4))
    for step in (step_on_device, step_in_torch):
        got = Trained(step, numel, formats_on("cuda", way), "cuda").take_steps(range(1, 4))
        (weights, *states), (expected_weights, *expected_states) = got.tensors(), expected.tensors()
        for left, right in zip(states, expected_states, strict=True):
            assert torch.equal(left, right), step.__name__
        # |m̂|/√v̂ ≤ max(1, (1 − β₁)/√(1 − β₂)) = 1 in the long run, below 5 in the first steps: three of 10⁻³
        assert_weights_agree(weights, expected_weights, 3 * 5e-3, 3)
        if step is step_in_torch:
            assert torch.equal(weights, expected_weights)
        got.assert_nothing_else_was_written()


def test_tensors_at_any_address():
    """After aligned ones of the same shape, for which a launch is kept."""
    formats = formats_on("cuda", "coat")
    expected = Trained(step_on_device, 4100, formats, "cuda").take_steps(range(1, 4))
    got = Unaligned(step_on_device, 4100, formats, "cuda").take_steps(range(1, 4))
    for left, right in zip(got.tensors(), expected.tensors(), strict=True):
        assert torch.equal(left, right)
    got.assert_nothing_else_was_written()


@every_way
def test_groups_of_every_sort(way):
    for sort, groups in awkward_groups().items():
        outcomes = []
        for device, step in (("cuda", step_on_device), ("cpu", step_on_cpu)):
            formats = formats_on(device, way)
            moments = []
            for x, by, on_cpu in zip((groups, groups.abs()), formats, formats_on("cpu", way), strict=True):
                codes, scales, powers = (part.to(device) for part in encode(x, on_cpu))
                moments.append(StoredGroups(codes.view(-1), scales, powers if by.expand else None))
            weights = torch.ones(groups.numel(), device=device)
            gradients = groups.flip(0).reshape(-1).to(device)
            numbers = numbers_of(2, 1e-3, (0.9, 0.95), 1e-8, 0.1)
            step(weights, gradients, tuple(moments), formats, numbers)
            kept = [part for moment in moments for part in (moment.codes, moment.scales, moment.powers)]
            outcomes.append([part.cpu().float() for part in kept if part is not None])
        for left, right in zip(*outcomes, strict=True):
            assert same_bits(left, right), sort


@pytest.mark.parametrize("power", range(-149, 128, 12))
def test_magnitudes_of_every_size(power):
    """Scales, powers and codes of groups about 2^power: the guesses of logarithms are corrected everywhere."""
    generator = torch.Generator().manual_seed(power)
    spread = 2.0 ** (torch.rand(500, 1, generator=generator) * 120)
    groups = (
        torch.randn(500, 128, generator=generator).double().sign()
        * spread ** torch.rand(500, 128, generator=generator).double()
    )
    groups = (groups * 2.0**power).clamp(-1e38, 1e38).float()
    outcomes = []
    for device, step in (("cuda", step_on_device), ("cpu", step_on_cpu)):
        formats = formats_on(device, "coat")
        count, total = len(groups), groups.numel()
        moments = tuple(
            StoredGroups(
                torch.zeros(total, dtype=torch.uint8, device=device),
                torch.zeros(count, dtype=torch.bfloat16, device=device),
                torch.zeros(count, dtype=torch.uint8, device=device),
            )
            for _ in range(2)
        )
        weights = torch.zeros(total, device=device)
        # β₁ = 0: the first moment is the gradient itself
        numbers = numbers_of(1, 1e-3, (0.0, 0.95), 1e-8, 0.0)
        step(weights, groups.view(-1).to(device), moments, formats, numbers)
        kept = [part for moment in moments for part in (moment.codes, moment.scales, moment.powers)]
        outcomes.append([part.cpu().float() for part in kept])
    for left, right in zip(*outcomes, strict=True):
        assert same_bits(left, right)


def test_states_saved_on_the_cpu_go_on_on_cuda_with_equal_bits():
    def trained_on(device: str, weights: torch.Tensor, states, steps: range):
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
    weights, states = trained_on("cpu", start, {}, range(3))
    expected_weights, expected = trained_on("cpu", weights, states, range(3, 6))
    got_weights, got = trained_on("cuda", weights, states, range(3, 6))
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
