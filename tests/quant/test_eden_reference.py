"""eden is unbiased, spends its budget, and loses what a Gaussian-optimal quantiser loses."""

import math

import pytest
import torch
from support.boundary import boundary, needs_fixture

from tahq.quant import get_codec
from tahq.quant.gaussian import reference as eden_reference
from tahq.quant.gaussian import small_scale
from tahq.quant.gaussian.levels import DISTORTIONS, magnitude_indices, magnitudes_of
from tahq.quant.gaussian.tile_stream import TileLayout, unpack

KEYS = range(0, 2**63, 2**63 // 255)


def made(spec):
    return get_codec(f"eden:{spec}", backend="reference")


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sent(codec, x, key=0):
    return codec.decode(codec.encode(x, key=key), x.shape, key=key)


def error(back, x):
    return float((back - x).norm() / x.norm())


def tiles_of(codec, x, key=0):
    return unpack(TileLayout.of(codec.spec, x.shape), codec.encode(x, key=key))


@pytest.fixture(scope="module", params=[1, 2.5])
def draws(request):
    """A tensor, and what it decodes to under many keys."""
    codec, x = made(f"bits={request.param},group=256"), gaussian(16, 256) * torch.exp2(gaussian(16, 1)) + 0.3
    return x, torch.stack([sent(codec, x, key) for key in KEYS])


def test_mean_over_keys_approaches_the_tensor_as_one_over_the_root_of_the_draws(draws):
    x, back = draws
    single = float((back - x).norm(dim=(1, 2)).square().mean().sqrt() / x.norm())
    for count in (16, 64, len(back)):
        bias = bias_of_means(back, count, x)
        # Of N independent errors; the square of its norm, over 4,096 values, varies by a few per cent.
        assert bias * math.sqrt(count) == pytest.approx(single, rel=0.1)


def bias_of_means(back, count, x):
    """Root mean square of the error that is left in means of so many draws."""
    means = back[: len(back) // count * count].view(-1, count, *x.shape).mean(dim=1)
    return float((means - x).norm(dim=(1, 2)).square().mean().sqrt() / x.norm())


def test_bias_that_is_left_in_spiky_tiles_is_smaller_in_larger_ones():
    """Signs and a Hadamard transform are no uniformly random rotation: 64 values of a heavy tail stay apart from it."""
    x = gaussian(8, 256) ** 3
    small, large = (
        bias_of_means(torch.stack([sent(codec, x, key) for key in KEYS]), len(KEYS), x)
        for codec in (made("bits=2,group=64"), made("bits=2,group=256"))
    )
    by_chance = 0.36 / math.sqrt(len(KEYS))
    assert by_chance < large < small < 0.05


def test_decoded_tensor_has_the_length_of_the_tensor_along_it(draws):
    x, back = draws
    along = (back * x).sum(dim=(1, 2)) / x.square().sum()
    assert float(along.mean()) == pytest.approx(1, abs=4 * float(along.std()) / math.sqrt(len(back)))
    assert ((along - 1).abs() < 1 / 8).all(), "more than a scale's rounding"


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_scale_before_rounding_makes_every_tile_right_along_itself(bits):
    z = eden_reference.hadamard(gaussian(50, 64) ** 3)
    width, energy = torch.full((50,), bits, dtype=torch.int32), z.square().sum(dim=-1)
    index = magnitude_indices(z.abs(), (energy / 64).sqrt(), width)
    scale = eden_reference.unbiased_scale(z, index, width, energy)
    along = (magnitudes_of(index, width) * z.abs()).sum(dim=-1) * scale
    assert along.tolist() == pytest.approx(energy.tolist(), rel=1e-5)


def test_other_end_needs_the_same_key():
    codec, x = made("bits=4,group=64"), gaussian(8, 256)
    assert error(codec.decode(codec.encode(x, key=5), x.shape, key=5), x) < 0.15
    assert error(codec.decode(codec.encode(x, key=5), x.shape, key=6), x) > 1
    assert error(codec.decode(codec.encode(x, key=5), x.shape, key=5 + 2**32), x) > 1


@pytest.mark.parametrize("bits", ["1", "2", "2.5", "10/3", "7.9", "8"])
def test_budget_is_spent_exactly_and_decides_the_length(bits):
    codec = made(f"bits={bits},group=32")
    for shape in [(2, 3, 96), (7,), (5, 1), (3, 100), (1, 1001)]:
        x = gaussian(*shape)
        layout, tiles = TileLayout.of(codec.spec, shape), tiles_of(codec, x)
        assert int(tiles.width.sum()) == layout.num_planes == math.floor(codec.spec.bits * layout.tiling.num_tiles)
        sizes = (layout.tiling.num_tiles, -(-3 * layout.tiling.num_tiles // 8), layout.num_planes * 4)
        assert codec.encoded_nbytes(shape) == 16 + sum(-(-size // 16) * 16 for size in sizes)


def test_widths_follow_the_energy_of_tiles():
    x = gaussian(9, 64) * torch.exp2(torch.arange(9.0)).unsqueeze(-1)
    width = tiles_of(made("bits=4,group=64"), x).width
    assert (width.diff() >= 0).all()
    assert width[-1] >= width[0] + 5


@pytest.mark.parametrize("bits", range(1, 9))
def test_error_is_that_of_the_unbiased_gaussian_quantiser(bits):
    """√(D/(1 − D)): quantising loses the share D, and being unbiased costs the factor 1/(1 − D) in length."""
    x = gaussian(256, 256)
    x /= x.norm(dim=1, keepdim=True)  # so that tiles get equal bits
    squared = DISTORTIONS[bits - 1] / (1 - DISTORTIONS[bits - 1])
    largest_of_scale = (1 / 8) ** 2 / 4  # half-way between neighbours 1/8 apart, at random
    got = error(sent(made(f"bits={bits},group=256"), x), x) ** 2
    # A tile's own values spread a little less than a Gaussian's, whose ends fine levels reach out to.
    assert 0.9 * squared < got < 1.02 * squared + largest_of_scale


def test_error_falls_with_every_quarter_of_a_bit():
    x = gaussian(64, 128) * torch.exp2(gaussian(64, 1))
    errors = [error(sent(made(f"bits={quarters / 4},group=64"), x), x) for quarters in range(4, 24)]
    assert errors == sorted(errors, reverse=True)


def test_one_value_in_a_tile_comes_back_but_for_the_rounding_of_its_scale():
    """Its transform has one magnitude, which one level hits exactly."""
    x = torch.zeros(256, 256)
    x.fill_diagonal_(5.0)
    back = sent(made("bits=1"), x)
    assert ((back.diagonal() - 5).abs() <= 5 / 8).all()
    assert ((back - torch.diag(back.diagonal())).abs() < 1e-5).all()


@pytest.mark.parametrize("magnitude", [1e-42, 1e-38, 1e-20, 1.0, 1e20, 1e38])
def test_magnitude_does_not_matter(magnitude):
    x = gaussian(64, 64).clamp(-3, 3)
    back = sent(made("bits=4,group=64"), x * magnitude).double() / magnitude
    assert error(back, x.double()) < 0.16


def test_tile_that_is_not_finite_spoils_itself_only():
    codec, x = made("bits=2,group=64"), gaussian(4, 256)
    spoilt = x.clone()
    spoilt[1, 70] = math.nan
    back = sent(codec, spoilt)
    assert back[1, 64:128].isnan().all()
    assert back.isnan().sum() == 64
    tiles = tiles_of(codec, spoilt)
    assert (tiles.scale == small_scale.NOT_FINITE).nonzero().tolist() == [[5]]
    assert not tiles.codes[5].any()
    assert tiles.width[5] == 1, "it counts as a tile of zeros"


def test_tiny_tiles_beside_large_ones_become_zeros():
    x = gaussian(2, 64)
    x[1] *= 1e-30
    back = sent(made("bits=2,group=64"), x)
    assert not back[1].any()
    assert back[0].any()


@needs_fixture
@pytest.mark.parametrize(
    ("spec", "errors"), [("bits=2", (0.283, 0.283, 0.290)), ("bits=3,group=256", (0.140, 0.139, 0.135))]
)
def test_errors_on_boundary_gradients(spec, errors):
    for block, expected in zip((2, 5, 8), errors, strict=True):
        x = boundary()[f"grad_after_block_{block}"].float()
        assert error(sent(made(spec), x, key=7), x) == pytest.approx(expected, abs=0.002)


@needs_fixture
def test_bias_on_boundary_gradients_shrinks_with_draws_where_nearest_rounding_keeps_it():
    x = boundary()["grad_after_block_5"].float()[:, :64]
    codec, rounding = made("bits=2"), get_codec("fixed:bits=2", backend="reference")
    single = error(sent(codec, x), x)
    mean = torch.stack([sent(codec, x, key) for key in range(64)]).mean(dim=0)
    assert error(mean, x) == pytest.approx(single / 8, rel=0.1)
    assert error(sent(rounding, x), x) > single
