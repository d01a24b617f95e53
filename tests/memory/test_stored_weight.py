"""Stored weights: the error of INT8 codes, and the mean of stochastic roundings to INT8 and bf16."""

import math

import pytest
import torch
from support.samples import normal

from tahq.memory.galore.stored_weight import FullWeight, Int8Weight
from tahq.quant.stochastic_rounding import round_to_bf16
from tahq.randomness import derive_seed

CPU = torch.device("cpu")
SHAPES = [(1,), (127,), (256,), (257,), (4097,), (1, 700), (33, 65), (513, 3)]
BF16 = torch.bfloat16


def stored(values: torch.Tensor, kind: str = "int8") -> Int8Weight | FullWeight:
    weight = Int8Weight(values.shape, CPU) if kind == "int8" else FullWeight(values.shape, CPU, BF16)
    weight.assign(values)
    return weight


def decoded(values: torch.Tensor) -> torch.Tensor:
    return stored(values).decoded(torch.float32)


def groups(values: torch.Tensor) -> torch.Tensor:
    """[G, 256], the last one filled up with zeros, which the range includes anyway."""
    flat = values.flatten()
    return torch.cat([flat, flat.new_zeros(-flat.numel() % 256)]).view(-1, 256)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_at_most_half_a_step_for_any_shape(shape):
    values = normal(shape, seed=3)
    error = groups((decoded(values) - values).double()).abs().amax(1)
    rows = groups(values).double()
    width = rows.amax(1).clamp(min=0) - rows.amin(1).clamp(max=0)
    # a step is the range over 240, up to 2⁻⁷ larger for being rounded up to bf16; fp32's division adds 127·2⁻²⁴ steps
    assert (error <= width / 240 * (0.5 * (1 + 2**-7) + 1e-4)).all()
    assert decoded(values).shape == torch.Size(shape)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e30, -1e-30, 3e38])
def test_constant_groups_come_back_within_half_a_step(value):
    """Their range includes 0, so all steps lie on one side of it."""
    found = decoded(torch.full((300,), value))
    assert torch.equal(found, found[:1].expand(300))
    assert abs(float(found[0]) - value) <= abs(value) / 240


def test_range_of_the_largest_numbers_does_not_overflow():
    limit = torch.finfo(torch.float32).max
    found = decoded(torch.tensor([limit * 0.99, -limit * 0.99]))
    assert found.isfinite().all()
    assert found[0] > 0.98 * limit


def test_groups_of_every_size_may_be_beside_each_other():
    scales = torch.tensor([1e-34, 1e-20, 1.0, 1e20, 1.6e38, 0.0])
    values = torch.linspace(-1, 1, 256)[None] * scales[:, None]
    found = decoded(values.flatten()).view(6, 256)
    assert found.isfinite().all()
    error = (found.double() - values.double()).abs().amax(1)
    assert (error <= scales.double() * 2 / 240 * 0.51).all()
    assert (found[-1] == 0).all()


@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_mean_of_stochastic_roundings_is_the_value(kind):
    """Of each element, the largest and smallest of an INT8 group included: none may be clamped."""
    num_draws, values = 10**4, normal(256, seed=1)
    values[3], values[200] = 4.2, -3.9
    total = torch.zeros(256, dtype=torch.float64)
    for part in range(num_draws // 100):
        weight = stored(torch.zeros(256 * 100), kind)
        weight.add(values.repeat(100), keep=1.0, rate=1.0, key=derive_seed(9, part))
        total += weight.decoded(torch.float32).double().view(100, 256).sum(0)
    # a step of bf16 is 2⁻⁷ of a power of two
    step = weight.scale[0].double() if kind == "int8" else torch.exp2(values.double().abs().log2().floor() - 7)
    # a draw is at most half a step's standard deviation off; five of them over √10⁴, and 2⁻²⁴ of u's grain
    assert ((total / num_draws - values.double()).abs() < 5 * 0.5 * step / num_draws**0.5 + step * 2**-20).all()


@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_small_updates_survive_only_stochastic_rounding(kind):
    """A 250th of a step, 500 times: two steps on average, or none."""
    values = torch.zeros(4096) if kind == "int8" else torch.ones(4096)
    values[::256], values[1::256] = 1.0, -1.0
    step = 2 / 240 * (1 + 2**-8) if kind == "int8" else 2.0**-7
    update = torch.full((4096,), step / 250)
    update[::256] = update[1::256] = 0.0
    for is_stochastic, expected in ((False, 0.0), (True, 2.0)):
        weight = stored(values, kind)
        for index in range(500):
            weight.add(update, keep=1.0, rate=1.0, key=derive_seed(1, index) if is_stochastic else None)
        moved = float((weight.decoded(torch.float32) - values).view(16, 256)[:, 2:].mean()) / step
        # 4,064 elements, each a sum of 500 draws of variance below a 250th of a step²: 1.4/√4064, times four
        assert moved == pytest.approx(expected, abs=0.1 if is_stochastic else 0.0)


@pytest.mark.parametrize("key", [None, 3])
def test_an_update_of_zero_changes_nothing(key):
    weight = stored(normal(700, seed=6))
    before = {name: tensor.clone() for name, tensor in weight.tensors().items()}
    weight.add(torch.zeros(700), keep=1.0, rate=-1.0, key=key)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weight.tensors().items())


def test_a_group_that_grows_or_shrinks_gets_a_grid_that_fits():
    values = torch.linspace(-1, 1, 256)
    for factor in (1.5, 40.0, 1e6, 0.5, 1e-5):
        weight = stored(values)
        weight.add(values, keep=0.0, rate=factor, key=None)
        error = (weight.decoded(torch.float32) - factor * values).abs().max()
        assert error <= factor * 2 / 240 * 0.51 / 0.75
    weight = stored(values)
    weight.add(values, keep=1.0, rate=0.03, key=None)  # within the spare codes
    assert torch.equal(weight.scale, stored(values).scale)


@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_draws_depend_on_the_key_and_the_place_alone(kind, monkeypatch):
    values, update = normal(1500, seed=4) * 0.01, torch.full((1500,), 1e-5)

    def after(key: int) -> list[torch.Tensor]:
        weight = stored(values, kind)
        weight.add(update, keep=0.999, rate=-1.0, key=key)
        return list(weight.tensors().values())

    whole = after(5)
    assert not torch.equal(whole[0], after(6)[0])
    assert not torch.equal(whole[0], after(5 + 2**32)[0])
    monkeypatch.setattr("tahq.memory.galore.stored_weight._SLAB", 512)
    assert all(torch.equal(*pair) for pair in zip(whole, after(5), strict=True))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.5, 2.0**-133, 3.3895313892515355e38, math.inf, -math.inf])
def test_values_exact_in_bf16_are_kept(value):
    x = torch.full((1000,), value)
    assert torch.equal(round_to_bf16(x, 0, 1).view(torch.int32), x.view(torch.int32))


def test_nan_stays_nan():
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32)
    weight = stored(torch.zeros(4), "bf16")
    weight.add(bits.view(torch.float32), keep=1.0, rate=1.0, key=7)
    assert weight.values.isnan().all()
