"""Parents come first, links are followed, and no path has two sources."""

import stat

import pytest
from vm.guest_tree import GuestTree


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


def test_folder_is_copied_without_what_is_not_kept(tmp_path):
    for name in ("a.py", "sub/b.py", "test/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    tree = GuestTree()
    tree.add_copy_of_folder(tmp_path, "/lib", keep=lambda path: path.parts[0] != "test")
    assert [path for path in paths(tree) if path.endswith(".py")] == ["lib/a.py", "lib/sub/b.py"]


def test_path_from_two_sources_is_refused():
    tree = GuestTree()
    tree.add_bytes("/init", b"one")
    tree.add_bytes("/init", b"one")
    with pytest.raises(ValueError, match=r"/init of the guest would come from two places"):
        tree.add_bytes("/init", b"two")
