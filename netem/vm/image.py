"""The guest's root file system: Debian's kernel modules and busybox, this machine's Python, the checkout, a task.

Everything of this machine keeps its absolute path, so Python finds its library as it does here, and modification times,
so that compiled files stay valid: compiling is slow under emulation. Kernel and busybox come from the machine's own apt
sources and are only unpacked, into a cache outside the tree; with a filled cache, neither apt nor a network is needed.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tahq.errors import UserError

CHECKOUT: Final = Path(__file__).resolve().parents[2]
KERNEL_PACKAGE: Final = "linux-image-cloud-amd64"
DISTRIBUTIONS: Final = ("pyroute2", "pydantic", "PyYAML", "typer", "pytest", "pytest-timeout", "hypothesis")
"""The imports of the kernel backend's tests; torch must not be among them."""
_CHECKOUT_FOLDERS: Final = ("tahq", "netem", "tests/netem", "tests/support")
_NOT_COPIED: Final = shutil.ignore_patterns(
    *("test", "tests", "idlelib", "tkinter", "lib2to3", "ensurepip", "site-packages", "config-*", "_tkinter.*"),
    *("results", ".hypothesis", ".pytest_cache"),
)
_PYTHON: Final = Path(os.path.realpath(sys.executable))
"""The interpreter below this process's virtual environment, if it is in one."""
_LDD_LINE: Final = re.compile(r"^\s+(?:\S+ => )?(/\S+) \(0x", re.MULTILINE)


def unpacked_package(name: str) -> Path:
    """The folder with the files of a Debian package, downloaded at first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tahq" / "vm"
    target = cache / name
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            # A metapackage only names the newest kernel.
            lines = run("apt-cache", "depends", "--important", name).splitlines()
            kernels = [line.split()[-1] for line in lines if line.startswith("  Depends: linux-image-")]
            apt_get("download", *(kernels[:1] or [name]), folder=folder)
            [archive] = Path(folder).glob("*.deb")
            run("dpkg-deb", "--extract", str(archive), f"{folder}/files")
            Path(folder, "files").rename(target)
    return target


def apt_get(*arguments: str, folder: str | None = None) -> None:
    """Run apt-get; if it fails, once more after an update of the lists, which a fresh machine does not have."""
    try:
        run("apt-get", *arguments, folder=folder)
    except UserError:
        run("apt-get", "update")
        run("apt-get", *arguments, folder=folder)


def run(*command: str, folder: str | None = None) -> str:
    """The output of a command; UserError if it failed, or is not installed."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise UserError(f"{command[0]} is missing; the VM needs Debian or Ubuntu") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or error.stdout.strip() or "no message").splitlines()[-1]
        raise UserError(f"`{shlex.join(command)}` failed: {last}") from None


def write_image(path: Path, argv: Sequence[str]) -> None:
    """Write the archive (cpio) that, once booted, runs `argv`; `python` in it is this machine's Python."""
    busybox = unpacked_package("busybox-static") / "bin" / "busybox"
    with tempfile.TemporaryDirectory(prefix="tahq-vm-root-") as name:
        root = Path(name)
        _add_system(root, busybox)
        _add_python(root)
        for folder in _CHECKOUT_FOLDERS:
            shutil.copytree(CHECKOUT / folder, f"{root}{CHECKOUT / folder}", ignore=_NOT_COPIED)
        for file in ("tests/conftest.py", "pyproject.toml"):
            _add_file(root, CHECKOUT / file)
        (root / "task").write_text(_task(argv), encoding="utf-8")
        subprocess.run(f"{busybox} find . | {busybox} cpio -o -H newc > {path}", shell=True, cwd=root, check=True)


def _add_system(root: Path, busybox: Path) -> None:
    for folder in ("bin", "etc", "var"):
        (root / folder).mkdir()
    (root / "var" / "run").symlink_to("/run")
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/tmp:/bin/sh\n")
    shutil.copy(busybox, root / "bin")
    shutil.copy(Path(__file__).with_name("init.sh"), root / "init")
    (root / "init").chmod(0o755)
    kernel = unpacked_package(KERNEL_PACKAGE)
    [release] = (path.name for path in kernel.glob("lib/modules/*"))
    for part in ("net", "drivers/net"):
        modules = f"lib/modules/{release}/kernel/{part}"
        shutil.copytree(kernel / modules, root / modules)
    run(str(busybox), "depmod", "-b", str(root), release)


def _add_python(root: Path) -> None:
    _add_file(root, _PYTHON)
    for library in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}:
        shutil.copytree(library, f"{root}{library}", ignore=_NOT_COPIED)
    for found in with_requirements(*DISTRIBUTIONS):
        for file in found.files or []:
            source = Path(str(file.locate()))
            if ".." not in file.parts and source.is_file():  # scripts are in ../../../bin
                _add_file(root, source)
    linked = [str(_PYTHON), *map(str, root.rglob("*.so"))]
    listing = subprocess.run(["ldd", *linked], capture_output=True, text=True, check=False).stdout
    for shared_library in set(_LDD_LINE.findall(listing)):
        _add_file(root, Path(shared_library))


def with_requirements(*names: str) -> Iterator[Distribution]:
    """The distributions, and those that they require on this machine."""
    waiting = list(map(canonicalize_name, names))
    for name in waiting:  # which grows meanwhile
        try:
            found = distribution(name)
        except PackageNotFoundError:
            raise UserError(f"the guest needs {name}, which is not installed here; run: pip install {name}") from None
        yield found
        for each in map(Requirement, found.requires or []):
            required = canonicalize_name(each.name)
            if required not in waiting and (not each.marker or each.marker.evaluate({"extra": ""})):
                waiting.append(required)


def _task(argv: Sequence[str]) -> str:
    """A shell script that runs `argv` in the checkout."""
    folders = [CHECKOUT, CHECKOUT / "netem", *filter(None, sys.path)]
    environment = {
        "PATH": f"{_PYTHON.parent}:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONPATH": ":".join(map(str, folders)),
        "PYTHONUNBUFFERED": "1",
    }
    command = [str(_PYTHON) if argv[0] == "python" else argv[0], *argv[1:]]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join([*exports, f"cd {shlex.quote(str(CHECKOUT))}", f"exec {shlex.join(command)}", ""])


def _add_file(root: Path, source: Path) -> None:
    target = root / source.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
