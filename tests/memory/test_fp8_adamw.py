"""The FP8 optimizer: its groups, and its steps against AdamW and the paper's formulas."""

from functools import partial
from itertools import product

import pytest
import torch
from support.adamw_checks import distances
from support.fp8_adamw_reference import decode_reference, encode_reference, step_reference
from support.fp8_moments import FORMATS, Trained, awkward_groups, same_bits, step_on_groups
from support.samples import normal
from torch.nn import Parameter

from tahq.memory.coat.fp8_adamw import CHUNK_GROUPS, Fp8AdamW, step_in_torch
from tahq.memory.coat.fp8_adamw_cpu import step_on_cpu
from tahq.memory.coat.fp8_codes import FP8_FORMATS, LARGEST
from tahq.memory.coat.fp8_groups import (
    GROUP,
    NAN,
    UNEXPANDED,
    decode,
    encode,
    magnitudes,
    moment_format,
    smallest_share,
)
from tahq.memory.config import Fp8AdamWConfig
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.optimizer import optimizer_nbytes

RATES = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
DEFAULT = Fp8AdamWConfig()
OTHERS = [
    Fp8AdamWConfig(expand_first=False, expand_second=False),
    Fp8AdamWConfig(first="e5m2", expand_second=False),
    Fp8AdamWConfig(second="e5m2", expand_first=False),
]


def fp8(stored, parameters):
    return Fp8AdamW(parameters, stored, **RATES)


@pytest.mark.parametrize("shape", [1, 127, 128, 4097, (5, 3, 129)], ids=str)
def test_first_step_equals_torchs_adamw(shape):
    """Moments are zero before, and used before they are quantised: 8 operations, each rounded by 2⁻²⁴ relative."""
    errors, _ = distances(partial(fp8, DEFAULT), shape, RATES, normal, steps=1)
    assert errors.max() * RATES["lr"] <= 8 * 2.0**-24 * normal(shape, 0).abs().max()


@pytest.mark.parametrize(
    ("shape", "scale"), [(1, 1.0), (127, 1e6), (128, 1e-6), (4097, 1e6), ((33, 77), 1.0), ((5, 3, 129), 1e-6)], ids=str
)
def test_fifty_steps_stay_near_torchs_adamw(shape, scale):
    """How far rounding of moments may move the weights, E4M3 with both moments expanded.

    A group of 128 Gaussian gradients has R = max/min of |m| of some 500, so k ≈ 12.3/ln 500 ≈ 2, and the half step of
    E4M3, 2⁻⁴, is q = 2⁻⁴/2 = 3.1 % of a value at most (for normal codes), q/√3 = 1.8 % on average; v, an average
    of 20 squares, has R ≈ 10, k ≈ 5 and half a percent. Roundings are independent, and the moment passes them on with
    β₁: the error of m is 1.8 %·β₁/√(1 − β₁²) = 3.7 % of m, that of √v 0.7 %·β₂/√(1 − β₂²)/2 ≈ 1 %. So an update, η·|u|
    with |u| ≈ 0.25 on average, is wrong by 0.04·η·0.25 = 0.01·η; errors last for 1/(1 − β₁) = 10 steps, so 50 of them
    add up to about √(50·10·2)·0.01·η = 0.3·η. Bounds: that in the mean, and six times that at most
    for the thousands of weights (normal: 4 σ, and the smallest of a group have subnormal codes).
    """
    errors, _ = distances(partial(fp8, DEFAULT), shape, RATES, lambda shape, step: scale * normal(shape, step))
    assert errors.mean() < 0.3
    assert errors.max() < 1.8


@pytest.mark.parametrize("stored", OTHERS, ids=str)
def test_every_format_learns_as_torchs_adamw_does(stored):
    """Half a step of E5M2 is 2⁻³, and not divided by k without expansion: 7 % on average, four times as above."""
    errors, _ = distances(partial(fp8, stored), (64, 65), RATES, normal)
    assert errors.mean() < 1.2


@pytest.mark.parametrize("step", [step_in_torch, step_on_cpu])
@pytest.mark.parametrize(
    ("numel", "formats", "scale"),
    [
        *product([1, 127, 128, 33 * 77, CHUNK_GROUPS * GROUP + 5], FORMATS, [1e-3]),
        # v is subnormal, or 0, below 10⁻¹⁹; near 10¹⁹ it is near the largest fp32.
        *product([4097], ["coat"], [0.0, 1e-30, 1e-22, 1e-19, 1e15]),
    ],
)
def test_steps_equal_the_formulas_to_the_bit_and_write_nothing_else(step, numel, formats, scale):
    got = Trained(step, numel, formats).take_steps(range(1, 4), scale)
    expected = Trained(step_reference, numel, formats).take_steps(range(1, 4), scale)
    for left, right in zip(got.tensors(), expected.tensors(), strict=True):
        assert left.isfinite().all()
        assert torch.equal(left, right)
    got.assert_nothing_else_was_written()


@pytest.mark.parametrize("formats", FORMATS)
def test_compiled_step_agrees_on_groups_of_every_sort(formats):
    groups = torch.cat(list(awkward_groups(2).values()))
    compiled, plain = (step_on_groups(step, groups, formats) for step in (step_on_cpu, step_in_torch))
    assert all(map(same_bits, compiled, plain))


@pytest.mark.parametrize("stored", [DEFAULT, *OTHERS], ids=str)
def test_states_have_two_bytes_per_parameter_and_six_per_group(stored):
    config = TrainingConfig(steps=10, optimizer="fp8_adamw", fp8_adamw=stored)
    num_powers = stored.expand_first + stored.expand_second
    assert optimizer_nbytes(config, [(3, 100), (1,)]) == 2 * 301 + 4 * (2 * 2 + num_powers)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30], ids=str)
def test_moments_that_are_not_finite_are_stored_as_nan_and_spoil_no_neighbour(bad):
    """10³⁰ squared is beyond fp32. The engine skips steps with NaN; a state that has one shows in the next loss."""
    parameter = Parameter(torch.ones(300))
    optimizer = fp8(DEFAULT, [parameter])
    parameter.grad = torch.ones(300)
    parameter.grad[7] = bad
    optimizer.step()
    optimizer.step()
    assert parameter.isnan().nonzero().flatten().tolist() == [7]
    assert optimizer.state[parameter]["exp_avg_sq"][7] & 0x7F == 0x7F


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


def test_values_that_are_not_finite_become_nan_and_spoil_no_neighbour():
    x = awkward_groups()["not finite"]
    values = decode(*encode(x, EXPANDED), EXPANDED)
    assert torch.equal(values.isnan(), ~x.isfinite())
    alone = torch.where(x.isfinite(), x, 0.0)
    assert torch.equal(values.nan_to_num(0), decode(*encode(alone, EXPANDED), EXPANDED))


def test_expansion_lowers_the_error_of_narrow_groups():
    """R = e^(2·0.3·2.5) ≈ 4.5, k ≈ 8: steps are an eighth, squared errors a 64th, as far as codes are normal."""
    x = (0.3 * normal((400, 128), 2)).exp()
    errors = [(decode(*encode(x, by), by) - x).square().mean() for by in (EXPANDED, moment_format("e4m3", False))]
    assert errors[0] < errors[1] / 10
