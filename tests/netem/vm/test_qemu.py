"""One boot, with a script where qemu would be: what is shown, what is returned, what ends it."""

import json
import os
import subprocess
import sys
import time

import pytest
from vm.qemu import Machine, VmError, boot, choose_machine, read_report
from vm.result_page import Run, parse_outcomes, render
from vm.run import files_of, main, select_tests

from tahq.errors import UserError

REPORT = {"exit_status": 0, "kernel": "6.1.0", "guest_s": 1.5}


@pytest.fixture
def report(tmp_path):
    return tmp_path / "report"


def boot_script(script, report, timeout_s=20.0):
    shown = []
    found = boot(["/bin/sh", "-c", script], report, timeout_s, shown.append)
    return found, b"".join(shown)


def test_emulation_has_the_virtual_clock_and_one_processor():
    assert choose_machine("tcg", None, None, 512) == Machine("tcg", "virtual", 1, 512)
    assert choose_machine("tcg", "host", None, 512) == Machine("tcg", "host", 2, 512)
    assert choose_machine("kvm", None, 4, 512) == Machine("kvm", "host", 4, 512)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(UserError, match="KVM runs on the host's clock"):
        choose_machine("kvm", "virtual", None, 512)
    with pytest.raises(UserError, match="the virtual clock has one processor, not 2"):
        choose_machine("tcg", "virtual", 2, 512)


def test_boot_shows_the_console_and_returns_the_report(report):
    script = f"echo Linux; echo '{json.dumps(REPORT)}' > {report}; echo Power down"
    assert boot_script(script, report) == (REPORT, b"Linux\nPower down\n")


@pytest.mark.parametrize("chatter", ["sleep 60", "while true; do echo busy; sleep 0.01; done"])
def test_guest_that_does_not_end_is_killed(report, chatter):
    started_s = time.monotonic()
    with pytest.raises(VmError, match=r"not done after 1 s; allow more with --timeout"):
        boot_script(f"echo $$ > {report}; exec 2>&-; {chatter}", report, timeout_s=1.0)
    assert time.monotonic() - started_s < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int(report.read_text()), 0)


def test_guest_without_a_report_is_no_success(report):
    with pytest.raises(VmError, match=r"without a report \(qemu's status 3\)"):
        boot_script("echo panic; exit 3", report)
    with pytest.raises(VmError, match="without a report"):
        boot_script(f"echo '{{\"exit_st' > {report}", report)


def test_failure_of_the_guests_init_is_shown(report):
    report.write_text(json.dumps({"exit_status": None, "error": "OSError: /modules/veth.ko"}))
    with pytest.raises(VmError, match=r"init failed:\nOSError: /modules/veth\.ko"):
        read_report(report, 0)


def test_machine_that_cannot_be_is_one_line_and_status_2(capsys):
    assert main(["--cpus", "2", "--", "true"]) == 2
    assert capsys.readouterr().err == "netem VM: the virtual clock has one processor, not 2; more need --clock host\n"


MARKED = """
import pytest

@pytest.mark.netem_kernel
@pytest.mark.parametrize("rate", [10, 100])
def test_rate(rate): pass

def test_elsewhere(): pass
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "tests" / "netem"
    folder.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["netem_kernel: in the VM"]\n')
    (folder / "test_kernel.py").write_text(MARKED)
    (folder / "test_other.py").write_text("def test_other(): pass\n")
    return tmp_path


@pytest.mark.acceptance
def test_only_marked_tests_are_selected_and_only_their_files(checkout):
    selected = select_tests(checkout, [])
    assert selected == [f"tests/netem/test_kernel.py::test_rate[{rate}]" for rate in (10, 100)]
    assert files_of(selected) == ["tests/netem/test_kernel.py"]


@pytest.mark.acceptance
def test_nothing_selected_is_a_mistake_not_a_success(checkout):
    with pytest.raises(UserError, match="no test of tests/netem is marked netem_kernel and fits -k satellite"):
        select_tests(checkout, ["-k", "satellite"])


@pytest.mark.acceptance
def test_file_that_cannot_be_imported_is_shown(checkout):
    (checkout / "tests" / "netem" / "test_broken.py").write_text("import no_such_module\n")
    with pytest.raises(UserError, match=r"could not collect tests/netem:\n(?s:.*)no_such_module"):
        select_tests(checkout, [])


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


@pytest.mark.acceptance
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


@pytest.mark.acceptance
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
