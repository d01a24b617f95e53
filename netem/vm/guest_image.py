"""The guest's root file system as one archive: init, busybox, modules, Python, the checkout, and what to run.

The checkout lies at /tahq: the packages, and of tests/ only what the kernel backend's tests need. Nothing of it is
installed; PYTHONPATH names it.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .debian_packages import KERNEL_BACKEND_MODULES, find_modules, read_module
from .guest_python import Interpreter, add_python, find_interpreter
from .guest_tree import GuestTree, write_archive

CHECKOUT: Final = "/tahq"
ATTACHED: Final = "/attached"
_CHECKOUT_PARTS: Final = ("tahq", "netem", "tests/netem", "tests/support", "tests/conftest.py", "pyproject.toml")
_APPLETS: Final = ("sh", "cat", "echo", "env", "false", "ls", "mkdir", "ps", "rm", "sleep", "true", "yes")
_NOT_CARRIED: Final = frozenset({".git", ".pytest_cache", ".hypothesis", "results"})


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The folders of the unpacked Debian packages."""

    kernel: Path
    busybox: Path

    @property
    def kernel_image(self) -> Path:
        """The file that qemu boots."""
        return next(self.kernel.glob("boot/vmlinuz-*"))

    @property
    def module_folder(self) -> Path:
        """lib/modules/<release>."""
        return next(path for path in self.kernel.glob("*lib/modules/*") if path.is_dir())


def write_image(path: Path, packages: Unpacked, checkout: Path, argv: Sequence[str]) -> None:
    """Write the archive that, once booted, runs argv (a program of the guest, ``python`` being its Python)."""
    tree = GuestTree()
    interpreter = find_interpreter()
    _add_system(tree, packages.busybox, interpreter)
    modules = _add_modules(tree, packages.module_folder)
    add_python(tree, interpreter)
    _add_checkout(tree, checkout)
    task = make_task(interpreter, modules, argv)
    tree.add_bytes("/guest.json", json.dumps(task, indent=1).encode())
    with path.open("wb") as stream:
        write_archive(tree, stream)


def make_task(interpreter: Interpreter, modules: Iterable[str], argv: Sequence[str]) -> dict[str, object]:
    """What `guest_init` reads."""
    program = str(interpreter.executable) if argv[0] == "python" else argv[0]
    folders = (CHECKOUT, f"{CHECKOUT}/netem")
    environment = {
        "PATH": f"{interpreter.executable.parent}:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONPATH": ":".join(folders),
        "PYTHONUNBUFFERED": "1",
        "TAHQ_IN_VM": "1",
    }
    return {
        "modules": list(modules),
        "argv": [program, *argv[1:]],
        "env": environment,
        "cwd": CHECKOUT,
        "attach": ATTACHED,
    }


def _add_system(tree: GuestTree, busybox: Path, interpreter: Interpreter) -> None:
    for folder in ("/proc", "/sys", "/dev", "/tmp", "/run", "/etc", "/var", "/root"):
        tree.add_folder(folder)
    tree.add_device("/dev/console", 5, 1)
    tree.add_link("/var/run", "/run")
    tree.add_bytes("/etc/hosts", b"127.0.0.1 localhost\n")
    tree.add_bytes("/etc/passwd", b"root:x:0:0:root:/tmp:/bin/sh\n")
    tree.add_file(busybox / "bin" / "busybox", "/bin/busybox")
    for applet in _APPLETS:
        tree.add_link(f"/bin/{applet}", "busybox")
    init = (Path(__file__).parent / "guest_init.py").read_bytes()
    tree.add_bytes("/init", f"#!{interpreter.executable} -I\n".encode() + init, mode=0o755)


def _add_modules(tree: GuestTree, folder: Path) -> list[str]:
    found = find_modules(folder)
    order = [(f"/modules/{name}.ko", found.paths[name]) for name in found.load_order(KERNEL_BACKEND_MODULES)]
    for path, source in order:
        tree.add_bytes(path, read_module(source))
    return [path for path, _ in order]


def _add_checkout(tree: GuestTree, checkout: Path) -> None:
    for part in _CHECKOUT_PARTS:
        source = checkout / part
        if source.is_dir():
            tree.add_copy_of_folder(source, f"{CHECKOUT}/{part}", _is_carried)
        elif source.exists():
            tree.add_file(source, f"{CHECKOUT}/{part}")


def _is_carried(path: Path) -> bool:
    is_stale = path.suffix == ".pyc" and not path.name.endswith(f".{sys.implementation.cache_tag}.pyc")
    return path.name not in _NOT_CARRIED and not is_stale
