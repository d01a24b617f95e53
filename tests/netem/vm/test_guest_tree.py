"""The guest: its files, the archive of them, its Python and its first process."""

import ast
import io
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import vm.guest_init
from hypothesis import given
from hypothesis import strategies as st
from vm import guest_init
from vm.guest_python import (
    DISTRIBUTIONS,
    add_python,
    belongs_in_guest,
    find_interpreter,
    linked_libraries,
    with_requirements,
)
from vm.guest_tree import Entry, GuestTree, write_archive


def paths(tree):
    return [entry.path for entry in tree]


def test_parents_come_before_what_is_in_them():
    tree = GuestTree()
    tree.add_bytes("/a/b/c", b"")
    assert paths(tree) == ["a", "a/b", "a/b/c"]


def test_file_keeps_permissions_time_and_its_own_path(tmp_path):
    source = tmp_path / "program"
    source.write_bytes(b"x")
    source.chmod(0o751)
    tree = GuestTree()
    tree.add_file(source)
    entry = list(tree)[-1]
    assert entry.path == str(source).strip("/")
    assert entry.mode == stat.S_IFREG | 0o751
    assert entry.mtime_s == int(source.stat().st_mtime)


def test_chain_of_links_brings_each_link_and_the_file(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libx.so.1.2").write_bytes(b"elf")
    (tmp_path / "lib" / "libx.so.1").symlink_to("libx.so.1.2")
    (tmp_path / "libx.so").symlink_to("lib/libx.so.1")
    tree = GuestTree()
    tree.add_file(tmp_path / "libx.so", "/usr/libx.so")
    found = {entry.path: entry.content for entry in tree if not stat.S_ISDIR(entry.mode)}
    assert found == {
        "usr/libx.so": b"lib/libx.so.1",
        "usr/lib/libx.so.1": b"libx.so.1.2",
        "usr/lib/libx.so.1.2": tmp_path / "lib" / "libx.so.1.2",
    }


def read_archive(data):
    """Yield (path, fields, content) by the layout in the kernel's buffer-format.rst."""
    position = 0
    while True:
        header = data[position : position + 110]
        assert header[:6] == b"070701"
        fields = [int(header[6 + 8 * index : 14 + 8 * index], 16) for index in range(13)]
        name_end = position + 110 + fields[11]
        path = data[position + 110 : name_end - 1].decode()
        start = name_end + -name_end % 4
        end = start + fields[6]
        if path == "TRAILER!!!":
            return
        yield path, fields, data[start:end]
        position = end + -end % 4


def written(entries):
    stream = io.BytesIO()
    write_archive(entries, stream)
    return list(read_archive(stream.getvalue()))


@given(st.lists(st.tuples(st.text("abc/ü.", min_size=1, max_size=9), st.binary(max_size=9)), max_size=5))
def test_archive_gives_back_paths_and_contents_of_any_length(files):
    entries = [Entry(path, stat.S_IFREG | 0o644, content) for path, content in files]
    assert [(path, content) for path, _, content in written(entries)] == files


def test_archive_keeps_mode_time_and_device(tmp_path):
    script = tmp_path / "script"
    script.write_bytes(b"#!/bin/sh\n")
    entries = [
        Entry("dev", stat.S_IFDIR | 0o755),
        Entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1)),
        Entry("init", stat.S_IFREG | 0o755, script, mtime_s=1_700_000_000),
    ]
    folder, console, init = written(entries)
    assert folder[1][1] == stat.S_IFDIR | 0o755
    assert console[1][9:11] == [5, 1]
    assert (init[1][1], init[1][5], init[2]) == (stat.S_IFREG | 0o755, 1_700_000_000, b"#!/bin/sh\n")


def test_entries_are_different_inodes_because_equal_ones_would_be_hard_links():
    inodes = [fields[0] for _, fields, _ in written([Entry(name, stat.S_IFREG | 0o644) for name in "abc"])]
    assert len(set(inodes)) == 3


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


def test_kernel_backend_and_its_measuring_import_nothing_that_the_guest_has_not():
    modules = "backends.choice", "measure.calibration", "measure.meter", "wire.process", "network.profiles", "cli"
    names = ", ".join(f"tahq_netem.{name}" for name in modules)
    code = f"import sys, {names}; print(sys.modules.keys() & {{'torch', 'numpy', 'scipy'}})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def run_task(argv, **changes):
    """In a process of its own: the first process waits for every child that it has."""
    task = {"argv": argv, "env": {"PATH": "/bin:/usr/bin"}, "cwd": "/", **changes}
    code = "import json, sys; from vm import guest_init; print(guest_init.run_task(json.loads(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(task)], capture_output=True, text=True, check=True)
    return int(done.stdout), done.stderr


@pytest.mark.parametrize("status", [0, 1, 5])
def test_exit_status_is_the_commands(status):
    assert run_task(["/bin/sh", "-c", f"exit {status}"]) == (status, "")


def test_command_killed_by_a_signal_has_its_number_below_zero():
    assert run_task(["/bin/sh", "-c", "kill -KILL $$"]) == (-9, "")


def test_command_gets_folder_and_environment_of_the_task(tmp_path):
    out = tmp_path / "out"
    command = ["/bin/sh", "-c", f'echo "$PWD $TAHQ_IN_VM" > {out}']
    assert run_task(command, cwd=str(tmp_path), env={"TAHQ_IN_VM": "1"}) == (0, "")
    assert out.read_text() == f"{tmp_path} 1\n"


def test_failed_call_of_the_kernel_says_what_and_why():
    with pytest.raises(FileNotFoundError, match=r"/modules/absent\.ko"):
        guest_init.load_module("/modules/absent.ko")
    with pytest.raises(OSError, match=r"pyproject"):
        # Not a module; and without root, not permitted.
        guest_init.load_module(str(Path(__file__).parents[3] / "pyproject.toml"))
