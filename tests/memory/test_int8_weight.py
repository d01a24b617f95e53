"""INT8 weights: what a code can be off by, and what 10^5 stochastic roundings come to."""

import pytest
import torch

from tahq.memory.galore.stored_weight import Int8Weight
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


def test_mean_of_ten_to_the_five_stochastic_roundings_is_the_value():
    """Of each element, the largest and smallest of the group included: none may be clamped."""
    num_draws, values = 10**5, torch.randn(256, generator=torch.Generator().manual_seed(1))
    values[3], values[200] = 4.2, -3.9
    total = torch.zeros(256, dtype=torch.float64)
    weight = Int8Weight((256 * 100,), CPU)
    for part in range(num_draws // 100):
        weight.assign(torch.zeros(256 * 100))
        weight.add(values.repeat(100), keep=1.0, rate=1.0, key=derive_seed(9, part))
        total += weight.decoded(torch.float32).double().view(100, 256).sum(0)
    step = float(weight.scale[0].float())
    # a draw is at most half a step's standard deviation off; five of them over √10⁵, and 2⁻²⁴ of u's grain
    assert (total / num_draws - values.double()).abs().max() < 5 * 0.5 * step / num_draws**0.5 + step * 2**-20


def test_small_updates_survive_stochastic_rounding_and_not_rounding_to_nearest():
    """A thousandth of a step, two thousand times: two steps on average, or none."""
    values = torch.zeros(4096)
    values[::256], values[1::256] = 1.0, -1.0
    step = 2 / 240 * (1 + 2**-8)
    moved = {}
    for rounding in ("stochastic", "nearest"):
        weight = stored(values)
        update = torch.full((4096,), step / 1000)
        update[::256] = update[1::256] = 0.0
        for index in range(2000):
            key = derive_seed(1, index) if rounding == "stochastic" else None
            weight.add(update, keep=1.0, rate=1.0, key=key)
        moved[rounding] = float(weight.decoded(torch.float32).view(16, 256)[:, 2:].mean()) / step
    assert moved["nearest"] == 0.0
    # 4,064 elements, each a sum of 2,000 draws of variance below a thousandth of a step²: 1.4/√4064, times four
    assert moved["stochastic"] == pytest.approx(2.0, abs=0.1)


def test_the_sum_is_rounded_and_not_the_update():
    """Adding in bf16 first would leave 0.5 + 2⁻¹⁰ where it was; here it moves in one of eight draws."""
    values = torch.tensor([1.0, -1.0, 0.5])
    step, moves = float(stored(values).scale), 0
    for index in range(3000):
        weight = stored(values)
        before = float(weight.decoded(torch.float32)[2])
        weight.add(torch.tensor([0.0, 0.0, 2.0**-10]), keep=1.0, rate=1.0, key=index)
        moves += float(weight.decoded(torch.float32)[2]) - before > step / 2
    assert moves / 3000 == pytest.approx(2.0**-10 / step, abs=0.03)  # four standard deviations of 3,000 draws


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
