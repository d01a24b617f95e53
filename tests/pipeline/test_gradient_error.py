"""Sums from which relative error and cosine follow."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tahq.pipeline.probe.result import ErrorSums, compare

VECTORS = arrays.arrays("float32", st.integers(1, 12), elements=st.floats(-1e3, 1e3, width=32))


def sums(g: list[float], compressed: list[float]) -> ErrorSums:
    reference, other = torch.tensor(g), torch.tensor(compressed)
    return compare({"w": reference}, {"w": other - reference})


def test_the_example_of_the_docstring():
    measured = sums([3.0, 4.0], [3.0, 5.0])
    assert (measured.signal, measured.error, measured.product) == (25.0, 1.0, 4.0)
    assert measured.relative == 0.04
    assert measured.cosine == pytest.approx(29 / (5 * math.sqrt(34)), rel=1e-15)


@given(VECTORS, st.data())
@settings(deadline=None)
def test_figures_are_those_of_the_vectors(g, data):
    other = data.draw(arrays.arrays("float32", g.shape, elements=st.floats(-1e3, 1e3, width=32)))
    measured = compare({"w": torch.from_numpy(g)}, {"w": torch.from_numpy(other - g)})
    g64, other64 = g.astype("float64"), g.astype("float64") + (other - g).astype("float64")
    lengths = math.sqrt(g64 @ g64) * math.sqrt(other64 @ other64)
    if (other - g).any() and g.any():
        assert measured.relative == pytest.approx(((other64 - g64) @ (other64 - g64)) / (g64 @ g64), rel=1e-12)
    if lengths > 1e-3:
        # |ĝ|² comes from three sums of up to 1e7, each rounded at 1e-16 of it
        assert measured.cosine == pytest.approx(g64 @ other64 / lengths, abs=1e-6)


def test_parameters_add_up_to_the_model():
    g, e = torch.randn(40), torch.randn(40)
    parts = compare({"a": g[:7], "b": g[7:].view(3, 11)}, {"a": e[:7], "b": e[7:].view(3, 11)})
    together = compare({"all": g}, {"all": e})
    assert parts.relative == pytest.approx(together.relative, rel=1e-12)
    assert ErrorSums.over([together, together]).error == 2 * together.error


@pytest.mark.parametrize(
    ("g", "compressed", "relative", "cosine"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 1.0),
        ([1.0, 0.0], [0.0, 0.0], 1.0, 0.0),
        ([1.0, 2.0], [-1.0, -2.0], 4.0, -1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 1.0),
        ([0.0, 0.0], [1.0, 0.0], math.inf, 0.0),
        ([1.0, 2.0], [math.inf, 2.0], math.inf, math.nan),
        ([1.0, 2.0], [math.nan, 2.0], math.inf, math.nan),
    ],
)
def test_extremes(g, compressed, relative, cosine):
    measured = sums(g, compressed)
    assert measured.relative == relative
    assert measured.cosine == pytest.approx(cosine, nan_ok=True)


def test_what_is_not_finite_stays_so_in_the_sum_over_parts():
    parts = [sums([1.0, 2.0], [math.inf, 0.0]), sums([1.0, 2.0], [1.0, 2.0])]
    assert ErrorSums.over(parts).relative == math.inf


def test_no_parameters_have_no_error():
    assert compare({}, {}) == ErrorSums(0.0, 0.0, 0.0)
    assert ErrorSums.over([]).relative == 0.0
