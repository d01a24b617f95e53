"""What one end remembers, in memory and on disk: places, blocks, files that leave nothing behind."""

import errno
import os
import zlib
from pathlib import Path

import pytest
import torch

from tahq.errors import UserError
from tahq.quant.aqsgd.codec import SampleCache, checksum, in_memory, mapped_file
from tahq.quant.aqsgd.stream import Record

S, C = 2, 5
ENTRY_NBYTES = 2 * S * C


def entry(value):
    return torch.full((S, C), float(value), dtype=torch.float16)


@pytest.fixture(params=["memory", "file"])
def cache(request, tmp_path):
    """Three samples a block."""
    allocate = in_memory if request.param == "memory" else lambda count: mapped_file(tmp_path / "cache", count)
    return SampleCache(allocate, block_nbytes=3 * ENTRY_NBYTES + 7)


def test_samples_keep_what_was_stored_last_over_many_blocks(cache):
    for sample_id in (70, 5, 0, 10**12, 8, 9, 5, 70):
        cache.store(sample_id, entry(sample_id % 100))
    cache.store(0, entry(-3))
    assert cache.nbytes == 6 * ENTRY_NBYTES
    assert cache.entries([0, 70, 8, 0])[:, 1, 2].tolist() == [-3, 70, 8, -3]
    tensors = cache.tensors()
    assert tensors["ids"].tolist() == [70, 5, 0, 10**12, 8, 9]
    assert tensors["visits"].tolist() == [2, 2, 2, 1, 1, 1]
    assert [tensors[name].shape[0] for name in sorted(tensors) if name.startswith("entries")] == [3, 3]


def test_a_record_has_visits_and_a_checksum_of_the_bytes(cache):
    assert cache.records([3]) == (Record(3, 0, 0),)
    cache.store(3, entry(1.5))
    expected = zlib.crc32(b"\x00\x3e" * S * C)
    assert cache.records([3, 4]) == (Record(3, 1, expected), Record(4))
    assert checksum(entry(1.5)) == expected


def test_blocks_of_files_are_mapped_have_no_name_and_reserve_their_space(tmp_path):
    folder = tmp_path / "a" / "cache"
    num_values = 256 * 1024
    block = mapped_file(folder, num_values)
    assert list(folder.iterdir()) == []
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    assert len(mapped) == 1
    assert "(deleted)" in mapped[0]
    assert "rw-s" in mapped[0]
    block.fill_(2.0)
    assert float(block.sum(dtype=torch.float64)) == 2 * num_values


def test_many_blocks_of_files_hold_no_file_descriptors(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    blocks = [mapped_file(tmp_path, 1000) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(blocks) == 50


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot keep 200 more bytes .*file/cache: .*another run.dir, or cache=memory"):
        mapped_file(tmp_path / "file" / "cache", 100)


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="No space left on device; free some space"):
        mapped_file(tmp_path, 100)
    assert list(tmp_path.iterdir()) == []
