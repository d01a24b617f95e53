"""Token files: memory-mapped, end to end, hashed, and checked against the vocabulary."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.data.config import DataConfig
from tahq.data.dataset import Dataset, load_dataset
from tahq.data.sources import FoundFile
from tahq.data.token_stream import TokenStream, hash_token_files, open_token_files
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import DataError


def write_tokens(path: Path, tokens: np.ndarray) -> FoundFile:
    tokens.tofile(path)
    return FoundFile(path, named=True)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
def test_stream_reads_across_pieces_like_one_array(lengths: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(lengths), dtype=np.uint16)
    pieces = np.split(whole, np.cumsum(lengths)[:-1])
    stream = TokenStream.of(pieces, [str(i) for i in range(len(pieces))])
    assert len(stream) == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(1, len(whole) - start)) if start < len(whole) else 0
    if count:
        read = stream.read(start, count)
        assert read.dtype == np.int64
        assert read.tolist() == whole[start : start + count].tolist()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_files_are_memory_mapped_little_endian(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(60_000, 60_010, dtype=np.dtype(dtype).newbyteorder("<"))
    stream = open_token_files([write_tokens(tmp_path / "a.bin", tokens)], dtype)
    assert isinstance(stream.pieces[0], np.memmap)
    assert stream.read(0, 10).tolist() == list(range(60_000, 60_010))


@pytest.mark.parametrize(("dtype", "nbytes"), [("uint16", 7), ("uint32", 6), ("uint16", 0)])
def test_size_that_is_no_multiple_of_the_item_is_refused(tmp_path: Path, dtype: str, nbytes: int) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(nbytes))
    with pytest.raises(DataError, match=f"{nbytes} bytes, which is no .*multiple of .*{dtype}"):
        open_token_files([FoundFile(path, named=True)], dtype)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*gone.bin"):
        open_token_files([FoundFile(tmp_path / "gone.bin", named=True)], "uint16")


def test_hash_sees_the_ends_of_a_large_file_and_every_byte_of_a_small_one(tmp_path: Path) -> None:
    small, large = np.zeros(10_000, dtype="<u2"), np.zeros(2**24, dtype="<u2")
    for tokens, places in ((small, range(0, 10_000, 999)), (large, (0, 2**24 - 1))):
        original = hash_token_files(TokenStream.of([tokens], ["x"]), 256)
        for place in places:
            changed = tokens.copy()
            changed[place] = 1
            assert hash_token_files(TokenStream.of([changed], ["x"]), 256) != original
    assert hash_token_files(TokenStream.of([small, small], "xy"), 256) != hash_token_files(
        TokenStream.of([small[:-1], np.concatenate([small, small[:1]])], "xy"), 256
    )


def test_token_beyond_the_vocabulary_is_found_at_load_with_its_place(tmp_path: Path) -> None:
    tokens = np.zeros(1000, dtype="<u2")
    tokens[17] = 300
    files = [write_tokens(tmp_path / "a.bin", tokens[:10]), write_tokens(tmp_path / "b.bin", tokens)]
    with pytest.raises(DataError, match=r"b.bin, token 17 is 300, but the tokenizer has 256 ids"):
        hash_token_files(open_token_files(files, "uint16"), 256)


def test_token_beyond_the_vocabulary_is_found_when_drawn_where_the_hash_did_not_look(tmp_path: Path) -> None:
    tokens = np.zeros(2**24, dtype="<u2")
    position = 3 * 2**15 + 5  # every other block is hashed: of 512 blocks, 0, 2, 4, …
    tokens[position] = 300
    write_tokens(tmp_path / "a.bin", tokens)
    config = DataConfig(tokens=str(tmp_path / "a.bin"), seq_len=100, validation=0.0)
    dataset = load_dataset(config, load_tokenizer(config))
    dataset.gather(np.array([position // 100 - 1]))
    with pytest.raises(DataError, match=f"a.bin, token {position} is 300"):
        dataset.gather(np.array([position // 100]))


def test_dataset_of_token_files_has_windows_across_files(tmp_path: Path, byte_dataset: Callable[..., Dataset]) -> None:
    tokens = (np.arange(1001) % 251).astype("<u2")
    for name, part in zip(("1.bin", "2.bin", "3.bin"), np.split(tokens, [13, 500]), strict=True):
        write_tokens(tmp_path / name, part)
    (tmp_path / "notes.txt").write_text("a folder gives only its .bin files")
    dataset = byte_dataset(tokens=str(tmp_path), seq_len=10, validation=0.0)
    assert dataset.num_train_samples == 100
    inputs, labels = dataset.gather(np.arange(100))
    assert inputs.reshape(-1).tolist() == tokens[:-1].tolist()
    assert labels.reshape(-1).tolist() == tokens[1:].tolist()
