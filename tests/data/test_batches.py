"""Batches: a function of (data, seed, step), each sample once an epoch, resumable to the sample."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.data.batches import BatchSource, batch_digest
from tahq.data.config import DataConfig
from tahq.data.dataset import Dataset, fingerprint_of, load_dataset, load_validation
from tahq.data.sample_order import Cursor, Permutation, SampleOrder, rescale
from tahq.data.tokenizer import BytesTokenizer
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
    step = old.num_train_samples * 3 // 2 // 4  # one epoch and a half
    was = source(old).cursor(step)
    now = source(new, origin=was).cursor(step)
    assert now.num_train_samples == new.num_train_samples
    assert abs(now.sample / now.num_train_samples - was.sample / was.num_train_samples) < 1 / new.num_train_samples


def test_step_before_the_origin_is_refused(numbers):
    with pytest.raises(ValueError, match="step 4 lies before step 5"):
        source(numbers, origin=Cursor(5, 20)).train(4)


def test_validation_covers_the_split_once_then_counts_nothing(dataset):
    batches = source(dataset)
    assert source(dataset, seed=1).validation(0).digest == batches.validation(0).digest  # for every seed
    held_out = dataset.num_validation_samples
    assert held_out % 4 != 0, "the last batch should be a partial one"
    every = [batches.validation(i) for i in range(-(-held_out // 4) + 2)]
    assert all(batch.tokens.shape == (4, 64) for batch in every)
    assert sum(batch.num_tokens for batch in every) == held_out * 64
    assert [batch.num_tokens for batch in every[-2:]] == [0, 0]
    scored = [int(n) for b in every for n, row in zip(b.sample_ids, b.labels, strict=True) if (row != -100).any()]
    assert sorted(scored) == list(range(dataset.num_train_samples, dataset.num_train_samples + held_out))
    few = [number - dataset.num_train_samples for number in scored[:12]]  # spread over the split: a fair sample
    assert min(few) < held_out / 3 < held_out * 2 / 3 < max(few)


def test_several_validation_sets_have_their_own_samples_and_hold_out_only_the_share(tmp_path, text_file):
    (tmp_path / "other.txt").write_text("something else " * 100)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 5)
    files = {"other": str(tmp_path / "other.txt"), "pairs": [str(tmp_path / "pairs.jsonl")]}
    config, tokenizer = DataConfig(text=str(text_file), seq_len=64, validation={**files, "own": 0.1}), BytesTokenizer()
    alone = config.model_copy(update={"validation": 0.1})
    dataset, plain = load_dataset(config, tokenizer), load_dataset(alone, tokenizer)
    sets = load_validation(config, dataset, tokenizer)
    batches = source(dataset, sets=sets)
    assert [(each.name, each.num_samples) for each in sets] == [
        ("own", plain.num_validation_samples),
        *(("other", 23), ("pairs", 5)),
    ]
    assert batches.train(0).digest == source(plain).train(0).digest
    assert batches.validation(0, 0).digest == source(plain).validation(0).digest
    assert bytes(batches.validation(0, 1).tokens[0].tolist()) in b"something else " * 10
    assert [batches.validation(index, 2).num_tokens for index in range(3)] == [8, 2, 0]  # b and the end, of five
    assert fingerprint_of(plain, load_validation(alone, plain, tokenizer)) == plain.fingerprint
    assert fingerprint_of(dataset, sets) != fingerprint_of(dataset, sets[:2]) != dataset.fingerprint


def test_validation_set_of_records_shares_rows_if_the_training_data_does(tmp_path, text_file):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "ab", "response": "cd"}\n' * 8)
    sets = {"other": str(text_file), "pairs": str(pairs)}
    for packing in (True, False):
        config = DataConfig(records=str(pairs), seq_len=16, packing=packing, validation=sets)
        dataset = load_dataset(config, BytesTokenizer())
        other, packed = load_validation(config, dataset, BytesTokenizer())
        batches = source(dataset, sets=(other, packed), global_batch=2, micro_batch=2)
        assert other.dataset.positions(np.arange(2)) is None
        assert batches.validation(0, 0).micro_batch_positions(0) is None
        assert (batches.validation(0, 1).micro_batch_positions(0) is not None) == packing
        assert packed.num_samples < 8 if packing else packed.num_samples == 8


def test_missing_file_of_a_validation_set_is_named_by_its_key(text_file, byte_dataset):
    config = DataConfig(text=str(text_file), validation={"books": "nowhere.txt"})
    with pytest.raises(DataError, match=r"^data\.validation\.books: no such file or folder: nowhere\.txt"):
        load_validation(config, byte_dataset(text=str(text_file)), BytesTokenizer())


def test_validation_without_samples_is_refused(numbers):
    with pytest.raises(DataError, match="no validation samples"):
        source(numbers).validation(0)


def test_batch_larger_than_an_epoch_is_refused_with_numbers(numbers):
    with pytest.raises(DataError, match=r"10 training samples of seq_len 4 are fewer than training.global_batch 12"):
        source(numbers, global_batch=12)


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


def test_permutation_equals_golden(golden):
    rows = [(n, key, Permutation(n, key)(np.arange(min(n, 16)))) for n in (1, 2, 7, 100, 10**12) for key in (0, 12345)]
    golden("data_permutation.txt", "".join(f"n={n} key={key}: {places.tolist()}\n" for n, key, places in rows))


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
        assert order.micro_batches(step) == batch.sample_ids.view(2, 2).tolist()
        assert order.cursor(step) == source.cursor(step)


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 10**6))
def test_rescale_keeps_epoch_and_place(sample, old, new):
    cursor = rescale(Cursor(3, sample, old), new)
    assert cursor.step == 3
    assert cursor.sample // new == sample // old
    assert abs(cursor.sample % new / new - sample % old / old) <= 1 / new
    assert rescale(Cursor(3, sample, old), old) == Cursor(3, sample, old)
    assert rescale(Cursor(1, sample), old) == Cursor(1, sample, old)  # without the length of an epoch
