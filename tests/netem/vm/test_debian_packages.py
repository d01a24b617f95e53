"""The cache, over a real archive; apt-get is a script that copies it, for there may be no network."""

import lzma
import os
import shutil
import subprocess

import pytest
from vm.debian_packages import (
    PackageCache,
    dependencies,
    ensure_qemu,
    find_modules,
    module_name,
    read_module,
)

from tahq.errors import UserError

pytestmark = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb: packages are Debian's")

APT_CACHE = """\
echo "$3"
test "$3" = linux-image-cloud-amd64 && echo '  Depends: linux-image-6.1.0-56-cloud-amd64'
echo '  Depends: libc6'
"""

CONTROL = """\
Package: linux-image-6
Version: 1
Architecture: all
Maintainer: nobody <nobody@localhost>
Description: one file
"""


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """apt(script) puts an apt-get that runs `script` first in PATH; its calls are in the file that is returned."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()

    def install(script):
        for name, text in (("apt-get", f'echo "$@" >> {calls}\n{script}'), ("apt-cache", APT_CACHE)):
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        return calls

    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return install


@pytest.fixture
def package(tmp_path):
    """A .deb with one file, boot/vmlinuz-6."""
    root = tmp_path / "package"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "boot").mkdir()
    (root / "DEBIAN" / "control").write_text(CONTROL)
    (root / "boot" / "vmlinuz-6").write_text("kernel")
    subprocess.run(["dpkg-deb", "--build", root, tmp_path / "one.deb"], check=True, capture_output=True)
    return tmp_path / "one.deb"


def test_package_is_unpacked_once_and_then_taken_from_the_cache(tmp_path, apt, package):
    calls = apt(f"cp {package} .")
    cache = PackageCache(tmp_path / "cache")
    folder = cache.unpacked("busybox-static")
    assert (folder / "boot" / "vmlinuz-6").read_text() == "kernel"
    assert cache.unpacked("busybox-static") == folder
    assert calls.read_text().splitlines() == ["--quiet download busybox-static"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["busybox-static"]


def test_metapackage_is_followed_to_the_kernel_that_it_names(tmp_path, apt, package):
    calls = apt(f"cp {package} .")
    PackageCache(tmp_path / "cache").unpacked("linux-image-cloud-amd64")
    assert calls.read_text().splitlines() == ["--quiet download linux-image-6.1.0-56-cloud-amd64"]


def test_failure_is_one_line_and_leaves_nothing(tmp_path, apt):
    apt("echo 'E: first' >&2; echo 'E: Unable to fetch' >&2; exit 100")
    with pytest.raises(UserError, match=r"^`apt-get --quiet update` failed: E: Unable to fetch$"):
        PackageCache(tmp_path / "cache").unpacked("busybox-static")
    assert list((tmp_path / "cache").iterdir()) == []


def test_machine_without_apt_says_what_is_expected(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"apt-cache is missing; the VM is built from Debian packages"):
        PackageCache(tmp_path / "cache").unpacked("busybox-static")
    with pytest.raises(UserError, match=r"qemu-system-x86_64 is missing; install it with: sudo apt-get install"):
        ensure_qemu()


def module(depends):
    return b"\x7fELF....\0license=GPL\0depends=" + depends.encode() + b"\0name=x\0code"


@pytest.fixture
def folder(tmp_path):
    net = tmp_path / "kernel" / "net"
    net.mkdir(parents=True)
    (net / "bridge.ko").write_bytes(module("llc,stp"))
    (net / "stp.ko").write_bytes(module("llc"))
    (net / "llc.ko").write_bytes(module(""))
    (net / "sch-netem.ko.xz").write_bytes(lzma.compress(module("")))
    (net / "tcp_diag.ko").write_bytes(module("inet-diag"))
    (net / "loop.ko").write_bytes(module("pool"))
    (tmp_path / "modules.builtin").write_text("kernel/net/inet_diag.ko\nkernel/net/sched/sch_fq_codel.ko\n")
    return tmp_path


def test_module_comes_after_all_that_it_depends_on_and_only_once(folder):
    assert find_modules(folder).load_order(("bridge", "stp", "sch_netem")) == ["llc", "stp", "bridge", "sch_netem"]


def test_built_in_parts_are_not_loaded(folder):
    assert find_modules(folder).load_order(("sch_fq_codel", "tcp_diag")) == ["tcp_diag"]


def test_missing_module_names_it_and_what_to_do(folder):
    with pytest.raises(UserError, match=r"no module sch_tbf; take another with --kernel-package"):
        find_modules(folder).load_order(("sch_tbf",))
    with pytest.raises(UserError, match=r"no module pool"):
        find_modules(folder).load_order(("loop",))


def test_compressed_module_is_unpacked(folder):
    path = find_modules(folder).paths["sch_netem"]
    assert read_module(path) == module("")


@pytest.mark.parametrize(
    ("file_name", "name"), [("veth.ko", "veth"), ("sch-netem.ko.xz", "sch_netem"), ("act_mirred.ko", "act_mirred")]
)
def test_name_is_as_the_kernel_says_it(file_name, name):
    assert module_name(file_name) == name


def test_dependencies_of_something_without_modinfo_are_none():
    assert dependencies(b"") == []
    assert dependencies(b"undepends=a\0") == []
