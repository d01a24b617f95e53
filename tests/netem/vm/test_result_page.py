"""From pytest's XML, made by pytest, to the page."""

import os
import subprocess
import sys

import pytest
from vm.outcomes import Outcome, parse_outcomes, summarise
from vm.result_page import Run, render, write_page

TESTS = """
import pytest

def test_good(record_property):
    record_property("goodput", "95.6 Mbit/s")
    record_property("a|b", 3)

def test_bad(): assert 1 == 2, "no | match"

@pytest.mark.skip(reason="too slow here")
def test_skipped(): pass

@pytest.fixture
def broken(): raise OSError("no device")

def test_error(broken): pass
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "test_kernel.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=xml", "test_kernel.py"]
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTEST_ADDOPTS": ""}, capture_output=True, check=False)
    return parse_outcomes((folder / "xml").read_text())


@pytest.fixture
def run(outcomes):
    report = {"exit_status": 1, "kernel": "6.1.0-56-cloud-amd64", "clock": "tsc", "guest_s": 41.6}
    return Run("tcg, 1 CPU", True, "QEMU emulator version 7.2", report, outcomes, 123.4)


def test_each_outcome_is_told_apart(outcomes):
    assert [(outcome.name, outcome.result) for outcome in outcomes] == [
        ("test_kernel.py::test_good", "passed"),
        ("test_kernel.py::test_bad", "failed"),
        ("test_kernel.py::test_skipped", "skipped"),
        ("test_kernel.py::test_error", "error"),
    ]
    assert outcomes[0].figures == (("goodput", "95.6 Mbit/s"), ("a|b", "3"))
    assert outcomes[2].reason == "too slow here"
    assert "no | match" in outcomes[1].reason
    assert "OSError: no device" in outcomes[3].reason


def test_summary_counts_what_there_is(outcomes):
    assert summarise(outcomes) == "1 passed, 1 failed, 1 error, 1 skipped"
    assert summarise([Outcome("a", "passed", 1.0, "", ())] * 3) == "3 passed"


def test_page_says_where_when_and_what(run):
    page = render(run, "2026-11-21", "AMD EPYC, 2 cores")
    for text in (
        "| date | 2026-11-21 |",
        "| host | AMD EPYC, 2 cores |",
        "| guest's kernel | Linux 6.1.0-56-cloud-amd64, clock source tsc |",
        "| result | 1 passed, 1 failed, 1 error, 1 skipped (exit status 1) |",
        "| time | 42 s in the guest, 123 s here with building the image |",
        "| test_kernel.py::test_good | goodput | 95.6 Mbit/s |",
        "| test_kernel.py::test_skipped | skipped: too slow here |",
        "one emulated instruction is one nanosecond",
    ):
        assert text in page


def test_rows_keep_their_columns_whatever_the_text(run):
    lines = render(run, "2026-11-21", "x").splitlines()
    rows = [line.replace("\\|", "") for line in lines if line.startswith("| test_kernel.py")]
    assert {row.count("|") for row in rows} == {4}


def test_page_is_written_with_its_folder(run, tmp_path):
    write_page(run, tmp_path / "results" / "page.md")
    assert (tmp_path / "results" / "page.md").read_text().startswith("# The kernel backend on a kernel with netem")
