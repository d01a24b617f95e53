"""What a comparison reports is what the codec does: checked against plain arithmetic on its own encode and decode."""

import itertools
import math

import pytest
import torch

from tahq.errors import CodecError
from tahq.quant import get_codec
from tahq.quant.comparison import USUAL_SPECS, compare, relative_error_bound
from tahq.randomness import derive_seed


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def report(x, spec, **options):
    return compare(x, [spec], backend="reference", **options)[0]


def test_deterministic_codec_is_measured_once_and_exactly():
    x = gaussian(2, 5, 100)
    zeros = x.clone()
    zeros[0, 1] = 0  # a token of zeros has no relative error
    assert report(zeros, "fixed:bits=8").worst_token_error < 0.02
    assert report(torch.full((1, 8), 1e6), "raw:dtype=fp16").relative_error == math.inf
    got = report(x, "tah")
    codec = get_codec("tah", backend="reference")
    buf = codec.encode(x)
    back = codec.decode(buf, x.shape)
    error = (back - x).double()
    assert (got.spec, got.nbytes, got.draws) == (str(codec.spec), buf.numel(), 1)
    assert got.bits_per_element == 8 * buf.numel() / 1000
    assert got.relative_error == got.bias == pytest.approx(float(error.norm() / x.double().norm()))
    assert got.max_error == float(error.abs().max())
    assert got.cosine == pytest.approx(float(torch.cosine_similarity(back.flatten(), x.flatten(), dim=0)), rel=1e-5)
    assert got.worst_token_error == pytest.approx(float((error.norm(dim=-1) / x.double().norm(dim=-1)).max()))
    assert got.gaussian_bound == relative_error_bound(x, got.bits_per_element)


def test_stateful_codec_remembers_nothing_of_a_comparison():
    assert report(gaussian(2, 64), "aqsgd").bits_per_element > 16  # a first visit, in every repetition


def test_unbiased_codec_has_an_error_and_no_bias():
    """32 draws: the estimate of bias² spreads by about error²·√2/(32·√N), N = 25,600; its root stays below error/50."""
    x = gaussian(4, 64, 100)
    got = report(x, "fixed:bits=3,round=stochastic", draws=32)
    assert got.draws == 32
    assert got.relative_error > 0.2
    assert got.bias < got.relative_error / 50


def test_bias_of_a_biased_randomised_codec_is_found(monkeypatch):
    """A codec that returns 0.9·x, give or take 0.5·x by its key: bias 0.1, error √(0.01 + 0.25)."""
    x = gaussian(2, 64)

    class Shrinking:
        spec = "shrinking"
        is_keyed = True

        def encode(self, x, *, key=0):
            return torch.full((8,), key & 1, dtype=torch.uint8)

        def decode(self, buf, shape, dtype=torch.float32, *, key=0):
            return (x * (1.4 if buf[0] else 0.4)).to(dtype)

    draws = 64
    ones = sum(derive_seed(0, "codec comparison", draw) & 1 for draw in range(draws))
    monkeypatch.setattr("tahq.quant.comparison.get_codec", lambda *_, **__: Shrinking())
    got = compare(x, ["shrinking"], draws=draws)[0]
    errors = [0.4] * ones + [-0.6] * (draws - ones)
    pairs = sum(errors) ** 2 - sum(e * e for e in errors)
    assert got.relative_error == pytest.approx(math.sqrt(sum(e * e for e in errors) / draws))
    assert got.bias == pytest.approx(math.sqrt(max(0, pairs) / (draws * (draws - 1))), abs=1e-6)
    assert got.bias < 0.25


def test_speed_is_elements_by_the_fastest_repetition():
    ticks = itertools.count()
    got = report(gaussian(2, 64), "raw:dtype=fp16", repeats=2, clock=lambda: 0.5 * next(ticks))
    assert got.encode_elements_per_s == got.decode_elements_per_s == 128 / 0.5


def test_usual_specs_are_measured_in_order():
    got = compare(gaussian(2, 64).bfloat16(), backend="reference", repeats=1)
    assert [each.spec for each in got] == [str(get_codec(spec).spec) for spec in USUAL_SPECS]
    assert all(each.relative_error > each.gaussian_bound for each in got)


@pytest.mark.parametrize(
    ("x", "part"),
    [
        (torch.zeros(2, 64), "all zeros"),
        (torch.empty(0, 64), "no elements"),
        (torch.tensor([[1.0, math.nan, math.inf]]), "2 of 3"),
        (torch.ones(2, 2, dtype=torch.float64), "a codec takes"),
    ],
)
def test_tensor_without_errors_to_measure_is_refused(x, part):
    with pytest.raises(CodecError, match=part):
        compare(x)
