"""The results' file survives what can happen to it."""

import json

import pytest

from tahq.errors import ConfigError
from tahq_netem.sweep.results import ResultFile, read_results


def row(id, status="done", **more):
    return {"id": id, "status": status, "point": {}, **more}


def test_rows_are_read_back_and_the_newest_of_a_point_counts(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    with ResultFile(path) as file:
        file.append(row("a", "failed", error="no"))
        file.append(row("b"))
        assert not file.is_done("a")
        file.append(row("a"))
    with ResultFile(path) as file:
        assert file.is_done("a")
        assert file.is_done("b")
        assert not file.is_done("c")
    assert len(path.read_text().splitlines()) == 3
    assert list(read_results(path)) == ["a", "b"]


def test_line_that_a_crash_cut_short_is_cut_off(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(row("a")) + "\n" + '{"id": "b", "sta')
    with ResultFile(path) as file:
        assert not file.is_done("b")
        file.append(row("c"))
    assert list(read_results(path)) == ["a", "c"]


def test_second_sweep_is_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultFile(path), pytest.raises(ConfigError, match="another sweep"):
        ResultFile(path)
    with ResultFile(path):
        pass


@pytest.mark.parametrize("text", ["not json\n", "[1]\n", '{"step": 1}\n'])
def test_file_of_other_content_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:1: not a sweep's result"):
        ResultFile(path)
    assert path.read_text() == text
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        read_results(tmp_path / "none.jsonl")
