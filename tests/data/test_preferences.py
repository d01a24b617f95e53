"""Preferences: a sample is both answers of a pair, in two rows."""

import json

import pytest

from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.data.dataset import NO_LOSS, load_dataset, shown_samples
from tahq.data.tokenizer import BytesTokenizer
from tahq.errors import DataError

SEQ_LEN = 12


def dataset_of(tmp_path, records, **keys):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    config = DataConfig(records=str(path), seq_len=SEQ_LEN, **keys)
    return load_dataset(config, BytesTokenizer(), are_preferences=True)


def pair(number: int, **changes) -> dict:
    return {"prompt": f"{number}=", "chosen": f"{number}", "rejected": f"not {number}", **changes}


def test_a_sample_is_the_chosen_answer_and_then_the_rejected_one(tmp_path):
    dataset = dataset_of(tmp_path, [pair(1), pair(2), pair(3)], validation=0.0, shuffle=False)
    shown = ["⟦1=⟧1\0", "⟦1=⟧not 1\0", "⟦2=⟧2\0", "⟦2=⟧not 2\0"]
    assert shown_samples(dataset, BytesTokenizer(), 2) == shown
    assert dataset.summary.startswith("3 records to train on in 6 rows of 12 tokens")
    batch = BatchSource(dataset, seed=0, global_batch=2, micro_batch=1).train(0)
    assert batch.num_pairs == 2
    assert batch.sample_ids.tolist() == [0, 0, 1, 1]
    tokens, labels = batch.micro_batch(1)
    assert [bytes(row[:3].tolist()) for row in tokens] == [b"2=2", b"2=n"]
    assert [bytes(row[row != NO_LOSS].tolist()) for row in labels] == [b"2\0", b"not 2\0"]


def test_pairs_are_left_out_and_held_out_as_a_whole_and_a_short_validation_batch_counts_its_own(tmp_path):
    records = [pair(number) for number in range(10, 30)]
    records[4]["rejected"] = ""  # still ends, which is an answer
    records[7]["prompt"] = "a prompt that fills its row"
    records[6]["rejected"] = "an answer that is cut"
    dataset = dataset_of(tmp_path, records, validation=0.15)
    assert (dataset.num_train_samples, dataset.num_validation_samples) == (16, 3)
    left_out, cut = dataset.notes
    assert left_out.startswith("1 of 20 records are left out, because their prompt fills seq_len 12")
    assert left_out.endswith("pairs.jsonl:8")
    assert cut == "1 of 20 responses are cut at seq_len 12"
    batches = BatchSource(dataset, seed=0, global_batch=2, micro_batch=2)
    assert [batches.validation(index).num_pairs for index in range(3)] == [2, 1, 0]
    assert (batches.validation(1).labels != NO_LOSS).any(1).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "1=", "chosen": "1"}, "no key 'rejected', only 'prompt', 'chosen'; a record needs prompt, chosen"),
        ({"chosen": "1", "rejected": "2"}, "no key 'prompt'"),
        (pair(1, chosen=1), "chosen must be a string, got int"),
        (pair(1, rejected=[{"role": "assistant", "content": "2"}]), "rejected must be a string, got list"),
        ({"prompt": "1=", "response": "1"}, "no key 'chosen'"),
        ([], "expected an object"),
    ],
)
def test_record_that_is_no_preference_is_refused_with_its_line(tmp_path, record, problem):
    with pytest.raises(DataError, match=rf"pairs\.jsonl:2: .*{problem}"):
        dataset_of(tmp_path, [pair(1), record])


def test_preferences_without_dpo_and_text_with_it_are_refused(tmp_path):
    dataset_of(tmp_path, [pair(1), pair(2)])
    config = DataConfig(records=str(tmp_path / "pairs.jsonl"), seq_len=SEQ_LEN)
    with pytest.raises(DataError, match=r"no key 'response'.*training\.dpo learns from chosen and rejected"):
        load_dataset(config, BytesTokenizer())
    with pytest.raises(DataError, match=r"training\.dpo needs records with prompt, chosen and rejected"):
        load_dataset(DataConfig(text="stdlib"), BytesTokenizer(), are_preferences=True)
