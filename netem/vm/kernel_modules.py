"""Which files of a kernel package are loaded, and in which order.

A Debian package has no modules.dep (it is made after installation), so what a module depends on is read from the
module itself: its `.modinfo` section is a list of `key=value` ended by zero bytes. Compressed modules (newer Debian)
are unpacked here; whoever loads them gets plain ELF.
"""

import lzma
import re
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
"""What the kernel backend, and the ways to do without it, may ask a kernel for."""

_DEPENDS: Final = re.compile(rb"(?:^|\0)depends=([^\0]*)\0")
_SUFFIX: Final = re.compile(r"\.ko(\.xz)?$")


@dataclass(frozen=True, slots=True)
class KernelModules:
    """The modules of one unpacked kernel package.

    Attributes:
        paths: module name (with underscores) -> its file.
        built_in: names of what is part of the kernel image itself.
    """

    paths: dict[str, Path]
    built_in: frozenset[str]

    def load_order(self, names: tuple[str, ...]) -> list[str]:
        """The modules to load for `names`, each after those that it depends on; built-in ones are left out.

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
    """What lies in lib/modules/<release> of an unpacked package."""
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
