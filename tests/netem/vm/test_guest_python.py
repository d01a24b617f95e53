"""The guest's Python is this machine's, with what the tests import and nothing that needs torch."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import vm.guest_init
from vm.guest_image import CHECKOUT, make_task
from vm.guest_python import (
    DISTRIBUTIONS,
    add_python,
    belongs_in_guest,
    find_interpreter,
    linked_libraries,
    with_requirements,
)
from vm.guest_tree import GuestTree

from tahq.errors import UserError


def test_interpreter_is_the_one_below_the_virtual_environment():
    found = find_interpreter()
    version = subprocess.run([found.executable, "--version"], capture_output=True, text=True, check=True).stdout
    assert version.split()[1] == sys.version.split()[0]
    assert all((library / "os.py").exists() or (library / "lib-dynload").exists() for library in found.libraries)
    assert not (found.executable.parent.parent / "pyvenv.cfg").exists()


def test_requirements_of_requirements_come_along_but_extras_and_other_systems_do_not():
    names = {found.metadata["Name"].lower().replace("_", "-") for found in with_requirements(("pytest", "pydantic"))}
    assert {"pytest", "pluggy", "iniconfig", "pydantic", "pydantic-core", "annotated-types"} <= names
    assert names.isdisjoint({"colorama", "email-validator", "torch"})


def test_what_the_guest_imports_does_not_require_torch():
    assert "torch" not in {found.metadata["Name"] for found in with_requirements(DISTRIBUTIONS)}


def test_missing_distribution_says_how_to_get_it():
    with pytest.raises(UserError, match=r"the guest needs no-such-thing, .* run: pip install no-such-thing"):
        with_requirements(("no-such-thing",))


@pytest.mark.parametrize(
    ("path", "belongs"),
    [
        ("os.py", True),
        ("test/support.py", False),
        ("json/tests/x.py", True),
        ("site-packages/torch/__init__.py", False),
        ("config-3.11-x86_64-linux-gnu/libpython3.11.a", False),
        (f"__pycache__/os.{sys.implementation.cache_tag}.pyc", True),
        (f"__pycache__/os.{sys.implementation.cache_tag}.opt-2.pyc", False),
        ("lib-dynload/_tkinter.cpython-311-x86_64-linux-gnu.so", False),
    ],
)
def test_library_is_taken_without_what_the_guest_does_not_use(path, belongs):
    assert belongs_in_guest(Path(path)) is belongs


def test_tree_has_interpreter_library_distribution_and_shared_libraries():
    found = find_interpreter()
    tree = GuestTree()
    add_python(tree, found, ("PyYAML",))
    assert str(found.executable) in tree
    assert str(found.libraries[0] / "json" / "__init__.py") in tree
    assert str(found.site_packages / "yaml" / "__init__.py") in tree
    assert all(library in tree for library in linked_libraries([str(found.executable)]))


def test_programs_without_libraries_have_none():
    assert linked_libraries([]) == []


def test_init_needs_nothing_but_the_standard_library():
    source = Path(vm.guest_init.__file__).read_text()
    modules = {
        name
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert modules <= sys.stdlib_module_names


def test_task_names_the_program_by_its_path():
    found = find_interpreter()
    task = make_task(found, ["/modules/veth.ko"], ["python", "-m", "pytest"])
    assert task["argv"] == [str(found.executable), "-m", "pytest"]
    assert make_task(found, [], ["/bin/sh", "-c", "true"])["argv"] == ["/bin/sh", "-c", "true"]
    assert task["env"]["PYTHONPATH"].split(":") == [CHECKOUT, f"{CHECKOUT}/netem"]


def test_kernel_backend_and_its_measuring_import_no_torch():
    names = ("kernel", "network", "namespaces", "calibration", "measure", "probe", "faults", "profiles")
    code = f"import sys, {', '.join(f'tahq_netem.{name}' for name in names)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
