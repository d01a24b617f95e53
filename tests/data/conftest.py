"""Fixtures of the data tests: a cache folder of their own, small texts, a small Hugging Face tokenizer."""

import json
import os
from pathlib import Path

import pytest

from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import BytesTokenizer

SENTENCES = "".join(f"Sentence {i} says that {i * i} is {i} times itself.\n" for i in range(400))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TAHQ_CACHE", str(folder))
    return folder


@pytest.fixture
def sentences():
    return SENTENCES


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text" / "sentences.txt"
    path.parent.mkdir()
    path.write_text(SENTENCES)
    return path


@pytest.fixture
def byte_dataset():
    """byte_dataset(text=…, …): the dataset of a `data:` section with the bytes tokenizer."""
    return lambda **section: load_dataset(DataConfig(**section), BytesTokenizer())


@pytest.fixture
def jsonl_file(tmp_path):
    def write(records):
        path = tmp_path / "pairs.jsonl"
        lines = [r if isinstance(r, str | bytes) else json.dumps(r) for r in records]
        path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
        return path

    return write


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory):
    """A folder with a tokenizer.json of 300 byte-level pieces, which truncates to 8 tokens and adds ends."""
    from tokenizers import ByteLevelBPETokenizer, processors

    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([SENTENCES], vocab_size=300, special_tokens=["<eot>"], show_progress=False)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<eot> $A <eot>", special_tokens=[("<eot>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"__type": "AddedToken", "content": "<eot>"}}
        )
    )
    return folder


@pytest.fixture(scope="session")
def gpt2_folder():
    """GPT-2's vocab.json and merges.txt, where the test data is at hand."""
    default = Path(__file__).parents[2] / "../shared/data"
    folder = Path(os.environ.get("TAHQ_SHARED_DATA", default)) / "gpt2"
    if not (folder / "vocab.json").is_file():
        pytest.skip(f"no GPT-2 vocabulary at {folder}; set TAHQ_SHARED_DATA")
    return folder
