"""Which files a pattern means, in which order, and what counts as text."""

import logging
import os

import pytest

from tahq.data.sources import FoundFile, find_files, hash_documents, read_documents
from tahq.errors import DataError


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a.txt", "sub/deep/c.txt", "sub/a.md", "sub-1/z.txt", ".hidden/x.txt", ".dot.txt"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    os.symlink(tmp_path / "tree", tmp_path / "tree" / "sub" / "loop")  # not followed
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("patterns", "suffix", "expected"),
    [
        ([""], "", ["a.txt", "b.txt", "sub/a.md", "sub/deep/c.txt", "sub-1/z.txt"]),
        ([""], ".md", ["sub/a.md"]),
        (["sub*/[dz]**/*.txt", "sub-1/**/*.txt"], "", ["sub/deep/c.txt", "sub-1/z.txt"]),
        (["b.txt", "*.txt", "sub"], "", ["b.txt", "a.txt", "sub/a.md", "sub/deep/c.txt"]),
    ],
    ids=["folder by parts of paths, without hidden files", "suffix", "glob of any depth", "list in order, files once"],
)
def test_patterns_give_files_in_order(tree, patterns, suffix, expected):
    found = find_files([f"{tree}/{pattern}" for pattern in patterns], key="data.text", suffix=suffix)
    assert [file.path.relative_to(tree).as_posix() for file in found] == expected


def test_existing_file_with_glob_characters_in_its_name_is_taken_literally(tmp_path):
    path = tmp_path / "data[1].txt"
    path.write_text("x")
    assert [file.path for file in find_files([str(path)], key="data.text")] == [path]


def test_only_files_listed_by_the_user_are_marked_as_named(tree):
    found = find_files([str(tree / "a.txt"), str(tree)], key="data.text")
    assert [file.named for file in found] == [True, False, False, False, False]


def test_paths_are_relative_to_the_working_directory_or_home(tree, monkeypatch):
    monkeypatch.chdir(tree)
    monkeypatch.setenv("HOME", str(tree))
    assert [str(file.path) for file in find_files(["sub/*.md"], key="data.text")] == ["sub/a.md"]
    assert [file.path for file in find_files(["~/a.txt"], key="data.text")] == [tree / "a.txt"]


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("nowhere.txt", "no such file or folder: "),
        ("a" * 5000, "no such file or folder: "),
        ("*.nothing", "glob matches no file: "),
        ("empty", "holds no file"),
    ],
    ids=["missing", "too long", "glob", "empty"],
)
def test_pattern_without_match_is_refused_by_name(tree, pattern, problem):
    (tree / "empty").mkdir()
    with pytest.raises(DataError, match=problem) as caught:
        find_files([str(tree), str(tree / pattern)], key="data.text")
    assert str(tree / pattern) in str(caught.value)
    assert str(caught.value).startswith("data.text: ")
    with pytest.raises(DataError, match=r"data.text is an empty list"):
        find_files([], key="data.text")


def test_stdlib_is_megabytes_of_source_in_sorted_order_without_tests_or_sites():
    found = find_files(["stdlib"], key="data.text", stdlib=True)
    paths = [file.path for file in found]
    assert {path.suffix for path in paths} == {".py"}
    assert paths == sorted(paths, key=lambda path: path.parts)
    assert {"argparse.py", "decoder.py"} <= {path.name for path in paths}
    assert not {"site-packages", "dist-packages", "test", "tests"} & {part for p in paths for part in p.parts[-4:-1]}
    assert sum(path.stat().st_size for path in paths) > 4_000_000


def test_stdlib_is_refused_where_it_is_not_text_or_has_no_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file or folder: stdlib"):
        find_files(["stdlib"], key="data.tokens")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="needs the source files of Python's library"):
        find_files(["stdlib"], key="data.text", stdlib=True)


# -- text --


def test_folder_gives_its_text_and_logs_how_many_binary_files_it_skipped(tmp_path, caplog):
    contents = {"a.txt": "Grüße\r\n".encode(), "b.png": b"\x89PNG\r\n\x1a\n\0\0", "c.bin": b"abc\0def", "d.txt": b""}
    for name, content in (contents | {"e.txt": b"end"}).items():
        (tmp_path / name).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        documents = read_documents(find_files([str(tmp_path)], key="data.text"))
    assert documents == ["Grüße\r\n", "end"]
    assert f"skipped 2 of 5 files that are not UTF-8 text, first {tmp_path / 'b.png'}" in caplog.text


@pytest.mark.parametrize(("content", "offset"), [(b"abc\xff", 3), (b"\xc3\xa9\xc3", 2), (b"ab\0c", 2)])
def test_named_file_that_is_not_text_is_refused_with_its_byte_offset(tmp_path, content, offset):
    path = tmp_path / "latin1.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"byte offset {offset}") as caught:
        read_documents([FoundFile(path, named=True)])
    assert str(path) in str(caught.value)


def test_folder_without_text_and_vanished_files_are_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0")
    (tmp_path / "b.txt").write_bytes(b"")
    with pytest.raises(DataError, match="none of 2 files holds text \\(1 binary"):
        read_documents(find_files([str(tmp_path)], key="data.text"))
    with pytest.raises(DataError, match=r"cannot read .*gone.txt: No such file"):
        read_documents([FoundFile(tmp_path / "gone.txt", named=True)])


def test_hash_depends_on_where_documents_end():
    assert len({hash_documents(documents) for documents in (["ab", "c"], ["a", "bc"], ["abc"], ["", "abc"])}) == 4
    assert hash_documents(["ab", "c"]) == hash_documents(["ab", "c"])
