"""wf gives bits where a token needs them, takes the best step that it tries, and loses less than TAH at fewer bits."""

import math

import pytest
import torch
from support.boundary import boundary, needs_fixture

from tahq.quant import get_codec
from tahq.quant.gaussian import reference as wf_reference
from tahq.quant.gaussian import small_scale
from tahq.quant.gaussian.levels import DISTORTIONS, magnitude_indices, magnitudes_of
from tahq.quant.gaussian.tile_stream import TileLayout, unpack


def made(spec):
    return get_codec(f"wf:{spec}", backend="reference")


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sent(codec, x):
    return codec.decode(codec.encode(x), x.shape)


def error(back, x):
    return float((back - x).norm() / x.norm())


def parts_of(codec, x):
    return unpack(TileLayout.of(codec.spec, x.shape), codec.encode(x))


@pytest.mark.parametrize("bits", ["1", "2", "2.5", "10/3", "7.9", "8"])
@pytest.mark.parametrize("center", ["on", "off"])
def test_budget_is_spent_exactly_and_decides_the_length(bits, center):
    codec = made(f"bits={bits},group=32,center={center}")
    for shape in [(2, 3, 96), (7,), (5, 1), (3, 100), (1, 1001)]:
        layout, parts = TileLayout.of(codec.spec, shape), parts_of(codec, gaussian(*shape))
        num_tiles = layout.tiling.num_tiles
        assert int(parts.width.sum()) == layout.num_planes == math.floor(codec.spec.bits * num_tiles)
        mean = 2 * shape[-1] if center == "on" else 0
        sizes = (num_tiles, -(-3 * num_tiles // 8), mean, layout.num_planes * 4)
        assert codec.encoded_nbytes(shape) == 16 + sum(-(-size // 16) * 16 for size in sizes)


def test_bits_are_judged_within_the_token():
    codec, x = made("bits=3.5,group=16,center=off"), gaussian(8, 64) * torch.exp2(gaussian(8, 64))
    width = parts_of(codec, x).width
    louder = x * torch.exp2(torch.arange(8.0) - 4).unsqueeze(-1)
    assert torch.equal(parts_of(codec, louder).width, width)


def test_widths_follow_the_energy_of_tiles_in_a_token():
    x = (gaussian(6, 8, 16) * torch.exp2(torch.arange(8.0)).unsqueeze(-1)).view(6, 128)
    width = parts_of(made("bits=4,group=16,center=off"), x).width.view(6, 8).sum(dim=0)
    assert (width.diff() >= 0).all()
    assert width[-1] >= width[0] + 5 * 6


@pytest.mark.parametrize("bits", range(1, 9))
def test_error_is_that_of_the_gaussian_quantiser(bits):
    x = gaussian(256, 256)
    x /= x.norm(dim=1, keepdim=True)
    got = error(sent(made(f"bits={bits},group=256,center=off"), x), x)
    # The best of five steps fits a tile's own values, which at many bits is worth more than steps so coarse cost.
    assert 0.9 < got / math.sqrt(DISTORTIONS[bits - 1]) < 1.02


@pytest.mark.parametrize("center", ["on", "off"])
def test_error_falls_with_every_quarter_of_a_bit(center):
    x = gaussian(64, 128) * torch.exp2(gaussian(64, 1)) + gaussian(128, seed=1)
    errors = [error(sent(made(f"bits={quarters / 4},group=32,center={center}"), x), x) for quarters in range(4, 33)]
    assert errors == sorted(errors, reverse=True)


def test_scale_is_the_best_of_those_tried():
    magnitude = (gaussian(200, 16) ** 3).abs()
    energy, width = magnitude.square().mean(dim=-1), torch.randint(1, 9, (200,), dtype=torch.int32)
    chosen = wf_reference.best_scale(magnitude, energy, width)
    middle = small_scale.nearest_code(energy.sqrt())

    def loss(code):
        step = small_scale.value_of(code)
        levels = magnitudes_of(magnitude_indices(magnitude, step, width), width)
        return (magnitude - step.unsqueeze(-1) * levels).double().square().sum(dim=-1)

    assert ((chosen - middle).abs() <= 2).all()
    assert {*(chosen - middle).tolist()} == {-2, -1, 0, 1, 2}
    for aside in (-2, -1, 0, 1, 2):
        assert (loss(chosen) <= loss(middle + aside) * (1 + 1e-5)).all()


def test_means_of_channels_travel_apart():
    offset = 100 * gaussian(64, seed=1)
    x = gaussian(500, 64) + offset
    with_mean, without = (made(f"bits=3,group=64,center={center}") for center in ("on", "off"))
    parts = parts_of(with_mean, x)
    assert parts.mean.float() * 2.0 ** -int(parts.exponent) == pytest.approx(x.mean(dim=0), rel=2**-10)
    centred = x - offset
    assert float((sent(with_mean, x) - x).norm() / centred.norm()) < 0.25
    assert float((sent(without, x) - x).norm() / centred.norm()) > 5


def test_tokens_that_are_all_the_same_are_their_mean():
    x = gaussian(1, 100).expand(40, 100)
    # fp16 of the mean, and what a step of 2^−18 leaves of the rest.
    assert ((sent(made("bits=3"), x) - x).abs() <= x.abs().max() * 2**-11).all()


def test_constant_tile_without_centering_is_one_coefficient():
    x = torch.full((4, 64), 3.0)
    assert error(sent(made("bits=8,group=64,center=off"), x), x) < 0.8  # it is 8σ out, and levels end at 4.6σ
    assert error(sent(made("bits=8,group=64"), x), x) == 0


@pytest.mark.parametrize("magnitude", [1e-42, 1e-38, 1e-20, 1.0, 1e20, 1e38])
@pytest.mark.parametrize("center", ["on", "off"])
def test_magnitude_does_not_matter(magnitude, center):
    x = gaussian(64, 64).clamp(-3, 3)
    back = sent(made(f"bits=4,group=64,center={center}"), x * magnitude).double() / magnitude
    assert error(back, x.double()) < 0.11


@pytest.mark.parametrize("center", ["on", "off"])
def test_tile_that_is_not_finite_spoils_itself_only(center):
    codec, x = made(f"bits=3,group=64,center={center}"), gaussian(4, 256) + 2
    x[1, 70], x[2, 0] = math.nan, -math.inf
    back, parts = sent(codec, x), parts_of(codec, x)
    assert back[1, 64:128].isnan().all()
    assert back[2, :64].isnan().all()
    assert back.isnan().sum() == 128
    assert (parts.scale == small_scale.NOT_FINITE).nonzero().flatten().tolist() == [5, 8]
    assert not parts.codes[[5, 8]].any()
    if center == "on":
        clean = torch.where(x.view(4, 4, 64).isfinite().all(dim=-1, keepdim=True), x.view(4, 4, 64), 0.0)
        expected = (clean.view(4, 256) * 2.0 ** int(parts.exponent)).double().mean(dim=0)
        assert torch.equal(parts.mean, expected.float().half()), "it counts as zeros"


def test_mean_is_never_minus_zero():
    x = torch.tensor([[-0.0, 1.0], [-0.0, -1.0]]).repeat(1, 4)
    assert not parts_of(made("bits=3,group=8"), x).mean.signbit().any()


@needs_fixture
@pytest.mark.parametrize(
    ("spec", "errors"),
    [
        ("bits=3,group=64", (0.1379, 0.1482, 0.1579)),
        ("bits=3,group=128", (0.1414, 0.1532, 0.1635)),
        ("bits=3.5", (0.1101, 0.1206, 0.1301)),
    ],
)
def test_errors_on_boundary_activations(spec, errors):
    for block, expected in zip((2, 5, 8), errors, strict=True):
        x = boundary()[f"act_after_block_{block}"].float()
        assert error(sent(made(spec), x), x) == pytest.approx(expected, abs=0.0003)


@needs_fixture
@pytest.mark.parametrize("block", [2, 5, 8])
def test_beats_tah_with_fewer_bits(block):
    x = boundary()[f"act_after_block_{block}"].float()
    tah, wf = get_codec("tah", backend="reference"), made("bits=3.75")
    assert wf.encoded_nbytes(x.shape) < 0.88 * tah.encoded_nbytes(x.shape)
    assert error(sent(wf, x), x) < error(sent(tah, x), x)
