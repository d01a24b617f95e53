"""Bytes and Hugging Face tokenizers: ids, ends of documents, fingerprints, and what transformers makes of them."""

import json
import logging
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.data.config import DataConfig
from tahq.data.tokenizer import BytesTokenizer, load_tokenizer
from tahq.errors import DataError

TRICKY = [
    "",
    " lead",
    "two  spaces\n\n\ttab \n",
    "don't, 'tis . !",
    "Ā Ġ Ċ é ÿ",
    "漢字 😀 \ufeff",
    "<|endoftext|> </s>",
]
MODEL_TYPES = ["gpt2", "llama", "qwen2", "qwen3", "mistral"]
text_without_nul = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def load(path):
    return load_tokenizer(DataConfig(text="stdlib", tokenizer=str(path)))


@given(text_without_nul)
def test_bytes_ids_are_utf8_and_decode_back(text):
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tobytes() == text.encode()
    assert tokenizer.decode(ids.tolist()) == text


def test_bytes_refuse_a_nul_with_its_position():
    with pytest.raises(DataError, match="NUL character at position 2"):
        BytesTokenizer().encode("ab\0")


@pytest.fixture(scope="module")
def exported_bytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    load("bytes").save(folder)
    return folder


@pytest.fixture(scope="module")
def auto_bytes(exported_bytes):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(exported_bytes)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_exported_bytes_give_the_same_ids_in_transformers(auto_bytes, text):
    ids = list(text.encode())
    assert auto_bytes(text)["input_ids"] == ids
    assert auto_bytes.decode(ids) == text


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_exported_bytes_survive_beside_a_model(exported_bytes, tmp_path, model_type):
    from transformers import AutoTokenizer

    folder = shutil.copytree(exported_bytes, tmp_path / "model")
    ends = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **ends}))
    loaded = AutoTokenizer.from_pretrained(folder)
    assert len(loaded) == 256
    for text in TRICKY:
        assert loaded(text)["input_ids"] == list(text.encode())


def test_tokenizer_json_encodes_whole_documents_without_additions(bpe_folder, sentences):
    tokenizer = load(bpe_folder)
    ids = tokenizer.encode(sentences)
    assert len(ids) > 1000  # the file asks for 8 with truncation
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (300, 0)
    assert 0 not in ids
    assert tokenizer.decode(ids) == sentences
    assert [a.tolist() for a in tokenizer.encode_all([sentences, "", "x"])] == [
        ids.tolist(),
        [],
        tokenizer.encode("x").tolist(),
    ]


def test_saved_tokenizer_gives_the_same_ids_here_and_in_transformers(bpe_folder, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = load(bpe_folder)
    tokenizer.save(tmp_path / "saved")
    again, loaded = load(tmp_path / "saved"), AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.encode("Sentence 12").tolist() == tokenizer.encode("Sentence 12").tolist()
    assert (again.vocab_size, again.end_of_document) == (tokenizer.vocab_size, tokenizer.end_of_document)
    assert loaded.eos_token == "<eot>"
    for text in TRICKY:
        assert loaded(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text).tolist()


def test_gpt2_folder_gives_known_ids_and_transformers_agrees(gpt2_folder, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = load(gpt2_folder)
    assert tokenizer.encode("Hello, world! It's 2024.").tolist() == [15496, 11, 995, 0, 632, 338, 48609, 13]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (50257, 50256)
    tokenizer.save(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded.eos_token_id == 50256
    for text in TRICKY:
        assert loaded(text)["input_ids"] == tokenizer.encode(text).tolist()
        assert loaded.decode(tokenizer.encode(text).tolist()) == tokenizer.decode(tokenizer.encode(text)) == text


def test_folder_in_another_form_goes_through_transformers(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]"})
    )
    tokenizer = load(tmp_path)
    assert tokenizer.encode("ones Two three").tolist() == [5, 7, 6, 1]
    assert tokenizer.end_of_document == 3


def test_file_in_the_format_of_tokenizer_json_is_enough(bpe_folder, tmp_path):
    path = tmp_path / "mine.json"
    shutil.copy(bpe_folder / "tokenizer.json", path)
    assert load(path).encode("Sentence").tolist() == load(bpe_folder).encode("Sentence").tolist()


def test_missing_end_of_document_logs_a_warning(bpe_folder, tmp_path, caplog):
    shutil.copy(bpe_folder / "tokenizer.json", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path).end_of_document is None
    assert "no end-of-document token" in caplog.text


def test_fingerprint_depends_on_content_and_not_on_place(bpe_folder, tmp_path):
    same = shutil.copytree(bpe_folder, tmp_path / "same")
    other = shutil.copytree(bpe_folder, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"][3], content["model"]["merges"][4] = content["model"]["merges"][4:2:-1]
    (other / "tokenizer.json").write_text(json.dumps(content))
    no_end = shutil.copytree(bpe_folder, tmp_path / "no_end")
    (no_end / "tokenizer_config.json").unlink()
    prints = [load(folder).fingerprint for folder in (bpe_folder, same, other, no_end)]
    assert prints[0] in load(bpe_folder).cache_key
    assert prints[0] == prints[1]
    assert len({*prints, load("bytes").fingerprint}) == 4


@pytest.mark.parametrize("path", ["nowhere", "a" * 5000, "~nobody_here/a"], ids=["missing", "too long", "no home"])
def test_missing_folder_is_named_with_what_is_expected(path):
    with pytest.raises(DataError, match=rf"no such folder: {path} .*expected one, or a name on the Hub"):
        load(path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", "{}", "no tokenizer can be read from"),
        ("tokenizer.json", "not JSON", "no tokenizer can be read from"),
        ("vocab.txt", "", "no tokenizer can be read from"),
        ("notes.md", "", r"holds no tokenizer, none of tokenizer\.json"),
    ],
)
def test_damaged_or_missing_tokenizer_is_refused_in_one_line(tmp_path, name, content, problem):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=problem) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{", "is not JSON"), ("[]", "must hold a JSON object"), ("[" * 100_000, "its JSON is nested too deeply")],
)
def test_damaged_settings_are_refused(bpe_folder, tmp_path, content, problem):
    shutil.copy(bpe_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=problem):
        load(tmp_path)
