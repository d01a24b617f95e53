"""AdamW with bf16 moments and weights: the mean of stochastic rounding, its draws, and what only it keeps."""

import pytest
import torch
from torch.nn import Parameter

from tahq.memory.adam.adamw import plain_adamw_states, step_in_torch
from tahq.memory.adam.loop import AdamwNumbers, new_states
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.optimizer import build_optimizer, optimizer_tensors

BF16, CPU = torch.bfloat16, torch.device("cpu")
START = torch.linspace(-1, 1, 900).to(BF16)
DECAY = {"lr": 1e-3, "weight_decay": 0.1, "epsilon": 1e6}
"""Only weight decay moves weights, by 10⁻⁴ per step."""
NUMBERS = AdamwNumbers.of({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, 3)


def stepped(dtype: torch.dtype, key: int | None = None, count: int = 10_000) -> dict[str, torch.Tensor]:
    """Equal weights, moments and gradients after a step; they are bf16 numbers before it."""
    state = new_states(plain_adamw_states((count,), dtype), CPU)
    for tensor, value in ((state["exp_avg"], 0.3), (state["exp_avg_sq"], 0.05)):
        tensor.fill_(torch.tensor(value, dtype=BF16).item())
    weight = torch.full((count,), -1.5, dtype=dtype)
    step_in_torch(weight, torch.full((count,), 0.123), state, NUMBERS, key=key)
    return {"weight": weight, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def test_mean_of_stochastic_roundings_is_the_exact_step():
    exact, nearest = stepped(torch.float32, count=1), stepped(BF16, count=1)
    drawn = stepped(BF16, key=2**40 + 17)
    ups = []
    for name, values in drawn.items():
        low, high = values.float().aminmax()
        assert low < exact[name] < high  # both neighbours are drawn
        share = (exact[name] - low) / (high - low)
        deviation = (share * (1 - share) / values.numel()).sqrt()
        assert abs((values.float() == high).float().mean() - share) < 4 * deviation
        assert abs(values.float().mean() - exact[name]) < 0.1 * abs(nearest[name].float() - exact[name])
        ups.append((values.float() == high).float())
    # no tensor's draws tell anything about another's
    assert (torch.corrcoef(torch.stack(ups)) - torch.eye(3)).abs().max() < 4 / 100


def trained(steps: int = 1, *, rounding: str = "stochastic", seed: int = 7, name: str = "w", **keys) -> dict:
    parameter = Parameter(START.clone().view(30, 30))
    parameter.grad_dtype = torch.float32
    config = TrainingConfig(optimizer="adamw_bf16", adamw_bf16={"weights": "bf16", "rounding": rounding}, **keys)
    optimizer = build_optimizer(config, {name: parameter}, lambda *_: True, seed)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(30, 30, generator=generator) if step == 0 else torch.zeros(30, 30)
        optimizer.step()
    states = optimizer_tensors(optimizer, {name: parameter})
    return {state.partition("/")[0]: tensor for state, tensor in states.items()} | {"weight": parameter.detach()}


def test_draws_are_a_function_of_seed_name_and_step():
    first = trained()
    for name, tensor in trained().items():
        assert torch.equal(tensor, first[name])
    for other in (trained(seed=8), trained(name="v")):
        assert not any(torch.equal(other[name], first[name]) for name in ("weight", "exp_avg", "exp_avg_sq"))
    # with the same draws in each step, weights that do not move in the first never would
    weights = [trained(steps, **DECAY)["weight"] for steps in (1, 2, 3)]
    moved = [int((weight.view(-1) != START).sum()) for weight in weights]
    assert 0 < moved[0] < moved[1] < moved[2]


def test_second_moment_decays_only_by_stochastic_rounding():
    """Without gradients, for 300 steps with β₂ = 0.999: by a factor of 0.74, in steps of a tenth of a percent."""
    before = trained(betas=(0.9, 0.999))["exp_avg_sq"].float()
    after, stalled = (
        trained(301, rounding=rounding, betas=(0.9, 0.999))["exp_avg_sq"].float()
        for rounding in ("stochastic", "nearest")
    )
    assert after.sum() / before.sum() == pytest.approx(0.999**300, rel=0.01)
    assert stalled.sum() / before.sum() > 0.99


def test_weights_take_updates_below_their_last_place_only_by_stochastic_rounding():
    decayed, stalled = (trained(300, rounding=rounding, **DECAY)["weight"] for rounding in ("stochastic", "nearest"))
    assert decayed.abs().float().sum() / START.abs().float().sum() == pytest.approx((1 - 1e-4) ** 300, rel=1e-3)
    assert torch.equal(stalled.view(-1), START)
