"""The token cache: used when it can be, whole or absent, and never a reason to fail."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.token_stream import cache_folder, cached_tokens
from tahq.data.tokenizer import load_tokenizer


class Maker:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> np.ndarray:
        self.calls += 1
        return np.arange(10_000, dtype=np.uint16)


def stored(cache: Path) -> list[Path]:
    return list((cache / "tokens").iterdir())


def test_second_call_reads_what_the_first_made(cache: Path) -> None:
    make = Maker()
    first, second = cached_tokens("key", make), cached_tokens("key", make)
    assert make.calls == 1
    assert isinstance(second, np.memmap)
    assert first.tolist() == second.tolist() == make().tolist()
    assert [path.suffix for path in stored(cache)] == [".npy"]


def test_other_key_is_made_anew(cache: Path) -> None:
    make = Maker()
    cached_tokens("one", make)
    cached_tokens("two", make)
    assert make.calls == len(stored(cache)) == 2


@pytest.mark.parametrize("damage", [b"", b"not numpy", b"\x93NUMPY\x01\x00"])
def test_damaged_entry_is_made_anew_and_mended(cache: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    make = Maker()
    cached_tokens("key", make)
    [path] = stored(cache)
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert cached_tokens("key", make).tolist() == list(range(10_000))
    assert "tokenising anew" in caplog.text
    cached_tokens("key", make)
    assert make.calls == 2


def test_truncated_entry_is_made_anew(cache: Path) -> None:
    make = Maker()
    cached_tokens("key", make)
    [path] = stored(cache)
    path.write_bytes(path.read_bytes()[:-1])
    assert len(cached_tokens("key", make)) == 10_000
    assert make.calls == 2


def test_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    monkeypatch.setenv("TAHQ_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert len(cached_tokens("key", Maker())) == 10_000
    assert "keeping tokens in memory" in caplog.text


def test_failed_tokenising_leaves_nothing_behind(cache: Path) -> None:
    def fail() -> np.ndarray:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        cached_tokens("key", fail)
    assert not (cache / "tokens").exists()


def test_workers_that_start_together_do_not_clash(cache: Path) -> None:
    make = Maker()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: cached_tokens("key", make).tolist(), range(24)))
    assert all(result == list(range(10_000)) for result in results)
    assert len(stored(cache)) == 1


def test_cache_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAHQ_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/tahq")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
    assert cache_folder() == Path("/var/cache/someone/tahq")


def test_dataset_from_the_cache_equals_the_one_that_filled_it(text_file: Path, bpe_folder: Path, cache: Path) -> None:
    config = DataConfig(text=str(text_file), tokenizer=str(bpe_folder), seq_len=16)
    first, second = (load_dataset(config, load_tokenizer(config)) for _ in range(2))
    assert len(stored(cache)) == 1
    ids = np.arange(first.num_train_samples)
    assert first.fingerprint == second.fingerprint
    assert (first.gather(ids)[0] == second.gather(ids)[0]).all()


def test_bytes_are_not_cached(text_file: Path, cache: Path) -> None:
    config = DataConfig(text=str(text_file), seq_len=16)
    load_dataset(config, load_tokenizer(config))
    assert not (cache / "tokens").exists()
