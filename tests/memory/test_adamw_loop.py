"""What every AdamW of tahq promises whatever its states are; on CUDA, tests/gpu/test_adamw_kernels.py."""

import pytest
import torch
from support.samples import normal
from torch.nn import Parameter

from tahq.memory.adam import loop
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors

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
    optimizer = build_optimizer(config, {"a": straight, "b": turned}, lambda *_: True)
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
    monkeypatch.setattr("tahq.memory.adam.loop.find_spec", lambda name: triton)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert loop.has_ptx.__wrapped__(device_type) is expected
