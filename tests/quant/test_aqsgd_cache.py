"""The memory of one end of a cut, in RAM and on disk: places, blocks, files that leave nothing behind."""

import errno
import os
from pathlib import Path

import pytest
import torch

from tahq.errors import UserError
from tahq.quant.aqsgd.codec import SampleCache, in_memory, mapped_file

S, C = 2, 5


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_samples_keep_what_was_stored_last_over_many_blocks(kind, tmp_path):
    allocate = in_memory if kind == "memory" else lambda count: mapped_file(tmp_path / "cache", count)
    cache = SampleCache(allocate, block_nbytes=3 * 2 * S * C + 7)  # three samples per block
    for sample_id, value in [*((i, i % 100) for i in (70, 5, 0, 10**12, 8, 9, 5, 70)), (0, -3)]:
        cache.store(sample_id, torch.full((S, C), float(value), dtype=torch.float16))
    assert cache.nbytes == 6 * 2 * S * C
    assert cache.entries([0, 70, 8, 0])[:, 1, 2].tolist() == [-3, 70, 8, -3]
    tensors = cache.tensors()
    assert tensors["ids"].tolist() == [70, 5, 0, 10**12, 8, 9]
    assert tensors["visits"].tolist() == [2, 2, 2, 1, 1, 1]
    assert [tensors[name].shape[0] for name in sorted(tensors) if name.startswith("entries")] == [3, 3]


def test_blocks_of_files_are_mapped_and_hold_neither_a_name_nor_a_descriptor(tmp_path):
    folder, num_values = tmp_path / "a" / "cache", 256 * 1024
    before = len(os.listdir("/proc/self/fd"))
    block = mapped_file(folder, num_values)
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(folder.iterdir()) == []
    (mapped,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    assert "(deleted)" in mapped
    assert "rw-s" in mapped
    block.fill_(2.0)
    assert float(block.sum(dtype=torch.float64)) == 2 * num_values


def test_folder_that_cannot_be_made_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot keep 200 more bytes .*file/cache: .*another run.dir, or cache=memory"):
        mapped_file(tmp_path / "file" / "cache", 100)


def test_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="No space left on device; free some space"):
        mapped_file(tmp_path, 100)
    assert list(tmp_path.iterdir()) == []
