"""The rate-distortion bound: textbook cases, optimality against brute force, and the figures that the design quotes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.boundary import boundary, needs_fixture

from tahq.errors import CodecError
from tahq.quant.comparison import distortion, relative_error_bound


@pytest.mark.parametrize(
    ("variances", "bits", "expected"),
    [
        ([1.0], 3, 2**-6),  # D = σ²·2^(−2R)
        ([4.0, 1.0], 1, 0.5),  # both are coded: θ = √4·2^(−2) = ½
        ([100.0, 1.0], 0.5, 26 / 2),  # only the first: θ = 100·2^(−2) = 25, D = (25 + 1)/2
        ([4.0, 1.0], 0, 2.5),  # nothing is sent
        ([4.0, 0.0], 1, 4 * 2**-4 / 2),  # a component that is known costs nothing
        ([0.0, 0.0], 1, 0.0),
    ],
)
def test_textbook_cases(variances, bits, expected):
    assert distortion(torch.tensor(variances), bits) == pytest.approx(expected)


def test_weights_count_components():
    alike = torch.tensor([9.0, 9.0, 9.0, 2.0, 0.5, 0.5])
    grouped = torch.tensor([2.0, 0.5, 9.0])
    weights = torch.tensor([1.0, 2.0, 3.0])
    for bits in (0.1, 0.7, 3.8):
        assert distortion(grouped, bits, weights) == pytest.approx(distortion(alike, bits))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), st.floats(0, 6), st.randoms(use_true_random=False))
def test_no_other_way_to_spend_the_bits_does_better(variances, bits, random):
    best = distortion(torch.tensor(variances, dtype=torch.float64), bits)
    shares = [random.random() + 1e-9 for _ in variances]
    rates = [bits * len(variances) * share / sum(shares) for share in shares]
    other = sum(v * 4**-r for v, r in zip(variances, rates, strict=True)) / len(variances)
    assert best <= other * (1 + 1e-9)


def test_bound_of_equal_energies_is_that_of_one_variance_and_padding_does_not_count():
    assert relative_error_bound(torch.ones(4, 100), 3.8) == pytest.approx(2**-3.8)  # 64 + 36 channels
    assert relative_error_bound(torch.zeros(2, 64), 1.0) == 0.0
    with pytest.raises(CodecError, match="one dimension or more"):
        relative_error_bound(torch.tensor(1.0), 1.0)


@needs_fixture
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("act_after_block_2", 0.0697),
        ("act_after_block_5", 0.0696),
        ("act_after_block_8", 0.0696),
        ("grad_after_block_2", 0.0478),
        ("grad_after_block_5", 0.0468),
        ("grad_after_block_8", 0.0417),
    ],
)
def test_bound_at_3_8_bits_is_the_quoted_one(name, bound):
    """0.070 on activations, 0.042 to 0.048 on gradients: one variance per tile of 64, not per channel."""
    x = boundary()[name]
    assert relative_error_bound(x, 3.8) == pytest.approx(bound, abs=6e-5)
    energy = x.double().square().mean(dim=(0, 1))
    by_channel = math.sqrt(distortion(energy, 3.8) / float(energy.mean()))
    assert abs(by_channel - bound) > 0.0002
    assert (by_channel < 0.0694) == name.startswith("act")
