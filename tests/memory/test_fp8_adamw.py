"""The FP8 optimizer: against torch's AdamW, against the paper's formulas, over every shape, and across checkpoints."""

from functools import partial
from itertools import product

import pytest
import torch
from support.adamw_checks import distances
from support.fp8_adamw_reference import step_reference
from support.fp8_moments import FORMATS, Trained, awkward_groups, same_bits, step_on_groups
from support.samples import normal
from torch.nn import Parameter

from tahq.memory.coat.fp8_adamw import CHUNK_GROUPS, Fp8AdamW, step_in_torch
from tahq.memory.coat.fp8_adamw_cpu import step_on_cpu
from tahq.memory.coat.fp8_groups import GROUP
from tahq.memory.config import Fp8AdamWConfig
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.optimizer import optimizer_nbytes

RATES = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
DEFAULT = Fp8AdamWConfig()
OTHERS = [
    Fp8AdamWConfig(expand_first=False, expand_second=False),
    Fp8AdamWConfig(first="e5m2", expand_second=False),
    Fp8AdamWConfig(second="e5m2", expand_first=False),
]


def fp8(stored, parameters):
    return Fp8AdamW(parameters, stored, **RATES)


@pytest.mark.parametrize("shape", [1, 127, 128, 4097, (5, 3, 129)], ids=str)
def test_first_step_equals_torchs_adamw(shape):
    """Moments are zero before, and used before they are quantised: 8 operations, each rounded by 2⁻²⁴ relative."""
    errors, _ = distances(partial(fp8, DEFAULT), shape, RATES, normal, steps=1)
    assert errors.max() * RATES["lr"] <= 8 * 2.0**-24 * normal(shape, 0).abs().max()


@pytest.mark.parametrize(
    ("shape", "scale"), [(1, 1.0), (127, 1e6), (128, 1e-6), (4097, 1e6), ((33, 77), 1.0), ((5, 3, 129), 1e-6)], ids=str
)
def test_fifty_steps_stay_near_torchs_adamw(shape, scale):
    """How far rounding of moments may move the weights, E4M3 with both moments expanded.

    A group of 128 Gaussian gradients has R = max/min of |m| of some 500, so k ≈ 12.3/ln 500 ≈ 2, and the half step of
    E4M3, 2⁻⁴, is q = 2⁻⁴/2 = 3.1 % of a value at most (for normal codes), q/√3 = 1.8 % on average; v, an average
    of 20 squares, has R ≈ 10, k ≈ 5 and half a percent. Roundings are independent, and the moment passes them on with
    β₁: the error of m is 1.8 %·β₁/√(1 − β₁²) = 3.7 % of m, that of √v 0.7 %·β₂/√(1 − β₂²)/2 ≈ 1 %. So an update, η·|u|
    with |u| ≈ 0.25 on average, is wrong by 0.04·η·0.25 = 0.01·η; errors last for 1/(1 − β₁) = 10 steps, so 50 of them
    add up to about √(50·10·2)·0.01·η = 0.3·η. Bounds: that in the mean, and six times that at most
    for the thousands of weights (normal: 4 σ, and the smallest of a group have subnormal codes).
    """
    errors, _ = distances(partial(fp8, DEFAULT), shape, RATES, lambda shape, step: scale * normal(shape, step))
    assert errors.mean() < 0.3
    assert errors.max() < 1.8


@pytest.mark.parametrize("stored", OTHERS, ids=str)
def test_every_format_learns_as_torchs_adamw_does(stored):
    """Half a step of E5M2 is 2⁻³, and not divided by k without expansion: 7 % on average, four times as above."""
    errors, _ = distances(partial(fp8, stored), (64, 65), RATES, normal)
    assert errors.mean() < 1.2


@pytest.mark.parametrize("step", [step_in_torch, step_on_cpu])
@pytest.mark.parametrize(
    ("numel", "formats", "scale"),
    [
        *product([1, 127, 128, 33 * 77, CHUNK_GROUPS * GROUP + 5], FORMATS, [1e-3]),
        # v is subnormal, or 0, below 10⁻¹⁹; near 10¹⁹ it is near the largest fp32.
        *product([4097], ["coat"], [0.0, 1e-30, 1e-22, 1e-19, 1e15]),
    ],
)
def test_steps_equal_the_formulas_to_the_bit_and_write_nothing_else(step, numel, formats, scale):
    got = Trained(step, numel, formats).take_steps(range(1, 4), scale)
    expected = Trained(step_reference, numel, formats).take_steps(range(1, 4), scale)
    for left, right in zip(got.tensors(), expected.tensors(), strict=True):
        assert left.isfinite().all()
        assert torch.equal(left, right)
    got.assert_nothing_else_was_written()


@pytest.mark.parametrize("formats", FORMATS)
def test_compiled_step_agrees_on_groups_of_every_sort(formats):
    groups = torch.cat(list(awkward_groups(2).values()))
    compiled, plain = (step_on_groups(step, groups, formats) for step in (step_on_cpu, step_in_torch))
    assert all(map(same_bits, compiled, plain))


@pytest.mark.parametrize("stored", [DEFAULT, *OTHERS], ids=str)
def test_states_have_two_bytes_per_parameter_and_six_per_group(stored):
    config = TrainingConfig(steps=10, optimizer="fp8_adamw", fp8_adamw=stored)
    num_powers = stored.expand_first + stored.expand_second
    assert optimizer_nbytes(config, [(3, 100), (1,)]) == 2 * 301 + 4 * (2 * 2 + num_powers)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30], ids=str)
def test_moments_that_are_not_finite_are_stored_as_nan_and_spoil_no_neighbour(bad):
    """10³⁰ squared is beyond fp32. The engine skips steps with NaN; a state that has one shows in the next loss."""
    parameter = Parameter(torch.ones(300))
    optimizer = fp8(DEFAULT, [parameter])
    parameter.grad = torch.ones(300)
    parameter.grad[7] = bad
    optimizer.step()
    optimizer.step()
    assert parameter.isnan().nonzero().flatten().tolist() == [7]
    assert optimizer.state[parameter]["exp_avg_sq"][7] & 0x7F == 0x7F


def test_half_precision_is_refused():
    with pytest.raises(ValueError, match=r"takes parameters in torch\.float32, got one in torch\.bfloat16"):
        fp8(DEFAULT, [Parameter(torch.ones(3).bfloat16())])
