"""Debian packages from the machine's own apt sources, kept in a cache outside the tree, and the kernel modules in them.

Only qemu is installed; the kernel and busybox are downloaded and unpacked, so the machine never boots them. With a
filled cache, neither apt nor a network is needed.

A kernel package has no modules.dep (it is made after installation), so the dependencies of a module are read from its
`.modinfo` section, a list of `key=value` ended by zero bytes. Compressed modules (newer Debian) are unpacked here.
"""

import lzma
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tahq.errors import UserError

KERNEL_BACKEND_MODULES: Final = (
    *("veth", "bridge", "tun", "dummy"),
    *("sch_netem", "sch_htb", "sch_tbf", "sch_fq", "sch_prio", "sch_ingress"),
    *("cls_u32", "cls_flower", "cls_basic", "cls_matchall", "cls_fw", "act_mirred", "act_police"),
    *("tcp_bbr", "tcp_diag", "udp_diag"),
)
"""Modules that the two backends may need."""

_DEPENDS: Final = re.compile(rb"(?:^|\0)depends=([^\0]*)\0")
_SUFFIX: Final = re.compile(r"\.ko(\.xz)?$")


@dataclass(frozen=True, slots=True)
class KernelModules:
    """The modules of one unpacked kernel package.

    Attributes:
        paths: module name (with underscores) -> its file.
        built_in: names of modules that are part of the kernel image.
    """

    paths: dict[str, Path]
    built_in: frozenset[str]

    def load_order(self, names: tuple[str, ...]) -> list[str]:
        """The modules to load for `names`, each after its dependencies, without built-in ones.

        Raises:
            UserError: the package has no such module.
        """
        order: dict[str, None] = {}
        for name in names:
            self._visit(name, order)
        return list(order)

    def _visit(self, name: str, order: dict[str, None]) -> None:
        if name in order or name in self.built_in:
            return
        if name not in self.paths:
            raise UserError(f"the kernel package has no module {name}; take another with --kernel-package")
        for dependency in dependencies(read_module(self.paths[name])):
            self._visit(dependency, order)
        order[name] = None


def find_modules(folder: Path) -> KernelModules:
    """The modules in lib/modules/<release> of an unpacked package."""
    files = [path for path in folder.rglob("*.ko*") if _SUFFIX.search(path.name)]
    built_in = (folder / "modules.builtin").read_text(encoding="ascii").split()
    return KernelModules(
        {module_name(path.name): path for path in files},
        frozenset(module_name(line.rpartition("/")[2]) for line in built_in),
    )


def module_name(file_name: str) -> str:
    """``sch_netem`` of ``sch-netem.ko.xz``: the kernel counts - and _ as one."""
    return _SUFFIX.sub("", file_name).replace("-", "_")


def read_module(path: Path) -> bytes:
    """The module as plain ELF."""
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def dependencies(module: bytes) -> list[str]:
    """The modules that this one needs, out of its `.modinfo`."""
    found = _DEPENDS.search(module)
    return [name.replace("-", "_") for name in found.group(1).decode().split(",") if name] if found else []


QEMU: Final = "qemu-system-x86_64"
_QEMU_PACKAGE: Final = "qemu-system-x86"


def default_cache() -> Path:
    """``~/.cache/tahq/vm``, or below $XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tahq" / "vm"


@dataclass(frozen=True, slots=True)
class PackageCache:
    """Unpacked packages, a folder each: ``<cache>/<package>/``."""

    folder: Path

    def unpacked(self, package: str) -> Path:
        """The folder that holds the package's files, fetched at first use.

        A metapackage (linux-image-cloud-amd64 has no files, it names the newest kernel) is followed to the one it
        depends on.

        Raises:
            UserError: apt could not fetch it.
        """
        target = self.folder / package
        if not target.is_dir():
            self._fetch(package, target)
        return target

    def _fetch(self, package: str, target: Path) -> None:
        partial = target.with_name(f"{package}.{os.getpid()}.partial")
        partial.mkdir(parents=True)
        try:
            _apt_get("download", _real_package(package), folder=partial)
            archive = next(partial.glob("*.deb"))
            _run("dpkg-deb", "--extract", archive.name, ".", folder=partial)
            archive.unlink()
            if not target.is_dir():  # another process may have been faster
                partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def ensure_qemu() -> str:
    """The path of qemu, installed from the distribution if it is missing and we may.

    Raises:
        UserError: it is missing, and this user can't install it.
    """
    found = shutil.which(QEMU)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        _apt_get("install", "--yes", "--no-install-recommends", _QEMU_PACKAGE)
        found = shutil.which(QEMU)
    if found is None:
        raise UserError(f"{QEMU} is missing; install it with: sudo apt-get install {_QEMU_PACKAGE}")
    return found


def _real_package(package: str) -> str:
    lines = _run("apt-cache", "depends", "--important", package).splitlines()
    named = [line.rpartition(" ")[2] for line in lines if line.startswith("  Depends: ")]
    stem = package.removesuffix("-cloud-amd64")
    return next((name for name in named if stem != package and name.startswith(f"{stem}-")), package)


def _apt_get(*arguments: str, folder: Path | None = None) -> None:
    """Run apt-get; if it fails, update the lists, which a fresh machine has not, and try once more."""
    command = ("apt-get", "--quiet", *arguments)
    try:
        _run(*command, folder=folder)
    except UserError:
        _run("apt-get", "--quiet", "update")
        _run(*command, folder=folder)


def _run(*command: str, folder: Path | None = None) -> str:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is missing; the VM is built from Debian packages, on Debian or Ubuntu") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or error.stdout.strip() or "no message").splitlines()[-1]
        raise UserError(f"`{' '.join(command)}` failed: {last}") from None
    return done.stdout
