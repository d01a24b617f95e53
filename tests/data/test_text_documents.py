"""What counts as text: UTF-8 without NUL; named files must be, others are skipped and counted."""

import logging
from pathlib import Path

import pytest

from tahq.data.sources import FoundFile, find_files, hash_documents, read_documents
from tahq.errors import DataError


@pytest.fixture
def mixed_folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_bytes("Grüße\r\n".encode())
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "c.bin").write_bytes(b"abc\0def")
    (tmp_path / "d.txt").write_bytes(b"")
    (tmp_path / "e.txt").write_bytes(b"end")
    return tmp_path


def test_folder_gives_its_text_and_logs_how_many_binary_files_it_skipped(
    mixed_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        documents = read_documents(find_files([str(mixed_folder)], key="data.text"))
    assert documents == ["Grüße\r\n", "end"]
    assert f"skipped 2 of 5 files that are not UTF-8 text, first {mixed_folder / 'b.png'}" in caplog.text


@pytest.mark.parametrize(("content", "offset"), [(b"abc\xff", 3), (b"\xc3\xa9\xc3", 2), (b"ab\0c", 2)])
def test_named_file_that_is_no_text_is_refused_with_its_byte_offset(
    tmp_path: Path, content: bytes, offset: int
) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"byte offset {offset}") as caught:
        read_documents([FoundFile(path, named=True)])
    assert str(path) in str(caught.value)


def test_folder_without_any_text_is_refused_with_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0")
    (tmp_path / "b.txt").write_bytes(b"")
    with pytest.raises(DataError, match="none of 2 files holds text \\(1 binary"):
        read_documents(find_files([str(tmp_path)], key="data.text"))


def test_file_that_vanished_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*gone.txt: No such file"):
        read_documents([FoundFile(tmp_path / "gone.txt", named=True)])


def test_hash_depends_on_where_documents_end() -> None:
    assert hash_documents(["ab", "c"]) != hash_documents(["a", "bc"])
    assert hash_documents(["ab", "c"]) != hash_documents(["abc"])
    assert hash_documents(["ab", "c"]) == hash_documents(["ab", "c"])
