"""The marked tests of a small checkout, collected by pytest itself."""

import pytest
from vm.selection import files_of, select_tests

from tahq.errors import UserError

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


def test_only_marked_tests_are_selected_and_only_their_files(checkout):
    selected = select_tests(checkout, [])
    assert selected == [f"tests/netem/test_kernel.py::test_rate[{rate}]" for rate in (10, 100)]
    assert files_of(selected) == ["tests/netem/test_kernel.py"]


def test_choice_can_be_narrowed(checkout):
    assert select_tests(checkout, ["-k", "100"]) == ["tests/netem/test_kernel.py::test_rate[100]"]


def test_nothing_selected_is_a_mistake_not_a_success(checkout):
    with pytest.raises(UserError, match="no test of tests/netem is marked netem_kernel and fits -k satellite"):
        select_tests(checkout, ["-k", "satellite"])


def test_file_that_cannot_be_imported_is_shown(checkout):
    (checkout / "tests" / "netem" / "test_broken.py").write_text("import no_such_module\n")
    with pytest.raises(UserError, match=r"could not collect tests/netem:\n(?s:.*)no_such_module"):
        select_tests(checkout, [])
