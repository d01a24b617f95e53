"""The figures that the design quotes for the paper's TAH, on boundary tensors of a trained GPT-2 small.

Where only an excerpt of them is at hand, figures are about these.
"""

import pytest
import torch
from support.boundary import FIXTURE, boundary_or_excerpt

from tahq.quant import get_codec
from tahq.quant.spec import TahSpec
from tahq.quant.tah.stream import TahLayout, unpack


def quoted(figure):
    return figure if FIXTURE.exists() else pytest.approx(figure, rel=0.12)


def relative_error(back, x):
    return ((back.float() - x.float()).norm() / x.float().norm()).item()


def codec_error(x, spec="tah"):
    codec = get_codec(spec)
    return relative_error(codec.decode(codec.encode(x), x.shape), x)


@pytest.mark.parametrize(("block", "error"), [(2, 0.148), (5, 0.136), (8, 0.129)])
def test_activation_error_is_the_quoted_one(block, error):
    assert round(codec_error(boundary_or_excerpt()[f"act_after_block_{block}"]), 3) == quoted(error)


@pytest.mark.parametrize(("block", "error"), [(2, 0.132), (5, 0.124), (8, 0.121)])
def test_gradient_error_is_at_most_the_quoted_one(block, error):
    assert round(codec_error(boundary_or_excerpt()[f"grad_after_block_{block}"]), 3) == quoted(error)


def test_bits_outliers_and_code_entropy_are_the_quoted_ones():
    shares, entropies = [], []
    for name, x in boundary_or_excerpt().items():
        buf = get_codec("tah").encode(x)
        assert buf.numel() * 8 / x.numel() == pytest.approx(4.41, abs=0.005)
        tiles = unpack(TahLayout.of(TahSpec(), x.shape), buf)
        codes = tiles.codes.flatten(1, 2)
        entropies.append(0.8 * code_entropy(codes[tiles.high]) + 0.2 * code_entropy(codes[~tiles.high]))
        if name.startswith("act"):
            shares.append(tiles.transformed.float().mean().item())
    if FIXTURE.exists():  # an excerpt has too few tiles
        assert 0.01 < min(shares) < 0.02 < max(shares) < 0.025  # about one tile in fifty
    assert (round(min(entropies), 2), round(max(entropies), 2)) == (quoted(3.47), quoted(3.54))


def code_entropy(codes):
    share = torch.bincount(codes.flatten().long(), minlength=16) / codes.numel()
    return -torch.special.xlogy(share, share).sum().item() / torch.log(torch.tensor(2.0)).item()


def test_transforming_every_tile_lowers_the_squared_error():
    assert round(codec_error(boundary_or_excerpt()["act_after_block_2"], "tah:tau=0"), 3) == quoted(0.111)
