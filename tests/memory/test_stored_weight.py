"""Stored weights: the error of INT8 codes, and the mean of stochastic roundings to INT8 and bf16."""

import math

import pytest
import torch

from tahq.memory.galore.stored_weight import FullWeight, Int8Weight, round_to_bf16
from tahq.randomness import derive_seed

CPU = torch.device("cpu")
SHAPES = [(1,), (127,), (128,), (256,), (257,), (4097,), (1, 700), (33, 65), (513, 3)]


def stored(values: torch.Tensor) -> Int8Weight:
    weight = Int8Weight(tuple(values.shape), CPU)
    weight.assign(values)
    return weight


def groups(values: torch.Tensor) -> torch.Tensor:
    """[G, 256], the last one filled up with zeros, which the range includes anyway."""
    flat = values.flatten()
    return torch.cat([flat, flat.new_zeros(-flat.numel() % 256)]).view(-1, 256)


def range_of(values: torch.Tensor) -> torch.Tensor:
    """[G]: of each group, 0 included."""
    rows = groups(values).double()
    return rows.amax(1).clamp(min=0) - rows.amin(1).clamp(max=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nearest_is_within_half_a_step_whatever_the_shape(shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    weight = stored(values)
    error = groups((weight.decoded(torch.float32) - values).double()).abs().amax(1)
    # a step is the range over 240, up to 2⁻⁷ larger for being rounded up to bf16; fp32's division adds 127·2⁻²⁴ steps
    assert bool((error <= range_of(values) / 240 * (0.5 * (1 + 2**-7) + 1e-4)).all())
    assert weight.decoded(torch.float32).shape == torch.Size(shape)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-3, 1e30, -1e-30, 3e38])
def test_constant_groups_come_back_within_a_step(value):
    values = torch.full((300,), value)
    decoded = stored(values).decoded(torch.float32)
    assert torch.equal(decoded, decoded[:1].expand(300))
    # all steps lie on one side of 0, so the constant is up to half a step off a place
    assert abs(float(decoded[0]) - value) <= abs(value) / 240


def test_groups_of_one_sign_keep_their_largest():
    values = torch.linspace(5.0, 6.0, 256)
    decoded = stored(values).decoded(torch.float32)
    assert (decoded - values).abs().max() <= 6.0 / 240


def test_tiny_and_huge_groups_beside_each_other():
    pattern = torch.linspace(-1, 1, 256)
    scales = torch.tensor([1e-34, 1e-20, 1.0, 1e20, 1.6e38, 0.0])
    values = (pattern[None] * scales[:, None]).flatten()
    decoded = stored(values).decoded(torch.float32).view(6, 256)
    assert decoded.isfinite().all()
    error = (decoded.double() - values.view(6, 256).double()).abs().amax(1)
    assert bool((error <= scales.double() * 2 / 240 * 0.51).all())
    assert bool((decoded[-1] == 0).all())


def test_the_largest_range_of_fp32_does_not_overflow():
    limit = torch.finfo(torch.float32).max
    decoded = stored(torch.tensor([limit * 0.99, -limit * 0.99])).decoded(torch.float32)
    assert decoded.isfinite().all()
    assert decoded[0] > 0.98 * limit


def test_numbers_below_the_smallest_step_become_zero():
    assert bool((stored(torch.full((10,), 1e-40)).decoded(torch.float32) == 0).all())


def test_zero_is_a_code_of_every_group():
    values = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)) + torch.linspace(-4, 4, 40)[:, None]
    values[:, 17] = 0.0
    assert bool((stored(values).decoded(torch.float32)[:, 17] == 0).all())


def test_decoding_to_bf16_rounds_the_exact_value_once():
    weight = stored(torch.randn(1000, generator=torch.Generator().manual_seed(5)))
    exact = weight.decoded(torch.float32)
    steps = weight.codes.double() - weight.zero.double().repeat_interleave(256)[:1000]
    assert torch.equal(exact.double(), steps * weight.scale.double().repeat_interleave(256)[:1000])
    assert torch.equal(weight.decoded(torch.bfloat16), exact.bfloat16())


def test_mean_of_stochastic_roundings_is_the_value():
    """Of each element, the largest and smallest of the group included: none may be clamped."""
    num_draws, values = 10**4, torch.randn(256, generator=torch.Generator().manual_seed(1))
    values[3], values[200] = 4.2, -3.9
    total = torch.zeros(256, dtype=torch.float64)
    weight = Int8Weight((256 * 100,), CPU)
    for part in range(num_draws // 100):
        weight.assign(torch.zeros(256 * 100))
        weight.add(values.repeat(100), keep=1.0, rate=1.0, key=derive_seed(9, part))
        total += weight.decoded(torch.float32).double().view(100, 256).sum(0)
    step = float(weight.scale[0].float())
    # a draw is at most half a step's standard deviation off; five of them over √10⁴, and 2⁻²⁴ of u's grain
    assert (total / num_draws - values.double()).abs().max() < 5 * 0.5 * step / num_draws**0.5 + step * 2**-20


def test_small_updates_survive_stochastic_rounding_and_not_rounding_to_nearest():
    """A 250th of a step, 500 times: two steps on average, or none."""
    values = torch.zeros(4096)
    values[::256], values[1::256] = 1.0, -1.0
    step = 2 / 240 * (1 + 2**-8)
    moved = {}
    for rounding in ("stochastic", "nearest"):
        weight = stored(values)
        update = torch.full((4096,), step / 250)
        update[::256] = update[1::256] = 0.0
        for index in range(500):
            key = derive_seed(1, index) if rounding == "stochastic" else None
            weight.add(update, keep=1.0, rate=1.0, key=key)
        moved[rounding] = float(weight.decoded(torch.float32).view(16, 256)[:, 2:].mean()) / step
    assert moved["nearest"] == 0.0
    # 4,064 elements, each a sum of 500 draws of variance below a 250th of a step²: 1.4/√4064, times four
    assert moved["stochastic"] == pytest.approx(2.0, abs=0.1)


def test_the_sum_is_rounded_and_not_the_update():
    """Adding in bf16 first would leave 0.5 + 2⁻¹⁰ where it was; here it moves in one of eight draws."""
    values = torch.tensor([1.0, -1.0, 0.5])
    step, moves = float(stored(values).scale), 0
    for index in range(800):
        weight = stored(values)
        before = float(weight.decoded(torch.float32)[2])
        weight.add(torch.tensor([0.0, 0.0, 2.0**-10]), keep=1.0, rate=1.0, key=index)
        moves += float(weight.decoded(torch.float32)[2]) - before > step / 2
    assert moves / 800 == pytest.approx(2.0**-10 / step, abs=0.05)  # four standard deviations of 800 draws


@pytest.mark.parametrize("key", [None, 3])
def test_an_update_of_nothing_changes_nothing(key):
    weight = stored(torch.randn(700, generator=torch.Generator().manual_seed(6)))
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


def test_draws_depend_on_the_key_and_the_place_alone():
    values = torch.randn(2 * 256, generator=torch.Generator().manual_seed(2)) * 0.01
    update = torch.full((512,), 1e-5)

    def after(key: int, device_slab: int | None = None) -> torch.Tensor:
        weight = stored(values)
        weight.add(update, keep=0.999, rate=-1.0, key=key)
        return weight.codes.clone()

    assert torch.equal(after(5), after(5))
    assert not torch.equal(after(5), after(6))
    assert not torch.equal(after(5), after(5 + 2**32))


def test_slabs_do_not_show(monkeypatch):
    values = torch.randn(1500, generator=torch.Generator().manual_seed(4))
    update = torch.randn(1500, generator=torch.Generator().manual_seed(5))
    found = []
    for slab in (2**20, 512):
        monkeypatch.setattr("tahq.memory.galore.stored_weight._SLAB", slab)
        weight = stored(values)
        weight.add(update, keep=0.99, rate=-0.01, key=77)
        found.append(weight)
    one, many = found
    assert torch.equal(one.codes, many.codes)
    assert torch.equal(one.zero, many.zero)
    assert torch.equal(one.scale, many.scale)


def test_three_bytes_beside_256_codes():
    weight = Int8Weight((1024, 100), CPU)
    assert sum(tensor.nbytes for tensor in weight.tensors().values()) == 102400 + 3 * 400


# -- bf16 and fp32 --


def stored_full(values: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> FullWeight:
    weight = FullWeight(tuple(values.shape), CPU, dtype)
    weight.assign(values)
    return weight


def test_mean_of_stochastic_roundings_to_bf16_is_the_value():
    num_draws, values = 10**4, torch.randn(64, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(64, dtype=torch.float64)
    for part in range(num_draws // 1000):
        weight = stored_full(torch.zeros(64 * 1000))
        weight.add(values.repeat(1000), keep=1.0, rate=1.0, key=derive_seed(9, part))
        total += weight.values.double().view(1000, 64).sum(0)
    # a draw is at most half a step's standard deviation off; five of them over √10⁴. A step is 2⁻⁷ of a power of two.
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
    weight = stored_full(torch.zeros(4))
    weight.add(bits.view(torch.float32), keep=1.0, rate=1.0, key=7)
    assert bool(weight.values.isnan().all())


def test_small_updates_of_bf16_survive_only_stochastic_rounding():
    """A 250th of a step, 500 times: two steps on average, or none."""
    moved = {}
    for key in (True, False):
        weight = stored_full(torch.ones(4096))
        for index in range(500):
            update = torch.full((4096,), 2.0**-7 / 250)
            weight.add(update, keep=1.0, rate=1.0, key=derive_seed(1, index) if key else None)
        moved[key] = float((weight.values.float() - 1).mean()) * 2**7
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(2.0, abs=0.1)  # four standard deviations, as with INT8


def test_draws_of_bf16_depend_on_key_and_place_only(monkeypatch):
    values, update = torch.randn(700, generator=torch.Generator().manual_seed(2)), torch.full((700,), 1e-3)

    def after(key: int) -> torch.Tensor:
        weight = stored_full(values)
        weight.add(update, keep=0.999, rate=-1.0, key=key)
        return weight.values

    whole = after(5)
    assert not torch.equal(whole, after(6))
    assert not torch.equal(whole, after(5 + 2**32))
    monkeypatch.setattr("tahq.memory.galore.stored_weight._SLAB", 64)
    assert torch.equal(whole, after(5))


def test_fp32_draws_nothing():
    values, update = torch.randn(100), torch.randn(100)
    drawn, plain = stored_full(values, torch.float32), stored_full(values, torch.float32)
    drawn.add(update, keep=0.9, rate=-0.1, key=3)
    plain.add(update, keep=0.9, rate=-0.1, key=None)
    assert torch.equal(drawn.values, plain.values)
