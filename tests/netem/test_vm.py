"""The virtual machine's runner, as far as it goes without a boot, which takes minutes."""

import subprocess
import sys

import pytest
import vm.__main__ as vm_main
from vm.image import DISTRIBUTIONS, with_requirements

from tahq.errors import UserError

TESTS = """
import pytest

pytestmark = pytest.mark.netem_kernel

def test_good(record_property):
    record_property("a|b", 3)

def test_bad(): assert 1 == 2, "no | match"

@pytest.mark.skip(reason="too slow here")
def test_skipped(): pass
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "tests" / "netem"
    folder.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["netem_kernel: in the VM"]\n')
    (folder / "test_kernel.py").write_text(TESTS)
    (folder / "test_other.py").write_text("def test_other(): pass\n")
    return tmp_path


@pytest.mark.acceptance
def test_only_files_with_marked_tests_run_in_the_guest(checkout):
    assert vm_main.files_with_tests(checkout, []) == ["tests/netem/test_kernel.py"]
    with pytest.raises(UserError, match="no test of tests/netem is marked netem_kernel and fits -k satellite"):
        vm_main.files_with_tests(checkout, ["-k", "satellite"])
    (checkout / "tests" / "netem" / "test_broken.py").write_text("import no_such_module\n")
    with pytest.raises(UserError, match=r"could not collect tests/netem:\n(?s:.*)no_such_module"):
        vm_main.files_with_tests(checkout, [])


@pytest.mark.acceptance
def test_page_has_outcomes_figures_and_the_guest(checkout):
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml=xml", "-o", "junit_family=xunit1", "tests"]
    subprocess.run(command, cwd=checkout, capture_output=True, check=False)
    report = vm_main.GuestReport.parse("1 6.1.0-56-cloud-amd64 tsc 41.6\n" + (checkout / "xml").read_text())
    page = vm_main.render(report, "QEMU emulator version 7.2", "abc", 123.4)
    for text in (
        "| guest's kernel | Linux 6.1.0-56-cloud-amd64, clock source tsc |",
        "2 passed, 1 failed, 1 skipped (exit status 1) |",
        "| time | 42 s in the guest, 123 s here",
        "| test_kernel.py::test_good | a\\|b | 3 |",
        "| test_kernel.py::test_skipped | skipped: too slow here |",
    ):
        assert text in page


def test_guest_needs_no_torch():
    assert "torch" not in {found.metadata["Name"] for found in with_requirements(*DISTRIBUTIONS)}
    modules = "backends.choice", "measure.calibration", "measure.meter", "wire.process", "network.description", "cli"
    names = ", ".join(f"tahq_netem.{name}" for name in modules)
    code = f"import sys, {names}; print(sys.modules.keys() & {{'torch', 'numpy', 'scipy'}})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"
