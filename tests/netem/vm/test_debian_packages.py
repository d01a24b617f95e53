"""The cache, over a real archive; apt-get is a script that copies it, for there may be no network."""

import os
import shutil
import subprocess

import pytest
from vm.debian_packages import PackageCache, default_cache, ensure_qemu

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


def test_lists_are_updated_once_where_the_package_is_not_found(tmp_path, apt, package):
    calls = apt(f'case "$2" in update) touch {tmp_path}/fresh;; *) test -e {tmp_path}/fresh && cp {package} .;; esac')
    PackageCache(tmp_path / "cache").unpacked("busybox-static")
    assert [line.split()[1] for line in calls.read_text().splitlines()] == ["download", "update", "download"]


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


def test_cache_is_outside_the_tree(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "tahq" / "vm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(default_cache()) == "/home/someone/.cache/tahq/vm"
