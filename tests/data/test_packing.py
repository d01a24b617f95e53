"""Rows of several records: which records are in one, and tokens, labels and positions of them."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.data.batches import BatchSource
from tahq.data.dataset import RecordDataset, shown_samples
from tahq.data.packing import begins_of, packed_rows, positions_of
from tahq.data.tokenizer import BytesTokenizer

PAIRS = [{"prompt": f"{number}", "response": "abcdefghij"[: 1 + number % 9]} for number in range(60)]


@pytest.fixture
def load(jsonl_file, byte_dataset):
    def make(records=PAIRS, **keys) -> RecordDataset:
        return byte_dataset(records=str(jsonl_file(records)), **{"validation": 0.0, "seq_len": 16} | keys)

    return make


@given(lengths=st.lists(st.integers(1, 40), max_size=200))
def test_each_record_is_in_one_row_that_holds_it_and_no_two_rows_fit_into_one(lengths):
    rows = packed_rows(np.array(lengths, dtype=np.int64), 40)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert [row[0] for row in rows] == sorted(min(row) for row in rows)
    filled = sorted(sum(lengths[number] for number in row) for row in rows)
    assert all(size <= 40 for size in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > 40


def test_packed_rows_have_the_labels_of_each_record_behind_its_own_tokens(load):
    packed, alone = load(packing=True), load(packing=False)
    assert 2 * packed.num_train_samples < alone.num_train_samples == len(PAIRS)
    numbers = np.arange(packed.num_train_samples)
    tokens, labels, positions = *packed.gather(numbers), packed.positions(numbers)
    found = []
    for row in numbers:
        starts = [*np.flatnonzero(positions[row] == 0), 16]
        for start, stop in pairwise(starts):
            scored = np.flatnonzero(labels[row, start:stop] != -100)
            assert (positions[row, start:stop] == np.arange(stop - start)).all()
            found.append(
                (tokens[row, start:][: scored[-1] + 1].tolist(), labels[row, start:][: scored[-1] + 1].tolist())
            )
    expected = []
    for own, of_own in zip(*alone.gather(np.arange(len(PAIRS))), strict=True):
        count = np.flatnonzero(of_own != -100)[-1] + 1
        expected.append((own[:count].tolist(), of_own[:count].tolist()))
    assert sorted(found) == sorted(expected)


def test_records_are_packed_by_themselves_from_a_hundred_steps_an_epoch_on(load, byte_dataset, jsonl_file):
    few = load()
    assert not few.is_packed
    assert few.num_train_samples == 60
    assert "data.packing: true puts the records into " in few.notes[0]
    assert load(PAIRS * 10).is_packed  # one sample per step
    assert load().fingerprint == load(packing=False).fingerprint != load(packing=True).fingerprint


def test_micro_batches_of_whole_records_have_no_positions(load):
    dataset = load([*PAIRS, *[{"prompt": "p", "response": "r" * 15}] * 60], packing=True, shuffle=False)
    batches = BatchSource(dataset, seed=0, global_batch=60, micro_batch=10)
    found = [batches.train(0).micro_batch_positions(index) is not None for index in range(6)]
    assert found[0]
    assert not found[-1]


def test_packed_samples_are_shown_one_by_one(load):
    dataset = load(packing=True)
    assert shown_samples(dataset, BytesTokenizer()) == ["⟦0⟧a\0", "⟦9⟧a\0", "⟦1⟧ab\0"]
    rows = dataset.num_train_samples
    assert dataset.summary.startswith(f"60 records to train on in {rows} rows of 16 tokens, of which 9")


@pytest.mark.parametrize("length", [8, 11])
def test_positions_come_back_from_a_bit_per_token(length):
    positions = torch.arange(length).repeat(2, 1)
    positions[0, 3:] = torch.arange(length - 3)
    positions[0, -1] = 0
    begins = begins_of(positions, positions.shape)
    assert begins.nbytes == 2 * -(-length // 8)
    assert torch.equal(positions_of(begins, positions.shape), positions)
    alone = begins_of(None, positions.shape)
    assert alone.shape == begins.shape
    assert positions_of(alone, positions.shape) is None
