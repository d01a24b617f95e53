"""Weights in bf16: stochastic rounding to its numbers."""

import math

import pytest
import torch

from tahq.memory.galore.stored_weight import FullWeight, round_to_bf16
from tahq.randomness import derive_seed

CPU = torch.device("cpu")


def stored(values: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> FullWeight:
    weight = FullWeight(tuple(values.shape), CPU, dtype)
    weight.assign(values)
    return weight


def test_mean_of_ten_to_the_five_stochastic_roundings_is_the_value():
    num_draws, values = 10**5, torch.randn(64, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(64, dtype=torch.float64)
    for part in range(num_draws // 1000):
        weight = stored(torch.zeros(64 * 1000))
        weight.add(values.repeat(1000), keep=1.0, rate=1.0, key=derive_seed(9, part))
        total += weight.values.double().view(1000, 64).sum(0)
    # a draw is at most half a step's standard deviation off; five of them over √10⁵. A step is 2⁻⁷ of a power of two.
    step = torch.exp2(values.double().abs().log2().floor() - 7)
    assert bool(((total / num_draws - values.double()).abs() < 5 * 0.5 * step / math.sqrt(num_draws)).all())


def test_a_number_becomes_one_of_its_two_neighbours():
    x = torch.randn(5000, generator=torch.Generator().manual_seed(2))
    rounded, nearest = round_to_bf16(x, 0, 5), x.bfloat16().float()
    assert torch.equal(rounded.bfloat16().float(), rounded)
    assert bool(((rounded - x).abs() < 2.0**-7 * x.abs()).all())
    assert not torch.equal(rounded, nearest)


def test_all_2_to_the_16_draws_together_give_the_share_exactly():
    """Draws are uniform; of 65,536 different ones, as many round up as the bits that are lost say."""
    x = torch.tensor([1.0 + 2.0**-7 * 0.3125])  # 0.3125 of the way to the next number in bf16
    draws = torch.arange(2**16, dtype=torch.int32)
    up = (x.view(torch.int32) + draws).bitwise_and_(-(2**16)).view(torch.float32) > 1.0
    assert int(up.sum()) == 0.3125 * 2**16
    share = float((round_to_bf16(x.repeat(2**16), 0, 3) > 1.0).float().mean())
    assert share == pytest.approx(0.3125, abs=5 * 0.5 / 2**8)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.5, 2.0**-133, 3.3895313892515355e38, math.inf, -math.inf])
def test_what_bf16_has_stays(value):
    x = torch.full((1000,), value)
    assert torch.equal(round_to_bf16(x, 0, 1).view(torch.int32), x.view(torch.int32))


def test_nan_stays_nan():
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32)
    weight = stored(torch.zeros(4))
    weight.add(bits.view(torch.float32), keep=1.0, rate=1.0, key=7)
    assert bool(weight.values.isnan().all())


def test_small_updates_survive_stochastic_rounding_and_not_rounding_to_nearest():
    """A thousandth of a step, two thousand times: two steps on average, or none."""
    moved = {}
    for key in (True, False):
        weight = stored(torch.ones(4096))
        for index in range(2000):
            update = torch.full((4096,), 2.0**-7 / 1000)
            weight.add(update, keep=1.0, rate=1.0, key=derive_seed(1, index) if key else None)
        moved[key] = float((weight.values.float() - 1).mean()) * 2**7
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(2.0, abs=0.1)  # four standard deviations, as with INT8


def test_draws_depend_on_the_key_and_the_place_alone(monkeypatch):
    values, update = torch.randn(700, generator=torch.Generator().manual_seed(2)), torch.full((700,), 1e-3)

    def after(key: int) -> torch.Tensor:
        weight = stored(values)
        weight.add(update, keep=0.999, rate=-1.0, key=key)
        return weight.values

    whole = after(5)
    assert not torch.equal(whole, after(6))
    assert not torch.equal(whole, after(5 + 2**32))
    monkeypatch.setattr("tahq.memory.galore.stored_weight._SLAB", 64)
    assert torch.equal(whole, after(5))


def test_fp32_draws_nothing():
    values, update = torch.randn(100), torch.randn(100)
    drawn, plain = stored(values, torch.float32), stored(values, torch.float32)
    drawn.add(update, keep=0.9, rate=-0.1, key=3)
    plain.add(update, keep=0.9, rate=-0.1, key=None)
    assert torch.equal(drawn.values, plain.values)
