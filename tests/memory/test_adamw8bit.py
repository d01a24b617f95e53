"""`adamw8bit` and `adamw_bf16` in plain torch, against torch's AdamW and against themselves."""

import pytest
import torch
from torch.nn import Parameter

from tahq.memory.adam.adamw import AdamW8bit, PlainAdamW, adamw8bit_states
from tahq.memory.adam.blockwise8 import decode, encode
from tahq.memory.adam.loop import states_nbytes
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.update.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors

RATE = 1e-2
RATES = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(), (1,), (127,), (128,), (4097,), (33, 77), (1, 301), (5, 7, 11)]


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient(shape, step):
    """Noise of 1 around a direction of its own for each element."""
    return normal(shape, 99) + normal(shape, step + 1)


def all_coded(parameters, **keys):
    return AdamW8bit(parameters, min_elements=0, **RATES, **keys)


def bf16(parameters):
    return PlainAdamW(parameters, moments=torch.bfloat16, **RATES)


def distances(build, shape):
    """After fifty steps: |x − x of torch's AdamW|, and the way that the latter went, both in rates."""
    ours, theirs = Parameter(normal(shape, 0)), Parameter(normal(shape, 0))
    optimizer, reference = build([ours]), torch.optim.AdamW([theirs], foreach=False, **RATES)
    way = torch.zeros(shape)
    for step in range(50):
        before = theirs.detach().clone()
        ours.grad, theirs.grad = gradient(shape, step), gradient(shape, step)
        optimizer.step()
        reference.step()
        way += (theirs.detach() - before).abs()
    return (ours - theirs).abs() / RATE, way / RATE


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [64, 256])
def test_fifty_steps_stay_near_torchs_adamw(shape, block):
    """An error e of m moves x by 10·η·e/√v in all, since m keeps 0.9 of it. The largest cell is 0.9/64 of the scale.

    Mean: on average e is a quarter of a cell, and the scale three times a mean |m|: 1 % of m; errors of about ten
    steps add up, independently, to 2.3 times that, those of √v to a third of it: 3 % of an update. Fifty
    steps are five times ten, so what remains of the way is 3 %/√5 = 1.3 %.
    Largest: a cell has the standard deviation 0.9/64/√12 = 0.004 of the scale, itself at most 3.5·√v here: fifty
    of them, √50 · 10 · 0.004 · 3.5 = 1.0; among thousands of elements one is 4.3 times that.
    """
    errors, way = distances(lambda parameters: all_coded(parameters, block=block), shape)
    assert errors.mean() <= 2 * 0.013 * way.mean()
    assert errors.max() <= 4.3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fifty_steps_with_bf16_moments_stay_near_torchs_adamw(shape):
    """As above, with errors relative to m: at most 2⁻⁹, on average below half of it.

    Mean: 0.1 % of m, 2.3 times that in ten steps, the error of √v on top: 0.3 % of an update. Largest: |m| ≤ 2·√v,
    so √50 · 10 · 2 · 2⁻⁹/√3 = 0.16, 4.3 times that.
    """
    errors, way = distances(bf16, shape)
    assert errors.mean() <= 0.003 * way.mean()
    assert errors.max() <= 4.3 * 0.16


def test_fifty_steps_of_small_parameters_are_torchs_but_for_rounding():
    """A step is about ten roundings of 2⁻²⁴ of weights up to 4; fifty of them, in rates."""
    errors, _ = distances(lambda parameters: AdamW8bit(parameters, **RATES), (4095,))
    assert errors.max() <= 50 * 10 * 2**-24 * 4 / RATE


def one_step(value, **keys):
    """State and weight, from 0, after a step with this gradient everywhere."""
    parameter = Parameter(torch.zeros(300))
    optimizer = all_coded([parameter], **keys)
    parameter.grad = torch.full((300,), value)
    optimizer.step()
    return optimizer.state[parameter], parameter.detach()


@pytest.mark.parametrize("value", [1e-15, 1e-3, 1.0, 1e15])
def test_the_first_step_of_a_constant_gradient_is_a_rate_long(value):
    """m̂/√v̂ is 1 but for roundings, about eight of 2⁻²⁴; ε counts where g is small."""
    _, weight = one_step(value)
    expected = -RATE * value / (value + 1e-8)
    torch.testing.assert_close(weight, torch.full((300,), expected), rtol=8 * 2**-24, atol=0)


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
    state = optimizer.state[parameter]
    assert state["exp_avg_sq_scale"].isnan().tolist() == [False, True]
    assert parameter.isfinite().all()


def test_the_weight_moves_by_moments_that_are_not_rounded_yet():
    parameter = Parameter(torch.zeros(256))
    optimizer = all_coded([parameter])
    parameter.grad = normal((256,), 3)
    expected = Parameter(torch.zeros(256))
    reference = torch.optim.AdamW([expected], foreach=False, **RATES)
    expected.grad = parameter.grad.clone()
    optimizer.step()
    reference.step()
    torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=0)  # the first step has no rounding before it
    codes, scales = encode(0.1 * parameter.grad, True)
    state = optimizer.state[parameter]
    assert (state["exp_avg"].int() - codes.int()).abs().max() <= 1  # 0.1·g may be rounded otherwise in its last bit
    torch.testing.assert_close(state["exp_avg_scale"], scales)


@pytest.mark.parametrize(
    "build",
    [all_coded, bf16],
    ids=["8bit", "bf16"],
)
def test_a_parameter_without_a_gradient_has_states_and_stays(build):
    used, unused = Parameter(normal((300,), 0)), Parameter(normal((300,), 1))
    optimizer = build([used, unused])
    used.grad = gradient((300,), 0)
    optimizer.step()
    assert torch.equal(unused, normal((300,), 1))
    assert optimizer.state[unused].keys() == optimizer.state[used].keys()
    assert (optimizer.state[unused]["step"], optimizer.state[used]["step"]) == (0, 1)
    unused.grad = gradient((300,), 0)
    optimizer.step()
    alone = Parameter(normal((300,), 1))
    other = build([alone])
    alone.grad = gradient((300,), 0)
    other.step()
    assert torch.equal(unused, alone)


def test_blocks_do_not_look_at_each_other():
    whole, first, second = (Parameter(normal((1000,), 0)[part]) for part in (slice(None), slice(512), slice(512, None)))
    optimizer = all_coded([whole, first, second])
    for step in range(5):
        whole.grad = gradient((1000,), step)
        first.grad, second.grad = whole.grad[:512].clone(), whole.grad[512:].clone()
        optimizer.step()
    assert torch.equal(whole, torch.cat([first, second]))


def test_slices_of_large_parameters_give_what_one_slice_gives(monkeypatch):
    def trained():
        parameter = Parameter(normal((5000,), 0))
        optimizer = all_coded([parameter])
        for step in range(3):
            parameter.grad = gradient((5000,), step)
            optimizer.step()
        return parameter.detach()

    expected = trained()
    monkeypatch.setattr("tahq.memory.adam.step.SLICE", 512)
    assert torch.equal(trained(), expected)


def test_weights_and_gradients_of_odd_strides():
    straight, turned = Parameter(normal((40, 30), 0)), Parameter(normal((40, 30), 0).t().contiguous().t())
    optimizer = all_coded([straight, turned])
    for step in range(3):
        straight.grad = gradient((40, 30), step)
        turned.grad = gradient((40, 30), step).t().contiguous().t()
        optimizer.step()
    assert torch.equal(straight, turned)


KEYS = [
    {"optimizer": "adamw8bit", "adamw8bit": {"min_elements": 0}},
    {"optimizer": "adamw8bit", "adamw8bit": {"min_elements": 500, "block": 64}},
    {"optimizer": "adamw_bf16"},
]


@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_resuming_from_states_is_exact_to_the_bit(keys):
    config = TrainingConfig(steps=10, lr=RATE, **keys)

    def built(weights):
        parameters = {name: Parameter(weight.clone()) for name, weight in weights.items()}
        return parameters, build_optimizer(config, parameters, lambda name, parameter: parameter.ndim > 1)

    def train(parameters, optimizer, steps):
        for step in steps:
            for name, parameter in parameters.items():
                parameter.grad = None if name == "unused" else gradient(parameter.shape, step)
            optimizer.step()

    start = {"matrix": normal((33, 77), 0), "norm": normal((127,), 1), "unused": normal((600,), 2)}
    parameters, optimizer = built(start)
    train(parameters, optimizer, range(3))
    resumed, other = built({name: parameter.detach() for name, parameter in parameters.items()})
    states = {name: state.clone() for name, state in optimizer_tensors(optimizer, parameters).items()}
    load_optimizer_tensors(config, other, resumed, states)
    train(parameters, optimizer, range(3, 7))
    train(resumed, other, range(3, 7))
    for name in start:
        assert torch.equal(resumed[name], parameters[name])
    states, others = optimizer_tensors(optimizer, parameters), optimizer_tensors(other, resumed)
    assert states.keys() == others.keys()
    assert all(torch.equal(states[name], others[name]) for name in states)


def test_bytes_of_a_large_parameter():
    assert states_nbytes(adamw8bit_states((4096, 4096))) == 4096 * 4096 * (2 + 8 / 256)
    assert states_nbytes(adamw8bit_states((2048,))) == 2048 * 8


def test_moments_after_training_are_those_of_fp32_to_half_a_cell():
    """One step from zero moments: the codes are those of (1 − β)·g and (1 − β)·g²."""
    state, _ = one_step(2.0)
    for name, signed, expected in (("exp_avg", True, 0.2), ("exp_avg_sq", False, 0.2)):
        values = decode(state[name], state[f"{name}_scale"], signed, (300,))
        torch.testing.assert_close(values, torch.full((300,), expected), rtol=1e-6, atol=0)
