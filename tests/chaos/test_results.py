"""The record of tries: continued, complete with failures, and readable."""

from chaos.results import Results, Try
from chaos.row import Row
from chaos.session import run_row

ROW = Row("cut", "a link cut", "BX", lambda attempt: {"stall_s": 1.0 + attempt.number, "restarts": 0}, 1)


def failing_once(attempt):
    marker = attempt.folder.parent / "failed"
    if attempt.number == 1 and not marker.exists():
        marker.touch()
        raise AssertionError("stalled")
    return {}


def test_tries_are_kept_and_one_that_failed_is_made_again_and_stays_on_record(tmp_path):
    path = tmp_path / "chaos.json"
    row = Row("cut", "a link cut", "BX", failing_once, 1)
    run_row(row, range(3), Results(path), tmp_path)
    assert [Results(path).has_passed("cut", number) for number in range(3)] == [True, False, True]
    run_row(row, range(3), Results(path), tmp_path)
    results = Results(path)
    assert results.has_passed("cut", 1)
    assert results.failures(["cut"]) == 1
    assert "| a link cut | BX | 3 of 4 |" in path.with_suffix(".md").read_text()
    assert "AssertionError: stalled" in path.read_text()


def test_figures_are_medians_with_the_largest(tmp_path):
    results = Results(tmp_path / "chaos.json")
    for number, stall_s in enumerate((1.0, 2.0, 9.0)):
        results.add(ROW, Try("cut", number, True, 1.0, {"stall_s": stall_s, "restarts": 0, "key": "lr"}))
    table = (tmp_path / "chaos.md").read_text()
    assert "| 3 of 3 | 0 |  | 2 (9) s |  |  | key: lr |" in table


def test_a_row_that_cannot_be_run_here_is_left_out_and_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("chaos.session._HAS", {"namespaces": lambda: False})
    row = Row("cut", "", "", lambda attempt: {}, 1, needs=("namespaces",))
    run_row(row, range(2), Results(tmp_path / "chaos.json"), tmp_path)
    assert "cut: left out: this machine has no namespaces" in capsys.readouterr().out
    assert not (tmp_path / "chaos.json").exists()
