"""AdamW in plain torch with moments in 8 bits, FP8 and bf16: its distance from torch's AdamW, and resuming."""

from functools import partial

import pytest
import torch
from support.adamw_checks import distances
from support.samples import normal
from torch.nn import Parameter

from tahq.memory.adam import loop
from tahq.memory.adam.adamw import BlockwiseAdamW, adamw8bit_states, plain_adamw_states
from tahq.memory.adam.loop import states_nbytes
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors

RATE = 1e-2
RATES = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(), (1,), (127,), (128,), (4097,), (33, 77), (5, 7, 11)]


def gradient(shape, step):
    """Noise of 1 around a different direction for each element."""
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


@pytest.mark.parametrize("value", [0.0, 1e-15, 1.0, 1e15])
def test_first_step_has_the_length_of_the_rate_with_a_constant_gradient(value):
    """m̂/√v̂ is 1 but for about eight roundings of 2⁻²⁴; ε counts where g is small."""
    parameter = Parameter(torch.zeros(300))
    optimizer = all_coded([parameter])
    parameter.grad = torch.full((300,), value)
    optimizer.step()
    expected = torch.full((300,), -RATE * value / (value + 1e-8))
    torch.testing.assert_close(parameter.detach(), expected, rtol=8 * 2**-24, atol=0)


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


CONFIGS = [
    TrainingConfig(steps=10, lr=1e-2, **keys)
    for keys in (
        {"optimizer": "adamw8bit", "adamw8bit": {"min_elements": 0}},
        {"optimizer": "adamw8bit", "adamw8bit": {"min_elements": 500, "block": 64}},
        {"optimizer": "adamw_bf16"},
        {"optimizer": "fp8_adamw"},
        {"optimizer": "fp8_adamw", "fp8_adamw": {"expand_first": False, "second": "e5m2"}},
    )
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=["8bit", "8bit of 64", "bf16", "fp8", "fp8 plain"])
START = {"matrix": normal((33, 77), 0), "norm": normal((127,), 1), "unused": normal((600,), 2)}


def built(config, weights):
    parameters = {name: Parameter(weight.detach().clone()) for name, weight in weights.items()}
    return parameters, build_optimizer(config, parameters, lambda name, parameter: parameter.ndim > 1)


def train(parameters, optimizer, steps):
    for step in steps:
        for name, parameter in parameters.items():
            parameter.grad = None if name == "unused" else normal(parameter.shape, 99) + normal(parameter.shape, step)
        optimizer.step()


@every_config
def test_resuming_from_states_is_exact_to_the_bit(config):
    parameters, optimizer = built(config, START)
    train(parameters, optimizer, range(3))
    resumed, other = built(config, parameters)
    states = {name: state.clone() for name, state in optimizer_tensors(optimizer, parameters).items()}
    load_optimizer_tensors(config, other, resumed, states)
    train(parameters, optimizer, range(3, 7))
    train(resumed, other, range(3, 7))
    assert [name for name in START if not torch.equal(resumed[name], parameters[name])] == []
    states, others = optimizer_tensors(optimizer, parameters), optimizer_tensors(other, resumed)
    assert states.keys() == others.keys()
    assert all(torch.equal(states[name], others[name]) for name in states)


@every_config
def test_parameter_without_a_gradient_has_states_and_does_not_change(config):
    parameters, optimizer = built(config, START)
    train(parameters, optimizer, range(2))
    used, unused = (optimizer.state[parameters[name]] for name in ("matrix", "unused"))
    assert torch.equal(parameters["unused"], START["unused"])
    assert unused.keys() - {"exp_avg_scale", "exp_avg_sq_scale"} <= used.keys()
    assert (unused["step"], used["step"]) == (0, 2)
    parameters["unused"].grad = START["unused"]
    optimizer.step()
    alone, other = built(config, {"unused": START["unused"]})
    alone["unused"].grad = START["unused"]
    other.step()
    assert torch.equal(parameters["unused"], alone["unused"])


@every_config
def test_weights_and_gradients_may_have_odd_strides(config):
    straight, turned = Parameter(normal((40, 30), 0)), Parameter(normal((40, 30), 0).t().contiguous().t())
    assert not turned.is_contiguous()
    optimizer = build_optimizer(config, {"a": straight, "b": turned}, lambda *_: True, drawn_as={"b": "a"})
    for step in range(3):
        straight.grad = normal((40, 30), step)
        turned.grad = normal((40, 30), step).t().contiguous().t()
        optimizer.step()
    assert torch.equal(straight, turned)


@pytest.mark.parametrize(
    ("device_type", "hip", "triton", "expected"),
    [("cuda", None, True, True), ("cpu", None, True, False), ("cuda", "6.4", True, False), ("cuda", None, None, False)],
)
def test_ptx_kernels_need_an_nvidia_device_and_triton(device_type, hip, triton, expected, monkeypatch):
    monkeypatch.setattr(loop, "has_triton", lambda: bool(triton))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert loop.has_ptx.__wrapped__(device_type) is expected
