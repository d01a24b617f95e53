"""Our AdamWs on a CUDA device: runs that move there, resume, and wait for nothing."""

import pytest
import torch
from support.device_waits import host_must_not_wait
from support.samples import normal
from torch.nn import Parameter

from tahq.memory.adam import loop
from tahq.memory.adam.blockwise8 import decode, encode
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("signed", [True, False])
def test_the_quantiser_in_plain_torch_gives_the_same_codes_on_the_device(signed):
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) ** 3
    x = x if signed else x.abs()
    coded, on_device = encode(x, signed), encode(x.cuda(), signed)
    for left, right in zip((*coded, decode(*coded, signed)), (*on_device, decode(*on_device, signed)), strict=True):
        assert torch.equal(left, right.cpu())


SHAPES = {"matrix": (333, 77), "norm": (127,), "unused": (5000,)}
KEYS = [{"optimizer": name, "adamw8bit": {"min_elements": 500}} for name in ("adamw8bit", "adamw_bf16", "fp8_adamw")]
EVERY = [*KEYS, {"optimizer": "adamw"}]
"""adamw on a CPU is torch's own."""


def train(parameters, optimizer, steps):
    for step in steps:
        for seed, (name, parameter) in enumerate(parameters.items()):
            gradient = None if name == "unused" else normal(parameter.shape, 100 * step + seed)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        optimizer.step()


def built(keys, device, weights):
    parameters = {name: Parameter(weight.to(device, copy=True)) for name, weight in weights.items()}
    config = TrainingConfig(steps=10, lr=1e-2, **keys)
    return config, parameters, build_optimizer(config, parameters, lambda name, parameter: parameter.ndim > 1)


every_optimizer = pytest.mark.parametrize("keys", EVERY, ids=lambda keys: keys["optimizer"])


def continued(keys, device):
    """Three steps on a device, three more there and on CUDA: parameters and states of both."""
    _, parameters, optimizer = built(keys, device, {name: normal(shape, 7) for name, shape in SHAPES.items()})
    train(parameters, optimizer, range(3))
    config, moved, other = built(keys, "cuda", {name: weight.detach() for name, weight in parameters.items()})
    states = {name: state.clone() for name, state in optimizer_tensors(optimizer, parameters).items()}
    load_optimizer_tensors(config, other, moved, states)
    for each, its in ((parameters, optimizer), (moved, other)):
        train(each, its, range(3, 6))
    return parameters, moved, optimizer_tensors(optimizer, parameters), optimizer_tensors(other, moved)


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: keys["optimizer"])
def test_states_of_the_cpu_go_on_on_the_device(keys):
    """Moments to the bit; weights to 2⁻²⁰ of a change, a rate, in each of three steps, and their own roundings."""
    parameters, moved, states, on_device = continued(keys, "cpu")
    assert states.keys() == on_device.keys()
    assert [name for name in states if not torch.equal(states[name], on_device[name].cpu())] == []
    for name in SHAPES:
        torch.testing.assert_close(moved[name].cpu(), parameters[name], rtol=3 * 2**-23, atol=3 * 1e-1 * 2**-20)


@every_optimizer
def test_resuming_on_the_device_is_exact_to_the_bit(keys):
    parameters, resumed, _, _ = continued(keys, "cuda")
    assert [name for name in SHAPES if not torch.equal(parameters[name], resumed[name])] == []


@every_optimizer
def test_a_step_does_not_wait_for_the_device(keys):
    _, parameters, optimizer = built(keys, "cuda", {name: normal(shape, 7) for name, shape in SHAPES.items()})
    train(parameters, optimizer, range(2))
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    with host_must_not_wait():
        optimizer.step()


@every_optimizer
def test_side_by_side_on_streams_as_one_by_one(keys, monkeypatch):
    """Gradients made just before a step and weights read just after it, in the caller's stream."""

    def trained() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        start = {str(number): normal((1 << 18 + number % 4,), number) for number in range(12)}
        _, parameters, optimizer = built(keys, "cuda", start)
        sums = []
        for step in range(6):
            for number, parameter in enumerate(parameters.values()):
                generator = torch.Generator("cuda").manual_seed(100 * step + number)
                parameter.grad = torch.randn(parameter.shape, generator=generator, device=CUDA)
            optimizer.step()
            sums += [parameter.detach().sum() for parameter in parameters.values()]
        return torch.stack(sums), {name: parameter.detach() for name, parameter in parameters.items()}

    sums, weights = trained()
    monkeypatch.setattr(loop, "_dealt_out", lambda tasks, count: [list(tasks), *[[] for _ in range(count - 1)]])
    expected_sums, expected = trained()
    assert torch.equal(sums, expected_sums)
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


def test_adamw_is_torchs():
    """Fifty steps apart by roundings: of moments, 2⁻²³ of an update a step at most, and of weights of magnitude 4."""
    start = {name: normal(shape, 7) for name, shape in SHAPES.items()}
    config, parameters, optimizer = built({"optimizer": "adamw"}, "cuda", start)
    expected = {name: Parameter(weight.cuda()) for name, weight in start.items()}
    decays = {True: config.weight_decay, False: 0.0}
    groups = [{"params": [each], "weight_decay": decays[each.ndim > 1]} for each in expected.values()]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=config.betas, eps=config.epsilon, foreach=False)
    train(parameters, optimizer, range(50))
    train(expected, reference, range(50))
    for name, weight in expected.items():
        torch.testing.assert_close(parameters[name], weight, rtol=0, atol=50 * (1e-1 * 2**-20 + 2**-22))
