"""This machine's Python for the guest: interpreter, standard library, some distributions, and shared libraries.

Everything keeps its absolute path, so the interpreter finds its library as it does here. Distributions go into the
interpreter's own site-packages: the guest needs no virtual environment. Compiled files travel with their sources,
because compiling is slow under emulation.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from tahq.errors import UserError

from .guest_tree import GuestTree

DISTRIBUTIONS: Final = ("pyroute2", "pydantic", "PyYAML", "typer", "pytest", "pytest-timeout", "hypothesis")
"""The imports of the kernel backend's tests; torch must not be among them."""

_LEFT_OUT: Final = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "site-packages", "dist-packages"}
)
_SHARED_LIBRARY: Final = re.compile(r"\.so(\.\d+)*$")
_LDD_LINE: Final = re.compile(r"^\s+(?:\S+ => )?(/\S+) \(0x", re.MULTILINE)
_ASK_LAYOUT: Final = """
import json, os, site, sys, sysconfig
paths = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
print(json.dumps([sys.executable, paths, site.getsitepackages()[0]]))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python that a virtual environment was made from.

    Attributes:
        executable: its path, the same in the guest.
        libraries: the folders of the standard library.
        site_packages: where it looks for distributions first.
    """

    executable: Path
    libraries: tuple[Path, ...]
    site_packages: Path


def find_interpreter() -> Interpreter:
    """The interpreter below this process's virtual environment, if it is in one."""
    base = getattr(sys, "_base_executable", sys.executable)
    answer = subprocess.run([base, "-I", "-c", _ASK_LAYOUT], capture_output=True, text=True, check=True).stdout
    executable, libraries, site_packages = json.loads(answer)
    return Interpreter(Path(executable), tuple(map(Path, dict.fromkeys(libraries))), Path(site_packages))


def add_python(tree: GuestTree, interpreter: Interpreter, names: tuple[str, ...] = DISTRIBUTIONS) -> None:
    """Put the interpreter, its library, the distributions called `names` and all that those need into the tree."""
    tree.add_file(interpreter.executable)
    for library in interpreter.libraries:
        tree.add_copy_of_folder(library, str(library), belongs_in_guest)
    for found in with_requirements(names):
        _add_distribution(tree, found, interpreter.site_packages)
    add_shared_libraries(tree)


def belongs_in_guest(path: Path) -> bool:
    """Whether the guest needs a file or folder of the standard library; `path` is relative to the library."""
    if path.parts[0] in _LEFT_OUT or path.parts[0].startswith("config-") or path.name.startswith("_tkinter."):
        return False
    return path.suffix != ".pyc" or path.name.endswith(f".{sys.implementation.cache_tag}.pyc")


def with_requirements(names: tuple[str, ...]) -> list[Distribution]:
    """The distributions, and those that they require on this machine.

    Raises:
        UserError: one is not installed.
    """
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = _canonical(waiting.pop())
        if name not in found:
            found[name] = _installed(name)
            waiting += [each.name for each in map(Requirement, found[name].requires or []) if _applies(each)]
    return [found[name] for name in sorted(found)]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise UserError(f"the guest needs {name}, which is not installed here; run: pip install {name}") from None


def _add_distribution(tree: GuestTree, found: Distribution, site_packages: Path) -> None:
    for file in found.files or []:
        source = Path(str(file.locate()))
        if ".." not in file.parts and source.is_file():  # scripts lie in ../../../bin
            tree.add_file(source, str(site_packages / file))


def add_shared_libraries(tree: GuestTree) -> None:
    """Every library that a program or an extension in the tree is linked with, as the dynamic linker finds it here."""
    sources = [entry.content for entry in tree if isinstance(entry.content, Path)]
    linked = [str(source) for source in sources if _SHARED_LIBRARY.search(source.name) or _is_program(source)]
    for library in linked_libraries(linked):
        if "site-packages" not in library:  # a wheel's own libraries came with the wheel
            tree.add_file(Path(library))


def _is_program(source: Path) -> bool:
    with source.open("rb") as file:
        return source.stat().st_mode & 0o100 != 0 and file.read(4) == b"\x7fELF"


def linked_libraries(paths: list[str]) -> list[str]:
    """The libraries that ldd finds for these files, each once."""
    if not paths:
        return []
    listing = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=False).stdout
    return list(dict.fromkeys(_LDD_LINE.findall(listing)))
