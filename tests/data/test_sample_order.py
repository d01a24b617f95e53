"""Which samples a step has, known without any data: the same as the stages with data have."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.data.batches import BatchSource
from tahq.data.sample_order import Cursor, SampleOrder


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("origin", [Cursor(), Cursor(step=3, sample=7, num_train_samples=10)])
def test_a_stage_without_data_knows_the_samples_of_every_micro_batch(tmp_path, byte_dataset, shuffle, origin):
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


def test_an_origin_that_only_says_where_it_is_will_do(byte_dataset):
    """As a stage without data learns it from the plan: the number of its next sample, of an epoch of this size."""
    whole = SampleOrder(100, True, 1, 8, 4)
    resumed = SampleOrder(100, True, 1, 8, 4, Cursor(step=30, sample=whole.cursor(30).sample, num_train_samples=100))
    assert all(np.array_equal(whole.sample_ids(step), resumed.sample_ids(step)) for step in range(30, 50))


@given(st.integers(1, 50), st.integers(1, 10), st.integers(0, 2**63 - 1))
def test_an_epoch_has_each_sample_once(num_samples, micro_batch, seed):
    order = SampleOrder(num_samples, True, seed, num_samples * micro_batch, micro_batch)
    ids = [number for part in order.micro_batches(0) for number in part]
    for epoch in range(micro_batch):
        assert sorted(ids[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))
