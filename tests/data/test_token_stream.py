"""Token files: memory-mapped, end to end, hashed, checked against the vocabulary; and the cache of tokenised text."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.sources import FoundFile
from tahq.data.token_stream import TokenStream, cache_folder, cached_tokens, hash_token_files, open_token_files
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import DataError


def write_tokens(path: Path, tokens: np.ndarray) -> FoundFile:
    tokens.tofile(path)
    return FoundFile(path, named=True)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
def test_stream_reads_across_pieces_like_one_array(lengths, data):
    whole = np.arange(sum(lengths), dtype=np.uint16)
    pieces = np.split(whole, np.cumsum(lengths)[:-1])
    stream = TokenStream(pieces, [str(i) for i in range(len(pieces))])
    assert len(stream) == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(1, len(whole) - start)) if start < len(whole) else 0
    if count:
        read = stream.read(start, count)
        assert read.dtype == np.int64
        assert read.tolist() == whole[start : start + count].tolist()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_files_are_memory_mapped_little_endian(tmp_path, dtype):
    tokens = np.arange(60_000, 60_010, dtype=np.dtype(dtype).newbyteorder("<"))
    stream = open_token_files([write_tokens(tmp_path / "a.bin", tokens)], dtype)
    assert isinstance(stream.pieces[0], np.memmap)
    assert stream.read(0, 10).tolist() == list(range(60_000, 60_010))


@pytest.mark.parametrize(
    ("dtype", "nbytes", "problem"),
    [
        ("uint16", 7, "7 bytes, which is no multiple of .*uint16"),
        ("uint32", 6, "6 bytes, which is no multiple of .*uint32"),
        ("uint16", 0, "0 bytes, which is no positive multiple of .*uint16"),
        ("uint16", None, r"cannot read .*a\.bin"),
    ],
)
def test_file_that_does_not_hold_tokens_is_refused(tmp_path, dtype, nbytes, problem):
    path = tmp_path / "a.bin"
    if nbytes is not None:
        path.write_bytes(bytes(nbytes))
    with pytest.raises(DataError, match=problem):
        open_token_files([FoundFile(path, named=True)], dtype)


def test_hash_sees_the_ends_of_a_large_file_and_every_byte_of_a_small_one():
    small, large = np.zeros(10_000, dtype="<u2"), np.zeros(2**24, dtype="<u2")
    for tokens, places in ((small, range(0, 10_000, 999)), (large, (0, 2**24 - 1))):
        original = hash_token_files(TokenStream([tokens], ["x"]), 256)
        for place in places:
            tokens[place] = 1
            assert hash_token_files(TokenStream([tokens], ["x"]), 256) != original
            tokens[place] = 0
    assert hash_token_files(TokenStream([small, small], "xy"), 256) != hash_token_files(
        TokenStream([small[:-1], np.concatenate([small, small[:1]])], "xy"), 256
    )


def test_token_beyond_the_vocabulary_is_found_at_load_with_its_place(tmp_path):
    tokens = np.zeros(1000, dtype="<u2")
    tokens[17] = 300
    files = [write_tokens(tmp_path / "a.bin", tokens[:10]), write_tokens(tmp_path / "b.bin", tokens)]
    with pytest.raises(DataError, match=r"b.bin, token 17 is 300, but the tokenizer has 256 ids"):
        hash_token_files(open_token_files(files, "uint16"), 256)


def test_token_beyond_the_vocabulary_is_found_when_drawn_where_the_hash_did_not_look(tmp_path):
    tokens = np.zeros(2**24, dtype="<u2")
    position = 3 * 2**15 + 5  # every other block is hashed: of 512 blocks, 0, 2, 4, …
    tokens[position] = 300
    write_tokens(tmp_path / "a.bin", tokens)
    config = DataConfig(tokens=str(tmp_path / "a.bin"), seq_len=100, validation=0.0)
    dataset = load_dataset(config, load_tokenizer(config))
    dataset.gather(np.array([position // 100 - 1]))
    with pytest.raises(DataError, match=f"a.bin, token {position} is 300"):
        dataset.gather(np.array([position // 100]))


def test_dataset_of_token_files_has_windows_across_files(tmp_path, byte_dataset):
    tokens = (np.arange(1001) % 251).astype("<u2")
    for name, part in zip(("1.bin", "2.bin", "3.bin"), np.split(tokens, [13, 500]), strict=True):
        write_tokens(tmp_path / name, part)
    (tmp_path / "notes.txt").write_text("a folder gives only its .bin files")
    dataset = byte_dataset(tokens=str(tmp_path), seq_len=10, validation=0.0)
    assert dataset.num_train_samples == 100
    inputs, labels = dataset.gather(np.arange(100))
    assert inputs.reshape(-1).tolist() == tokens[:-1].tolist()
    assert labels.reshape(-1).tolist() == tokens[1:].tolist()


# -- cache --

TOKENS = np.arange(10_000, dtype=np.uint16)


class Maker:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> np.ndarray:
        self.calls += 1
        return TOKENS


def stored(cache: Path) -> list[Path]:
    return list((cache / "tokens").iterdir())


def test_second_call_with_a_key_reads_what_the_first_made(cache):
    make = Maker()
    first, second = cached_tokens("key", make), cached_tokens("key", make)
    assert make.calls == 1
    assert isinstance(second, np.memmap)
    assert first.tolist() == second.tolist() == TOKENS.tolist()
    assert [path.suffix for path in stored(cache)] == [".npy"]
    cached_tokens("another key", make)
    assert make.calls == len(stored(cache)) == 2


@pytest.mark.parametrize("damage", [b"", b"not numpy", b"\x93NUMPY\x01\x00", None], ids=str)
def test_damaged_cache_entry_is_rebuilt(cache, damage, caplog):
    make = Maker()
    cached_tokens("key", make)
    [path] = stored(cache)
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert cached_tokens("key", make).tolist() == TOKENS.tolist()
    assert "tokenising anew" in caplog.text
    cached_tokens("key", make)
    assert make.calls == 2


def test_unwritable_cache_is_skipped_with_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("a file where a folder should be")
    monkeypatch.setenv("TAHQ_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert len(cached_tokens("key", Maker())) == 10_000
    assert "keeping tokens in memory" in caplog.text


def test_concurrent_workers_share_one_cache_entry(cache):
    make = Maker()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: cached_tokens("key", make).tolist(), range(24)))
    assert all(result == TOKENS.tolist() for result in results)
    assert len(stored(cache)) == 1


def test_cache_lies_in_the_users_cache_folder(monkeypatch):
    monkeypatch.delenv("TAHQ_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/tahq")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
    assert cache_folder() == Path("/var/cache/someone/tahq")


def test_dataset_from_the_cache_equals_the_first_and_bytes_are_not_cached(text_file, bpe_folder, cache):
    config = DataConfig(text=str(text_file), seq_len=16)
    load_dataset(config, load_tokenizer(config))
    assert not (cache / "tokens").exists()
    config = DataConfig(text=str(text_file), tokenizer=str(bpe_folder), seq_len=16)
    first, second = (load_dataset(config, load_tokenizer(config)) for _ in range(2))
    assert len(stored(cache)) == 1
    ids = np.arange(first.num_train_samples)
    assert first.fingerprint == second.fingerprint
    assert (first.gather(ids)[0] == second.gather(ids)[0]).all()
