"""`eden` is unbiased, `wf` is accurate for each token; both lose as much as a Gaussian quantiser."""

import math

import pytest
import torch
from support.boundary import boundary, needs_fixture

from tahq.quant import get_codec
from tahq.quant.gaussian import small_scale
from tahq.quant.gaussian.levels import DISTORTIONS
from tahq.quant.gaussian.tile_stream import TileLayout, unpack

KEYS = range(0, 2**63, 2**63 // 255)
CODECS = ("eden:", "wf:center=on,", "wf:center=off,")
every_codec = pytest.mark.parametrize("name", CODECS)


def made(spec):
    return get_codec(spec, backend="reference")


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sent(codec, x, key=0):
    return codec.decode(codec.encode(x, key=key), x.shape, key=key)


def error(back, x):
    return float((back - x).norm() / x.norm())


def parts_of(codec, x):
    return unpack(TileLayout.of(codec.spec, x.shape), codec.encode(x))


@pytest.mark.parametrize("bits", range(1, 9))
def test_error_is_that_of_the_gaussian_quantiser(bits):
    """`eden`: √(D/(1 − D)), as quantising loses the share D, and being unbiased costs 1/(1 − D) in length."""
    x = gaussian(256, 256)
    x /= x.norm(dim=1, keepdim=True)  # so that tiles get equal bits
    squared = DISTORTIONS[bits - 1] / (1 - DISTORTIONS[bits - 1])
    largest_of_scale = (1 / 8) ** 2 / 4  # half-way between neighbours 1/8 apart, at random
    # A tile's own values spread a little less than a Gaussian's, whose ends fine levels reach out to.
    got = error(sent(made(f"eden:bits={bits},group=256"), x), x) ** 2
    assert 0.9 * squared < got < 1.02 * squared + largest_of_scale
    # The best of five steps fits a tile's own values, which at many bits is worth more than steps so coarse cost.
    got = error(sent(made(f"wf:bits={bits},group=256,center=off"), x), x)
    assert 0.9 < got / math.sqrt(DISTORTIONS[bits - 1]) < 1.02


@every_codec
def test_error_falls_with_every_quarter_of_a_bit(name):
    x = gaussian(64, 128) * torch.exp2(gaussian(64, 1)) + gaussian(128, seed=1) * ("on" in name)
    quarters = range(4, 24 if name == "eden:" else 33)
    errors = [error(sent(made(f"{name}bits={quarter / 4},group=64"), x), x) for quarter in quarters]
    assert errors == sorted(errors, reverse=True)


@every_codec
@pytest.mark.parametrize("magnitude", [1e-42, 1e-38, 1.0, 1e38])
def test_magnitude_does_not_matter(name, magnitude):
    x = gaussian(64, 64).clamp(-3, 3)
    back = sent(made(f"{name}bits=4,group=64"), x * magnitude).double() / magnitude
    assert error(back, x.double()) < (0.16 if name == "eden:" else 0.11)


@every_codec
def test_tile_that_is_not_finite_spoils_itself_only(name):
    codec, x = made(f"{name}bits=3,group=64"), gaussian(4, 256) + 2
    x[1, 70], x[2, 0] = math.nan, -math.inf
    back, parts = sent(codec, x), parts_of(codec, x)
    assert back[1, 64:128].isnan().all()
    assert back[2, :64].isnan().all()
    assert back.isnan().sum() == 128
    assert (parts.scale == small_scale.NOT_FINITE).nonzero().flatten().tolist() == [5, 8]
    assert not parts.codes[[5, 8]].any()
    if "on" in name:
        clean = torch.where(x.view(4, 4, 64).isfinite().all(dim=-1, keepdim=True), x.view(4, 4, 64), 0.0)
        expected = (clean.view(4, 256) * 2.0 ** int(parts.exponent)).double().mean(dim=0)
        assert torch.equal(parts.mean, expected.float().half()), "it counts as zeros"


def test_widths_follow_the_energy_of_tiles_and_wf_judges_them_within_the_token():
    x = gaussian(9, 64) * torch.exp2(torch.arange(9.0)).unsqueeze(-1)
    width = parts_of(made("eden:bits=4,group=64"), x).width
    assert (width.diff() >= 0).all()
    assert width[-1] >= width[0] + 5
    codec = made("wf:bits=4,group=16,center=off")
    x = (gaussian(6, 8, 16) * torch.exp2(torch.arange(8.0)).unsqueeze(-1)).view(6, 128)
    by_column = parts_of(codec, x).width.view(6, 8).sum(dim=0)
    assert (by_column.diff() >= 0).all()
    assert by_column[-1] >= by_column[0] + 5 * 6
    louder = x * torch.exp2(torch.arange(6.0) - 4).unsqueeze(-1)
    assert torch.equal(parts_of(codec, louder).width, parts_of(codec, x).width)


@pytest.fixture(scope="module", params=[1, 2.5])
def draws(request):
    """A tensor, and what it decodes to under many keys."""
    codec, x = made(f"eden:bits={request.param},group=256"), gaussian(16, 256) * torch.exp2(gaussian(16, 1)) + 0.3
    return x, torch.stack([sent(codec, x, key) for key in KEYS])


def bias_of_means(back, count, x):
    """Root mean square of the error that is left in means of this many draws."""
    means = back[: len(back) // count * count].view(-1, count, *x.shape).mean(dim=1)
    return float((means - x).norm(dim=(1, 2)).square().mean().sqrt() / x.norm())


def test_mean_over_keys_approaches_the_tensor_as_one_over_the_root_of_the_draws(draws):
    x, back = draws
    single = float((back - x).norm(dim=(1, 2)).square().mean().sqrt() / x.norm())
    for count in (16, 64, len(back)):
        # Of N independent errors; the square of its norm, over 4,096 values, varies by a few per cent.
        assert bias_of_means(back, count, x) * math.sqrt(count) == pytest.approx(single, rel=0.1)


def test_decoded_tensor_has_the_length_of_the_tensor_along_it(draws):
    x, back = draws
    along = (back * x).sum(dim=(1, 2)) / x.square().sum()
    assert float(along.mean()) == pytest.approx(1, abs=4 * float(along.std()) / math.sqrt(len(back)))
    assert ((along - 1).abs() < 1 / 8).all(), "more than a scale's rounding"


def test_means_of_channels_travel_separately():
    offset = 100 * gaussian(64, seed=1)
    x = gaussian(500, 64) + offset
    with_mean, without = (made(f"wf:bits=3,group=64,center={center}") for center in ("on", "off"))
    parts = parts_of(with_mean, x)
    assert parts.mean.float() * 2.0 ** -int(parts.exponent) == pytest.approx(x.mean(dim=0), rel=2**-10)
    assert float((sent(with_mean, x) - x).norm() / (x - offset).norm()) < 0.25
    assert float((sent(without, x) - x).norm() / (x - offset).norm()) > 5
    same = gaussian(1, 100).expand(40, 100)  # fp16 of the mean, and what a step of 2^−18 leaves of the rest
    assert ((sent(made("wf:bits=3"), same) - same).abs() <= same.abs().max() * 2**-11).all()
    negative_zero = torch.tensor([[-0.0, 1.0], [-0.0, -1.0]]).repeat(1, 4)
    assert not parts_of(made("wf:bits=3,group=8"), negative_zero).mean.signbit().any()


@needs_fixture
@pytest.mark.parametrize(
    ("spec", "kind", "errors", "tolerance"),
    [
        ("eden:bits=2", "grad", (0.283, 0.283, 0.290), 0.002),
        ("eden:bits=3,group=256", "grad", (0.140, 0.139, 0.135), 0.002),
        ("wf:bits=3,group=64", "act", (0.1379, 0.1482, 0.1579), 0.0003),
        ("wf:bits=3,group=128", "act", (0.1414, 0.1532, 0.1635), 0.0003),
        ("wf:bits=3.5", "act", (0.1101, 0.1206, 0.1301), 0.0003),
    ],
)
def test_errors_on_boundary_tensors(spec, kind, errors, tolerance):
    for block, expected in zip((2, 5, 8), errors, strict=True):
        x = boundary()[f"{kind}_after_block_{block}"].float()
        assert error(sent(made(spec), x, key=7), x) == pytest.approx(expected, abs=tolerance)


@needs_fixture
@pytest.mark.parametrize("block", [2, 5, 8])
def test_wf_beats_tah_with_fewer_bits(block):
    x = boundary()[f"act_after_block_{block}"].float()
    tah, wf = made("tah"), made("wf:bits=3.75")
    assert wf.encoded_nbytes(x.shape) < 0.88 * tah.encoded_nbytes(x.shape)
    assert error(sent(wf, x), x) < error(sent(tah, x), x)
