"""The order of samples: a keyed permutation per epoch, the same forever, known without any data."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.data.batches import BatchSource
from tahq.data.sample_order import Cursor, Permutation, SampleOrder, mix64, rescale


@pytest.mark.parametrize(("key", "stride"), [(0, 27), (1, 31), (2**64 - 1, 37)])
def test_permutation_is_a_bijection_for_sizes_up_to_2000(key, stride):
    for n in (*range(1, 30), *range(30, 2001, stride)):
        assert np.bincount(Permutation(n, key)(np.arange(n)), minlength=n).tolist() == [1] * n


@given(n=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), data=st.data())
def test_permutation_stays_in_range_and_apart_for_large_sizes(n, key, data):
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    places = Permutation(n, key)(np.array(positions)).tolist()
    assert len(set(places)) == len(places)
    assert 0 <= min(places) <= max(places) < n


def test_permutation_of_four_gives_all_orders_equally_often():
    num_keys = 1200
    keys = mix64(np.arange(num_keys, dtype=np.uint64))
    orders = Counter(tuple(Permutation(4, int(key))(np.arange(4)).tolist()) for key in keys)
    assert len(orders) == 24
    expected = num_keys / 24
    chi_squared = sum((seen - expected) ** 2 / expected for seen in orders.values())
    # 23 degrees of freedom: mean 23, standard deviation √(2·23) = 6.8; the bound is four of them above
    assert chi_squared < 23 + 4 * 6.8


def test_permutations_have_no_trace_of_the_input_order_or_of_neighbouring_keys():
    n = 20_000
    first, second = (Permutation(n, key)(np.arange(n)) for key in (10, 11))
    # the correlation of two independent orders has a standard deviation of 1/√n = 0.007
    assert abs(np.corrcoef(np.arange(n), first)[0, 1]) < 4 * 0.0071
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 * 0.0071
    # neighbours stay neighbours in a random order about twice: 2(n−1) pairs of places, each with chance 1/n
    assert (np.abs(np.diff(first)) == 1).sum() < 12
    assert (first == second).sum() < 10  # one on average


def test_permutation_equals_golden(golden):
    rows = [(n, key, Permutation(n, key)(np.arange(min(n, 16)))) for n in (1, 2, 7, 100, 10**12) for key in (0, 12345)]
    golden("data_permutation.txt", "".join(f"n={n} key={key}: {places.tolist()}\n" for n, key, places in rows))


def test_permutation_refuses_sizes_and_positions_out_of_range():
    for n in (0, -1, 2**62 + 1):
        with pytest.raises(ValueError, match="items"):
            Permutation(n, key=0)
    with pytest.raises(ValueError, match="position 5 is not below 5"):
        Permutation(5, key=0)(np.array([5]))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("origin", [Cursor(), Cursor(step=3, sample=7, num_train_samples=10)])
def test_stage_without_data_knows_the_samples_of_every_micro_batch(tmp_path, byte_dataset, shuffle, origin):
    path = tmp_path / "numbers.bin"
    path.write_bytes(b"".join(i.to_bytes(2, "little") for i in range(41)))
    dataset = byte_dataset(tokens=str(path), seq_len=4, validation=0.0, shuffle=shuffle)
    source = BatchSource(dataset, seed=5, global_batch=4, micro_batch=2, origin=origin)
    order = SampleOrder(dataset.num_train_samples, shuffle, 5, 4, 2, origin)
    assert order == source.order
    for step in range(origin.step, origin.step + 8):  # over three epochs of ten samples
        batch = source.train(step)
        assert order.micro_batches(step) == [batch.micro_batch_sample_ids(index).tolist() for index in range(2)]
        assert order.cursor(step) == source.cursor(step)


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 10**6))
def test_rescale_keeps_epoch_and_place(sample, old, new):
    cursor = rescale(Cursor(3, sample, old), new)
    assert cursor.step == 3
    assert cursor.sample // new == sample // old
    assert abs(cursor.sample % new / new - sample % old / old) <= 1 / new
    assert rescale(Cursor(3, sample, old), old) == Cursor(3, sample, old)
    assert rescale(Cursor(1, sample), old) == Cursor(1, sample, old)  # without the length of an epoch
