"""Codes, scales and powers: tables against the paper's formulas, and groups of every sort."""

import pytest
import torch
from support.fp8_adamw_reference import decode_reference, encode_reference
from support.fp8_moments import awkward_groups, same_bits
from support.samples import normal

from tahq.memory.coat.fp8_codes import FP8_FORMATS, LARGEST
from tahq.memory.coat.fp8_groups import (
    NAN,
    UNEXPANDED,
    decode,
    encode,
    magnitudes,
    moment_format,
    smallest_share,
)

by_name = pytest.mark.parametrize("name", FP8_FORMATS)
expanded_or_not = pytest.mark.parametrize("expand", [True, False], ids=["expanded", "plain"])
EXPANDED = moment_format("e4m3", True)


def magnitudes_of(name: str) -> torch.Tensor:
    return torch.from_numpy(magnitudes(FP8_FORMATS[name]))


def test_ranges_equal_the_papers():
    for name, largest, smallest in (("e4m3", 448, 2**-9), ("e5m2", 57344, 2**-16)):
        every = magnitudes_of(name)
        assert (every[0], every[1], every[-1]) == (0, smallest, largest)
        assert LARGEST[FP8_FORMATS[name]] == largest
        assert smallest_share(FP8_FORMATS[name]) == smallest / largest
        assert torch.tensor([NAN, NAN | 0x80], dtype=torch.uint8).view(FP8_FORMATS[name]).float().isnan().all()


@by_name
def test_codes_without_expansion_are_torchs_own(name):
    """|x|/M and its product with Δmax are exact here: x has 8 bits, M is a power of two."""
    x = normal((50, 128)).bfloat16().float()
    x[:, 0] = 8.0
    codes, scales, powers = encode(x, moment_format(name, expand=False))
    expected = (x / 8 * LARGEST[FP8_FORMATS[name]]).to(FP8_FORMATS[name]).view(torch.uint8)
    assert (scales == 8).all()
    assert (powers == UNEXPANDED).all()
    assert torch.equal(torch.where(codes == 0x80, 0, codes), torch.where(expected == 0x80, 0, expected))


@by_name
@expanded_or_not
def test_tables_equal_the_formulas_to_the_bit(name, expand):
    by, every = moment_format(name, expand), magnitudes_of(name)
    for sort, x in awkward_groups().items():
        got = encode(x, by)
        expected = encode_reference(x, every, expand=expand)
        for left, right in zip(got, expected, strict=True):
            assert torch.equal(left, right), sort
        assert same_bits(decode(*got, by), decode_reference(*expected, every)), sort


def test_reference_is_the_papers_expansion():
    """With c and S written out, where M is exact: f(x) = sign(x)·(|x|/c)^k; X_FP8 = ⌈f(X)/S⌋, S = max f/Δmax."""
    x = normal((200, 128), 1).exp()
    x[:, 9] = 2.0 ** (x.amax(1).log2().floor() + 1)
    codes, scales, index = encode_reference(x, magnitudes_of("e4m3"), expand=True)
    largest, smallest = x.double().amax(1), x.double().amin(1)
    assert torch.equal(scales.double(), largest)
    best = torch.log2(torch.tensor(448.0 * 512).double()) / torch.log2(largest / smallest)  # R^k = R_E4M3
    k = 2.0 ** (index.double() / 28 - 4)
    assert ((k <= best) & (best < k * 2 ** (1 / 28))).all()
    c = (largest * smallest).sqrt()
    expanded = (x.double() / c[:, None]) ** k[:, None]
    quotient = expanded / (expanded.amax(1, keepdim=True) / 448)
    ours = magnitudes_of("e4m3")[codes.long()]
    step = torch.maximum(2.0 ** (torch.log2(quotient).floor() - 3), torch.tensor(2.0**-9))
    assert ((ours - quotient).abs() <= step / 2 * (1 + 1e-12)).all()


@expanded_or_not
@pytest.mark.parametrize("sort", ["zeros", "minus zeros"])
def test_zeros_are_stored_as_zeros(sort, expand):
    by = moment_format("e4m3", expand)
    codes, scales, powers = encode(awkward_groups()[sort], by)
    assert not (codes & 0x7F).any()
    assert not scales.any()
    assert torch.equal(decode(codes, scales, powers, by), torch.zeros(40, 128))


def test_values_that_are_not_finite_become_nan_and_spoil_no_neighbour():
    x = awkward_groups()["not finite"]
    values = decode(*encode(x, EXPANDED), EXPANDED)
    assert torch.equal(values.isnan(), ~x.isfinite())
    alone = torch.where(x.isfinite(), x, 0.0)
    assert torch.equal(values.nan_to_num(0), decode(*encode(alone, EXPANDED), EXPANDED))


def test_subnormal_numbers_are_stored_as_zeros_and_do_not_widen_the_range():
    x = awkward_groups()["gaussian"]
    with_remains, with_zeros = (torch.cat([x[:, :100], torch.full((len(x), 28), rest)], dim=1) for rest in (1e-40, 0.0))
    for left, right in zip(encode(with_remains, EXPANDED), encode(with_zeros, EXPANDED), strict=True):
        assert torch.equal(left, right)
    for sort in ("subnormal", "least subnormal"):
        assert not decode(*encode(awkward_groups()[sort], EXPANDED), EXPANDED).any()


def test_expansion_lowers_the_error_of_narrow_groups():
    """R = e^(2·0.3·2.5) ≈ 4.5, k ≈ 8: steps are an eighth, squared errors a 64th, as far as codes are normal."""
    x = (0.3 * normal((400, 128), 2)).exp()
    errors = [(decode(*encode(x, by), by) - x).square().mean() for by in (EXPANDED, moment_format("e4m3", False))]
    assert errors[0] < errors[1] / 10
