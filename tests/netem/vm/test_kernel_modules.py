"""Load order out of the modules themselves."""

import lzma

import pytest
from vm.kernel_modules import dependencies, find_modules, module_name, read_module

from tahq.errors import UserError


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
