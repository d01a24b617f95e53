"""Codes, scales and powers: formats against torch's, tables against the paper's formulas, and awkward groups."""

import pytest
import torch
from support.fp8_adamw_reference import decode_reference, encode_reference
from support.fp8_moments import awkward_groups, magnitudes_of, moment_format, same_bits

from tahq.memory.coat.fp8_groups import (
    DE8,
    DE8_UNSIGNED,
    E4M3,
    E5M2,
    FP8_FORMATS,
    NAN,
    NUM_POWERS,
    UNEXPANDED,
    as_groups,
    decode,
    encode,
    make_tables,
    power,
    stored_scales,
)

TORCH_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMATS = [E4M3, E5M2, DE8, DE8_UNSIGNED]
by_name = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
expanded_or_not = pytest.mark.parametrize("expand", [True, False], ids=["expanded", "plain"])


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_magnitudes_and_codes_are_torchs(name):
    format = FP8_FORMATS[name]
    numbers = torch.arange(128, dtype=torch.uint8).view(TORCH_TYPES[name]).double()
    assert torch.equal(numbers[numbers.isfinite()], magnitudes_of(format))
    assert torch.tensor([NAN, NAN | 0x80], dtype=torch.uint8).view(TORCH_TYPES[name]).float().isnan().all()


def test_ranges_are_the_papers():
    assert (E4M3.largest, E4M3.magnitudes[1], 1 / E4M3.smallest_share) == (448, 2**-9, 229376)
    assert (E5M2.largest, E5M2.magnitudes[1]) == (57344, 2**-16)


def test_dynamic_exponent_has_twice_as_many_magnitudes_a_decade_up():
    for format, first in ((DE8, 1), (DE8_UNSIGNED, 2)):
        found = magnitudes_of(format)
        decades = [((found >= 10.0**low) & (found < 10.0 ** (low + 1))).sum().item() for low in range(-7, 0)]
        assert decades == [first << place for place in range(6)] + [(first << 6) - 1]  # the last of all is 1 itself
        assert format.largest == 1
    assert DE8.magnitudes[1] == pytest.approx(5.5e-7)


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_codes_without_expansion_are_torchs_own(name):
    """|x|/M and its product with Δmax are exact here: x has 8 bits, M is a power of two."""
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    x[:, 0] = 8.0
    codes, scales, powers = encode(x, moment_format(FP8_FORMATS[name], expand=False))
    expected = (x / 8 * FP8_FORMATS[name].largest).to(TORCH_TYPES[name]).view(torch.uint8)
    assert (scales == 8).all()
    assert (powers == UNEXPANDED).all()
    assert torch.equal(torch.where(codes == 0x80, 0, codes), torch.where(expected == 0x80, 0, expected))


@by_name
@expanded_or_not
def test_tables_give_what_the_formulas_give_to_the_bit(format, expand):
    by, magnitudes = moment_format(format, expand), magnitudes_of(format)
    for sort, x in awkward_groups().items():
        if not format.is_signed:
            x = x.abs().nan_to_num(0, 0, 0)
        got = encode(x, by)
        expected = encode_reference(x, magnitudes, expand=expand, is_signed=format.is_signed)
        for left, right in zip(got, expected, strict=True):
            assert torch.equal(left, right), sort
        values = decode_reference(*expected, magnitudes, is_signed=format.is_signed)
        assert same_bits(decode(*got, by), values), sort


def test_reference_is_the_papers_expansion():
    """With c and S written out, where M is exact: f(x) = sign(x)·(|x|/c)^k; X_FP8 = ⌈f(X)/S⌋, S = max f/Δmax."""
    x = torch.randn(200, 128, generator=torch.Generator().manual_seed(1)).exp()
    x[:, 9] = 2.0 ** (x.amax(1).log2().floor() + 1)
    magnitudes = magnitudes_of(E4M3)
    codes, scales, index = encode_reference(x, magnitudes, expand=True)
    largest, smallest = x.double().amax(1), x.double().amin(1)
    assert torch.equal(scales.double(), largest)
    best = torch.log2(torch.tensor(448.0 * 512).double()) / torch.log2(largest / smallest)  # R^k = R_E4M3
    k = 2.0 ** (index.double() / 28 - 4)
    assert ((k <= best) & (best < k * 2 ** (1 / 28))).all()
    c = (largest * smallest).sqrt()
    expanded = (x.double() / c[:, None]) ** k[:, None]
    quotient = expanded / (expanded.amax(1, keepdim=True) / 448)
    ours = magnitudes[codes.long()]
    step = torch.maximum(2.0 ** (torch.log2(quotient).floor() - 3), torch.tensor(2.0**-9))
    assert ((ours - quotient).abs() <= step / 2 * (1 + 1e-12)).all()


@by_name
@expanded_or_not
def test_decoded_values_are_the_nearest_that_there_are(format, expand):
    """No other code of the group's function is nearer, measured in the expanded domain."""
    by = moment_format(format, expand)
    x = awkward_groups()["gaussian"].abs()
    codes, scales, powers = encode(x, by)
    k = torch.tensor([power(int(index)) for index in powers]).double()[:, None]
    expanded = (x.double() / scales.double()[:, None]).clamp(max=1) ** k * format.largest
    every = magnitudes_of(format)
    distance = (every[codes.long()] - expanded).abs()
    nearest = (expanded[..., None] - every).abs().amin(-1)
    # ratios are rounded to fp32, 2⁻²⁴ relative, twice: in the expanded domain k times as much, and k ≤ 32
    assert (distance <= nearest + 32 * 2.0**-23 * expanded).all()


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_smallest_magnitude_does_not_become_zero(name):
    by = moment_format(FP8_FORMATS[name], expand=True)
    for sort in ("gaussian", "of every size", "40 orders of magnitude in a group", "mostly zeros"):
        x = awkward_groups()[sort]
        codes, scales, _ = encode(x, by)
        least = 2.0**-126 * scales.double()[:, None]
        assert torch.equal(codes & 0x7F == 0, (x.abs() < least) | (x == 0)), sort


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_groups_of_one_magnitude_keep_it_as_well_as_bf16_does(name):
    by = moment_format(FP8_FORMATS[name], expand=True)
    for sort in ("constant", "one element"):
        x = awkward_groups()[sort]
        codes, scales, powers = encode(x, by)
        assert (powers == UNEXPANDED).all()
        torch.testing.assert_close(decode(codes, scales, powers, by), x, rtol=2.0**-8, atol=0)


@expanded_or_not
def test_zeros_are_stored_as_zeros(expand):
    by = moment_format(E4M3, expand)
    for sort in ("zeros", "minus zeros"):
        codes, scales, powers = encode(awkward_groups()[sort], by)
        assert not (codes & 0x7F).any()
        assert not scales.any()
        assert torch.equal(decode(codes, scales, powers, by), torch.zeros(40, 128))


def test_what_is_not_finite_becomes_nan_and_spoils_no_neighbour():
    by = moment_format(E4M3, expand=True)
    x = awkward_groups()["not finite"]
    values = decode(*encode(x, by), by)
    assert torch.equal(values.isnan(), ~x.isfinite())
    alone = torch.where(x.isfinite(), x, 0.0)
    assert torch.equal(values.nan_to_num(0), decode(*encode(alone, by), by))


def test_scales_keep_a_reciprocal():
    largest = torch.tensor([0.0, 2.0**-126, 1.0, 2.0**126, torch.finfo(torch.float32).max])
    assert stored_scales(largest).double().tolist() == [0, 2.0**-126, 1, 2.0**126, 2.0**126]


def test_subnormal_numbers_are_stored_as_zeros_and_do_not_widen_the_range():
    by = moment_format(E4M3, expand=True)
    x = awkward_groups()["gaussian"]
    with_remains = torch.cat([x[:, :100], torch.full((len(x), 28), 1e-40)], dim=1)
    with_zeros = torch.cat([x[:, :100], torch.zeros(len(x), 28)], dim=1)
    for left, right in zip(encode(with_remains, by), encode(with_zeros, by), strict=True):
        assert torch.equal(left, right)
    for sort in ("subnormal", "least subnormal"):
        assert not decode(*encode(awkward_groups()[sort], by), by).any()


def test_powers_are_between_a_sixteenth_and_thirty_two():
    assert (power(0), power(UNEXPANDED), power(NUM_POWERS - 1)) == (1 / 16, 1, 32)
    for format in FORMATS:
        tables = make_tables(format)
        assert tables.values.shape == (NUM_POWERS, 256)
        assert tables.uppers.shape == (NUM_POWERS, format.num_codes)
        assert (tables.uppers[:, 1:] >= tables.uppers[:, :-1]).all()
        assert (tables.least.diff() >= 0).all()


def test_expansion_lowers_the_error_of_narrow_groups():
    """R = e^(2·0.3·2.5) ≈ 4.5, k ≈ 8: steps are an eighth, squared errors a 64th, as far as codes are normal."""
    x = (0.3 * torch.randn(400, 128, generator=torch.Generator().manual_seed(2))).exp()
    errors = []
    for expand in (True, False):
        by = moment_format(E4M3, expand)
        errors.append((decode(*encode(x, by), by) - x).square().mean().item())
    assert errors[0] < errors[1] / 10


@pytest.mark.parametrize("numel", [1, 127, 128, 129, 4097])
def test_tails_are_filled_up_with_zeros(numel):
    flat = torch.arange(1, numel + 1, dtype=torch.float32)
    groups = as_groups(flat)
    assert torch.equal(groups.view(-1)[:numel], flat)
    assert not groups.view(-1)[numel:].any()
