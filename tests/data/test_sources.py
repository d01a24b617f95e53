"""Which files a pattern means, in which order, and what is said when it means none."""

import os
from pathlib import Path

import pytest

from tahq.data.sources import as_patterns, find_files
from tahq.errors import DataError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "sub/deep/c.txt", "sub/a.md", "sub-1/z.txt", ".hidden/x.txt", ".dot.txt"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "tree"


def names(patterns: list[str], tree: Path, **options: str) -> list[str]:
    return [file.path.relative_to(tree).as_posix() for file in find_files(patterns, key="data.text", **options)]


def test_folder_gives_its_files_sorted_by_parts_without_hidden_ones(tree: Path) -> None:
    assert names([str(tree)], tree) == ["a.txt", "b.txt", "sub/a.md", "sub/deep/c.txt", "sub-1/z.txt"]


def test_folder_with_suffix_gives_only_files_that_end_so(tree: Path) -> None:
    assert names([str(tree)], tree, suffix=".md") == ["sub/a.md"]


def test_glob_with_double_star_reaches_every_depth(tree: Path) -> None:
    assert names([f"{tree}/**/*.txt"], tree) == ["a.txt", "b.txt", "sub/deep/c.txt", "sub-1/z.txt"]


def test_list_keeps_its_order_and_names_a_file_once(tree: Path) -> None:
    assert names([f"{tree}/b.txt", f"{tree}/*.txt", str(tree / "sub")], tree) == [
        "b.txt",
        "a.txt",
        "sub/a.md",
        "sub/deep/c.txt",
    ]


def test_file_whose_name_looks_like_a_glob_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "data[1].txt"
    path.write_text("x")
    assert [file.path for file in find_files([str(path)], key="data.text")] == [path]


def test_only_files_that_the_user_wrote_down_are_named(tree: Path) -> None:
    found = find_files([str(tree / "a.txt"), str(tree)], key="data.text")
    assert [file.named for file in found] == [True, False, False, False, False]


def test_relative_path_is_seen_from_the_working_directory(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert [str(file.path) for file in find_files(["sub/*.md"], key="data.text")] == ["sub/a.md"]


def test_tilde_is_the_home_folder(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tree))
    assert names(["~/a.txt"], tree) == ["a.txt"]


def test_link_to_a_folder_is_not_followed_so_that_loops_end(tree: Path) -> None:
    os.symlink(tree, tree / "sub" / "loop")
    assert len(names([str(tree)], tree)) == 5


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [("nowhere.txt", "no such file or folder: "), ("*.nothing", "glob matches no file: "), ("empty", "holds no file")],
)
def test_pattern_without_match_is_refused_by_name(tree: Path, pattern: str, problem: str) -> None:
    (tree / "empty").mkdir()
    with pytest.raises(DataError, match=problem) as caught:
        find_files([str(tree / pattern)], key="data.text")
    assert str(tree / pattern) in str(caught.value)
    assert str(caught.value).startswith("data.text: ")


def test_one_bad_pattern_among_good_ones_is_refused(tree: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        find_files([str(tree), "nowhere"], key="data.text")


def test_empty_list_is_refused() -> None:
    with pytest.raises(DataError, match=r"data.text is an empty list"):
        find_files([], key="data.text")


def test_stdlib_is_megabytes_of_source_in_sorted_order_without_tests_or_sites() -> None:
    found = find_files(["stdlib"], key="data.text", stdlib=True)
    paths = [file.path for file in found]
    assert {path.suffix for path in paths} == {".py"}
    assert paths == sorted(paths, key=lambda path: path.parts)
    assert {"argparse.py", "decoder.py"} <= {path.name for path in paths}
    assert not {"site-packages", "dist-packages", "test", "tests"} & {part for p in paths for part in p.parts[-4:-1]}
    assert sum(path.stat().st_size for path in paths) > 4_000_000


def test_stdlib_is_a_plain_name_where_text_is_not_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file or folder: stdlib"):
        find_files(["stdlib"], key="data.tokens")


def test_stdlib_without_source_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="needs the source files of Python's library"):
        find_files(["stdlib"], key="data.text", stdlib=True)


def test_one_pattern_counts_as_a_list_of_one() -> None:
    assert as_patterns("a") == ("a",)
    assert as_patterns(["a", "b"]) == ("a", "b")
