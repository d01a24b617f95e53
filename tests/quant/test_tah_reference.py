import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.errors import CodecError
from tahq.quant.spec import TahSpec
from tahq.quant.tah import reference as tah
from tahq.quant.tah.stream import TahLayout

ALL_HIGH = tah.Allocation(num_low=0)


def tiles_of(*rows):
    return torch.tensor(rows, dtype=torch.float32)


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(1.0, 10), (1.999, 10), (2.0, 9), (1024.0, 0), (2047.9, 0), (2048.0, -1), (1e-5, 27), (0.0, 0), (3.4e38, -117)],
)
def test_exponent_takes_the_largest_magnitude_to_1024(largest, exponent):
    x = tiles_of([0.0, -largest / 3, largest / 2, -largest])
    assert tah.top_exponent(x, torch.tensor([True]), 10).item() == exponent


def test_entropy_of_even_and_single_magnitudes():
    tiles = tiles_of([1.0] * 8, [5.0] + [0.0] * 7, [0.0] * 8, [3.0, 3.0] + [0.0] * 6)
    assert tah.entropy_(tiles).tolist() == pytest.approx([math.log(8), 0.0, 0.0, math.log(2)], abs=1e-6)


def test_low_bits_go_to_the_lowest_entropies_of_each_sample():
    entropies = torch.tensor([[3.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 9.0]])
    assert tah.select_high(entropies, 2).tolist() == [[True, False, True, False], [False, False, True, True]]
    assert tah.select_high(entropies, 0).all()
    assert not tah.select_high(entropies, 4).any()


def test_an_allocation_tile_has_one_entropy_over_all_its_channels():
    """Two tiles of equal magnitudes have log 16 nats together, whatever their tiles have by themselves."""
    even, single = [1.0] * 8, [1.0] + [0.0] * 7
    magnitude = tiles_of(*[even, even], *[single, single], *[even, single]).view(1, 1, 6, 8)
    for num_low, expected in ((1, [True, False, True]), (2, [True, False, False])):
        allocation = tah.Allocation(num_low, tiles_per_alloc=2)
        assert tah.allocate_(magnitude.clone(), allocation).tolist() == [expected]
    reverse = tah.Allocation(1, tiles_per_alloc=2, by_low_entropy=False)
    assert tah.allocate_(magnitude.clone(), reverse).tolist() == [[False, True, True]]


@given(share=st.fractions(0, 1), count=st.integers(0, 200))
def test_bits_that_are_spread_evenly_follow_the_floors_of_the_exact_share(share, count):
    layout = TahLayout.of(TahSpec(int4=1 - share, adaptive="off"), (2, count, 64))
    high = tah.spread_high(layout.even_share, count, torch.device("cpu"))
    assert high.tolist() == [math.floor((i + 1) * share) == math.floor(i * share) for i in range(count)]
    assert (~high).sum() == layout.num_low
    many_digits = Fraction(10**300 - 1, 10**300)  # the products with n must fit 64 bits
    assert TahLayout.of(TahSpec(int4=many_digits), (1, 100_000, 64)).even_share == 0


@pytest.mark.parametrize(
    ("channels", "group", "alloc", "ratio", "num_allocs"),
    [
        (1600, 64, "group", 1, 150),
        (1600, 64, "token", 25, 6),
        (1600, 64, "1600", 25, 6),
        (1600, 64, "320", 5, 30),
        (1600, 128, "64", 1, 150),  # no tile of 128 divides 1600: G is 64
        (100, 64, "token", 2, 6),
        (100, 64, "128", 2, 6),
        (0, 64, "token", 1, 0),
        (0, 64, "128", 2, 0),
    ],
)
def test_layout_counts_allocation_tiles(channels, group, alloc, ratio, num_allocs):
    layout = TahLayout.of(TahSpec(group=group, alloc=alloc, int4=Fraction(1, 3)), (2, 3, channels))
    assert (layout.tiles_per_alloc, layout.num_allocs) == (ratio, num_allocs)
    assert layout.allocs_per_sample == num_allocs // 2
    assert layout.num_low == layout.allocs_per_sample * 2 // 3
    assert layout.num_high == 2 * ratio * (layout.allocs_per_sample - layout.num_low)


@pytest.mark.parametrize(
    ("channels", "group", "alloc", "named"),
    [
        (1600, 64, "32", "alloc=32 does not fit 1600 channels, which are cut into tiles of 64 and filled up to 1600"),
        (1600, 64, "128", "a multiple of 64 that divides 1600"),
        (100, 64, "192", "alloc=192 does not fit 100 channels, which are cut into tiles of 64 and filled up to 128"),
        (64, 64, "1600", "alloc=1600 does not fit 64 channels"),
        (100, 64, "96", "a multiple of 64 that divides 128"),
    ],
)
def test_allocation_tiles_that_do_not_fit_are_refused(channels, group, alloc, named):
    with pytest.raises(CodecError, match=named):
        TahLayout.of(TahSpec(group=group, alloc=alloc), (2, 3, channels))


def test_hadamard_is_sylvesters_matrix_and_its_own_inverse():
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(5):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    transformed = tah.hadamard(x)
    torch.testing.assert_close(transformed.double(), x.double() @ matrix / 32**0.5, rtol=0, atol=1e-6)
    torch.testing.assert_close(tah.hadamard(transformed), x, rtol=0, atol=1e-6)


def encode_one(row, **options):
    """One tile in a tensor whose largest magnitude is in [2^10, 2^11), so that e = 0."""
    parameters = {"tau": 2.0, "low": 3, "high": 4, **options}
    return tah.encode_tiles(tiles_of([[row]]).view(1, 1, 1, -1), ALL_HIGH, **parameters)


def test_pivot_is_the_lowest_index_of_the_largest_magnitude():
    row = [1.0, -2000.0, 2000.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    assert encode_one(row, tau=0.5).pivot.item() == 1
    assert encode_one(row, tau=2.0).pivot.item() == 0  # not transformed: no pivot


def test_threshold_0_transforms_all_but_zeros_and_inf_transforms_nothing():
    even = [1024.0] * 8
    assert encode_one(even, tau=0.0).transformed.item()
    assert not encode_one([0.0] * 8, tau=0.0).transformed.item()
    assert not encode_one([1024.0] + [0.0] * 7, tau=math.inf).transformed.item()


def test_codes_round_half_to_even_on_the_scale_of_the_wire():
    row = [0.0, 50.0, 150.0, 250.0, 1500.0, 1350.0, 749.9, 750.1]
    tiles = encode_one(row, tau=math.inf)  # range 1500 over 15 levels: scale 100
    assert tiles.scale.item() == 100.0
    assert tiles.codes.flatten().tolist() == [0, 0, 2, 2, 15, 14, 7, 8]


def test_code_above_the_top_is_clamped_where_fp16_rounds_the_scale_down():
    row = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1029.0]
    tiles = encode_one(row, tau=math.inf, low=8, high=8)
    scale = tiles.scale.item()
    assert scale * 255 < 1029  # 1029/255 = 4.035…, fp16 has 4.03515625
    assert tiles.codes.max().item() == 255


def test_constant_tile_has_scale_0_and_decodes_to_its_zero_point():
    tiles = encode_one([1536.0] * 8)
    assert (tiles.scale.item(), tiles.zero_point.item(), tiles.codes.sum().item()) == (0.0, 1536.0, 0)
    assert tah.decode_tiles(tiles).flatten().tolist() == [1536.0] * 8


def test_range_below_fp16s_least_is_coded_as_constant():
    tiny = 2.0**-30
    x = torch.tensor([[1024.0] * 8, [tiny * i for i in range(8)]]).view(1, 1, 2, 8)
    tiles = tah.encode_tiles(x, ALL_HIGH, tau=math.inf, low=4, high=4)
    assert tiles.scale[0, 0, 1].item() == 0.0
    assert tiles.codes[0, 0, 1].sum().item() == 0


def test_padding_stays_out_of_minimum_and_has_code_0():
    x = torch.zeros(1, 1, 1, 8)
    x[..., :5] = torch.tensor([1100.0, 1200.0, 1300.0, 1400.0, 1500.0])
    tiles = tah.encode_tiles(x, ALL_HIGH, tau=2.0, low=4, high=4, padding=3)
    assert tiles.zero_point.item() == 1100.0
    assert tiles.codes.flatten()[5:].tolist() == [0, 0, 0]
    transformed = tah.encode_tiles(x, ALL_HIGH, tau=0.0, low=4, high=4, padding=3)
    assert transformed.codes.flatten()[5:].any()
