"""The archive read back by a reader of its own; the VM itself shows that Linux reads it."""

import io
import stat

from hypothesis import given
from hypothesis import strategies as st
from vm.cpio_archive import Entry, write_archive


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
