"""The keyed permutation: a bijection, well mixed, and the same for ever."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.data.sample_order import Permutation, mix64


@pytest.mark.parametrize(("key", "stride"), [(0, 7), (1, 11), (2**64 - 1, 13)])
def test_permutation_is_a_bijection_for_every_size_up_to_2000(key: int, stride: int) -> None:
    for n in range(1, 2001, stride):
        assert np.bincount(Permutation(n, key)(np.arange(n)), minlength=n).tolist() == [1] * n


@given(n=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), data=st.data())
def test_permutation_stays_in_range_and_apart_for_large_sizes(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    places = Permutation(n, key)(np.array(positions)).tolist()
    assert len(set(places)) == len(places)
    assert 0 <= min(places) <= max(places) < n


def test_permutation_of_part_is_part_of_permutation() -> None:
    permutation = Permutation(1000, key=7)
    whole = permutation(np.arange(1000))
    assert permutation(np.arange(990, 1000)).tolist() == whole[990:].tolist()
    assert permutation(np.arange(12).reshape(3, 4)).shape == (3, 4)


def test_permutation_of_four_gives_all_orders_equally_often() -> None:
    num_keys = 1200
    orders = Counter(tuple(Permutation(4, int(key))(np.arange(4)).tolist()) for key in mix64(_numbers(num_keys)))
    assert len(orders) == 24
    expected = num_keys / 24
    chi_squared = sum((seen - expected) ** 2 / expected for seen in orders.values())
    # 23 degrees of freedom: mean 23, standard deviation √(2·23) = 6.8; the bound is four of them above
    assert chi_squared < 23 + 4 * 6.8


def test_permutation_has_no_trace_of_the_input_order() -> None:
    n = 20_000
    places = Permutation(n, key=3)(np.arange(n))
    # the correlation of two independent orders has a standard deviation of 1/√n = 0.007
    assert abs(np.corrcoef(np.arange(n), places)[0, 1]) < 4 * 0.0071
    # neighbours stay neighbours in a random order about twice: 2(n−1) pairs of places, each with chance 1/n
    assert (np.abs(np.diff(places)) == 1).sum() < 12


def test_permutations_of_neighbouring_keys_are_unrelated() -> None:
    n = 20_000
    first, second = (Permutation(n, key)(np.arange(n)) for key in (10, 11))
    assert (first == second).sum() < 10  # one on average
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 * 0.0071


def test_permutation_equals_golden(golden: Callable[[str, str], None]) -> None:
    rows = [(n, key, Permutation(n, key)(np.arange(min(n, 16)))) for n in (1, 2, 7, 100, 10**12) for key in (0, 12345)]
    golden("data_permutation.txt", "".join(f"n={n} key={key}: {places.tolist()}\n" for n, key, places in rows))


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_permutation_refuses_size_out_of_range(n: int) -> None:
    with pytest.raises(ValueError, match="items"):
        Permutation(n, key=0)


def test_permutation_refuses_position_out_of_range() -> None:
    with pytest.raises(ValueError, match="position 5 is not below 5"):
        Permutation(5, key=0)(np.array([5]))


def _numbers(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint64)
