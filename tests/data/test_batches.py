"""Batches: a function of (data, seed, step), each sample once an epoch, resumable to the sample."""

import os
import subprocess
import sys

import pytest
import torch

from tahq.data.batches import BatchSource, batch_digest
from tahq.data.dataset import Dataset
from tahq.data.sample_order import Cursor
from tahq.errors import DataError


@pytest.fixture
def dataset(text_file, byte_dataset):
    return byte_dataset(text=str(text_file), seq_len=64, validation=0.1)


@pytest.fixture
def numbers(tmp_path, byte_dataset):
    """Ten samples of four tokens; sample i begins with 4i."""
    path = tmp_path / "numbers.bin"
    path.write_bytes(b"".join(i.to_bytes(2, "little") for i in range(41)))
    return byte_dataset(tokens=str(path), seq_len=4, validation=0.0)


def source(dataset: Dataset, **options) -> BatchSource:
    return BatchSource(dataset, **{"seed": 0, "global_batch": 4, "micro_batch": 2, **options})


def ids(batches: BatchSource, steps: range) -> list[int]:
    return [number for step in steps for number in batches.train(step).sample_ids.tolist()]


def test_batch_has_labels_one_ahead_of_tokens(dataset):
    batch = source(dataset).train(3)
    assert batch.tokens.shape == batch.labels.shape == (4, 64)
    assert batch.tokens.dtype == batch.labels.dtype == batch.sample_ids.dtype == torch.int64
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.num_tokens == 4 * 64


def test_micro_batches_are_views_of_the_batch(dataset):
    batch = source(dataset).train(0)
    tokens, labels = batch.micro_batch(1)
    assert torch.equal(tokens, batch.tokens[2:])
    assert torch.equal(labels, batch.labels[2:])
    assert tokens.data_ptr() == batch.tokens[2].data_ptr()
    assert batch.micro_batch_sample_ids(1).tolist() == batch.sample_ids[2:].tolist()
    with pytest.raises(IndexError, match="micro-batch 2 of 2"):
        batch.micro_batch(2)


def test_every_epoch_has_each_sample_once_in_another_order(numbers):
    order = ids(source(numbers), range(10))  # 40 samples are 4 epochs of 10
    epochs = [order[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_batch_over_the_end_of_an_epoch_loses_nothing_and_repeats_nothing(numbers):
    batches = source(numbers, global_batch=7, micro_batch=7)
    order = ids(batches, range(10))  # 70 samples are 7 epochs, whose ends lie within batches
    assert all(sorted(order[i : i + 10]) == list(range(10)) for i in range(0, 70, 10))
    assert order == ids(source(numbers, global_batch=5, micro_batch=5), range(14))


def test_samples_come_in_order_without_shuffle(tmp_path, numbers, byte_dataset):
    plain = byte_dataset(tokens=str(tmp_path / "numbers.bin"), seq_len=4, validation=0.0, shuffle=False)
    assert ids(source(plain), range(5)) == list(range(10)) * 2
    assert source(plain).train(0).tokens[:, 0].tolist() == [0, 4, 8, 12]


def test_digest_names_the_batch_and_covers_tokens_labels_and_ids(dataset):
    digests = {source(dataset, seed=seed).train(step).digest for seed in (0, 1) for step in (0, 1, 2)}
    assert len(digests) == 6
    batch = source(dataset).train(0)
    arrays = [t.numpy() for t in (batch.tokens, batch.labels, batch.sample_ids)]
    assert batch_digest(*arrays) == batch.digest
    for index in range(3):
        changed = [array.copy() for array in arrays]
        changed[index].reshape(-1)[-1] += 1
        assert batch_digest(*changed) != batch.digest


SCRIPT = """
import sys
from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
config = DataConfig(text=sys.argv[1], seq_len=64, validation=0.1)
dataset = load_dataset(config, load_tokenizer(config))
batches = BatchSource(dataset, seed=0, global_batch=4, micro_batch=2)
print(dataset.fingerprint, *(batches.train(step).digest for step in range(5)), batches.validation(0).digest)
"""


@pytest.mark.acceptance
def test_two_processes_with_other_hash_seeds_agree(dataset, text_file):
    command = [sys.executable, "-c", SCRIPT, str(text_file)]
    runs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]
    outputs = [run.communicate(timeout=120)[0].split() for run in runs]
    batches = source(dataset)
    here = [dataset.fingerprint, *(batches.train(step).digest for step in range(5)), batches.validation(0).digest]
    assert outputs == [here, here]


def test_order_of_batches_equals_golden(numbers, golden):
    rows = [(seed, step, source(numbers, seed=seed).train(step)) for seed in (0, 2**63 - 1) for step in range(4)]
    lines = [f"seed={seed} step={step}: {b.sample_ids.tolist()} {b.digest}\n" for seed, step, b in rows]
    golden("data_order.txt", f"{numbers.fingerprint}\n" + "".join(lines))


def test_resumed_source_continues_where_the_cursor_stands(numbers):
    whole = source(numbers)
    resumed = source(numbers, origin=whole.cursor(7))
    assert whole.cursor(7) == Cursor(step=7, sample=28, num_train_samples=10)
    assert [resumed.train(s).digest for s in range(7, 12)] == [whole.train(s).digest for s in range(7, 12)]
    assert resumed.cursor(9) == whole.cursor(9)


def test_resume_with_another_batch_continues_at_the_same_sample(numbers):
    whole = source(numbers, global_batch=2)
    resumed = source(numbers, global_batch=6, origin=whole.cursor(7))
    assert ids(resumed, range(7, 9)) == ids(whole, range(7, 13))
    assert resumed.cursor(8) == Cursor(step=8, sample=20, num_train_samples=10)


def test_resume_with_another_length_continues_at_the_same_place_in_the_epoch(text_file, byte_dataset):
    old, new = (byte_dataset(text=str(text_file), seq_len=n, validation=0.1) for n in (64, 32))
    before = source(old)
    step = old.num_train_samples * 3 // 2 // 4  # one epoch and a half
    after = source(new, origin=before.cursor(step))
    assert after.cursor(step).num_train_samples == new.num_train_samples
    assert abs(after.epoch(step) - before.epoch(step)) < 1 / new.num_train_samples


def test_step_before_the_origin_is_refused(numbers):
    with pytest.raises(ValueError, match="step 4 lies before step 5"):
        source(numbers, origin=Cursor(5, 20)).train(4)


def test_validation_covers_the_split_once_then_counts_nothing(dataset):
    batches = source(dataset)
    assert source(dataset, seed=1).validation(0).digest == batches.validation(0).digest  # whatever the seed
    held_out = dataset.num_validation_samples
    assert held_out % 4 != 0, "the last batch should be a partial one"
    every = [batches.validation(i) for i in range(-(-held_out // 4) + 2)]
    assert all(batch.tokens.shape == (4, 64) for batch in every)
    assert sum(batch.num_tokens for batch in every) == held_out * 64
    assert [batch.num_tokens for batch in every[-2:]] == [0, 0]
    scored = [int(n) for b in every for n, row in zip(b.sample_ids, b.labels, strict=True) if (row != -100).any()]
    assert sorted(scored) == list(range(dataset.num_train_samples, dataset.num_train_samples + held_out))


def test_a_few_validation_batches_are_spread_over_the_split(dataset):
    batches = source(dataset)
    few = torch.cat([batches.validation(i).sample_ids for i in range(3)]) - dataset.num_train_samples
    assert few.min() < dataset.num_validation_samples / 3
    assert few.max() > dataset.num_validation_samples * 2 / 3


def test_validation_without_samples_is_refused(numbers):
    with pytest.raises(DataError, match="no validation samples"):
        source(numbers).validation(0)


def test_batch_larger_than_an_epoch_is_refused_with_numbers(numbers):
    with pytest.raises(DataError, match=r"10 training samples of seq_len 4 are fewer than training.global_batch 12"):
        source(numbers, global_batch=12)
