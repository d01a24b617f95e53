"""`adamw8bit` and `adamw_bf16` in plain torch against torch's AdamW."""

from functools import partial

import pytest
import torch
from support.adamw_checks import distances
from support.samples import normal
from torch.nn import Parameter

from tahq.memory.adam.adamw import BlockwiseAdamW, adamw8bit_states, plain_adamw_states
from tahq.memory.adam.loop import states_nbytes

RATE = 1e-2
RATES = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(), (1,), (127,), (128,), (4097,), (33, 77), (5, 7, 11)]


def gradient(shape, step):
    """Noise of 1 around a direction of its own for each element."""
    return normal(shape, 99) + normal(shape, step + 1)


def all_coded(parameters, block=256):
    states = partial(adamw8bit_states, block=block, min_elements=0)
    return BlockwiseAdamW(parameters, states, block=block, **RATES)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [64, 256])
def test_fifty_steps_stay_near_torchs_adamw(shape, block):
    """An error e of m moves x by 10·η·e/√v in all, since m keeps 0.9 of it. The largest cell is 0.9/64 of the scale.

    Mean: on average e is a quarter of a cell, and the scale three times a mean |m|: 1 % of m; errors of about ten
    steps add up, independently, to 2.3 times that, those of √v to a third of it: 3 % of an update. Fifty
    steps are five times ten, so what remains of the path is 3 %/√5 = 1.3 %.
    Largest: a cell has the standard deviation 0.9/64/√12 = 0.004 of the scale, itself at most 3.5·√v here: fifty
    of them, √50 · 10 · 0.004 · 3.5 = 1.0; among thousands of elements one is 4.3 times that.
    """
    errors, path = distances(partial(all_coded, block=block), shape, RATES, gradient)
    assert errors.mean() <= 2 * 0.013 * path.mean()
    assert errors.max() <= 4.3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fifty_steps_with_bf16_moments_stay_near_torchs_adamw(shape):
    """As above, with errors relative to m: at most 2⁻⁹, on average below half of it.

    Mean: 0.1 % of m, 2.3 times that in ten steps, the error of √v on top: 0.3 % of an update. Largest: |m| ≤ 2·√v,
    so √50 · 10 · 2 · 2⁻⁹/√3 = 0.16, 4.3 times that.
    """
    states = partial(plain_adamw_states, dtype=torch.bfloat16)
    errors, path = distances(lambda parameters: BlockwiseAdamW(parameters, states, **RATES), shape, RATES, gradient)
    assert errors.mean() <= 0.003 * path.mean()
    assert errors.max() <= 4.3 * 0.16


def test_fifty_steps_of_small_parameters_are_torchs_except_for_rounding():
    """A step is about ten roundings of 2⁻²⁴ of weights up to 4; fifty of them, in rates."""
    build = partial(BlockwiseAdamW, states=adamw8bit_states, **RATES)
    errors, _ = distances(build, (4095,), RATES, gradient)
    assert errors.max() <= 50 * 10 * 2**-24 * 4 / RATE


def one_step(value):
    """State and weight, from 0, after a step with this gradient everywhere."""
    parameter = Parameter(torch.zeros(300))
    optimizer = all_coded([parameter])
    parameter.grad = torch.full((300,), value)
    optimizer.step()
    return optimizer.state[parameter], parameter.detach()


def test_zero_gradients_leave_zero_moments_and_no_step():
    state, weight = one_step(0.0)
    assert torch.equal(weight, torch.zeros(300))
    assert state["exp_avg"].eq(127).all()
    assert state["exp_avg_sq"].eq(0).all()
    assert state["exp_avg_scale"].tolist() == state["exp_avg_sq_scale"].tolist() == [0.0, 0.0]


def test_gradients_whose_square_vanishes_move_by_less_than_a_rate():
    """g² = 1e-44 is below normal numbers, so v is 0 in fp32 or stored as 0; ε = 1e-8 is what divides."""
    state, weight = one_step(1e-22)
    assert state["exp_avg_sq_scale"].tolist() == [0.0, 0.0]
    assert weight.isfinite().all()
    assert (weight.abs() < RATE * 1e-22 / 1e-8 * 1.001).all()


def test_gradients_whose_square_overflows_stop_their_own_block_only():
    parameter = Parameter(torch.ones(512))
    optimizer = all_coded([parameter])
    parameter.grad = torch.ones(512)
    parameter.grad[300] = 1e30  # g² is infinite: m/∞ = 0
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg_sq_scale"].isnan().tolist() == [False, True]
    assert parameter.isfinite().all()


def test_weights_move_by_the_moments_before_rounding():
    errors, path = distances(all_coded, (256,), RATES, gradient, steps=1)
    assert (errors <= 1e-5 * path + 2**-22 / RATE).all()  # the first step has no rounding before it


def test_blocks_do_not_affect_each_other():
    whole, first, second = (Parameter(normal((1000,), 0)[part]) for part in (slice(None), slice(512), slice(512, None)))
    optimizer = all_coded([whole, first, second])
    for step in range(5):
        whole.grad = gradient((1000,), step)
        first.grad, second.grad = whole.grad[:512].clone(), whole.grad[512:].clone()
        optimizer.step()
    assert torch.equal(whole, torch.cat([first, second]))


def test_result_does_not_depend_on_the_size_of_slices(monkeypatch):
    def trained():
        parameter = Parameter(normal((5000,), 0))
        optimizer = all_coded([parameter])
        for step in range(3):
            parameter.grad = gradient((5000,), step)
            optimizer.step()
        return parameter.detach()

    expected = trained()
    monkeypatch.setattr("tahq.memory.adam.adamw.SLICE", 512)
    assert torch.equal(trained(), expected)


def test_bytes_of_a_large_parameter():
    assert states_nbytes(adamw8bit_states((4096, 4096))) == 4096 * 4096 * (2 + 8 / 256)
    assert states_nbytes(adamw8bit_states((2048,))) == 2048 * 8
