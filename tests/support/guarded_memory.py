"""Memory between two inaccessible pages: reading one byte before or behind it ends the process."""

import ctypes
import mmap

import numpy as np
import torch

_PROT_NONE = 0


class GuardedMemory:
    """Whole pages that may be read and written, with an inaccessible page on either side.

    A buffer placed at the end, or at the start, borders on one. Its alignment at the end is that of its length.

    Args:
        nbytes: the longest buffer that is to fit.
    """

    def __init__(self, nbytes: int) -> None:
        page = mmap.PAGESIZE
        size = -(-nbytes // page) * page
        self._mapping = mmap.mmap(-1, size + 2 * page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        for guard in (address, address + page + size):
            _forbid(guard, page)
        self._bytes = np.frombuffer(self._mapping, dtype=np.uint8)[page : page + size]
        self._tensor = torch.from_numpy(self._bytes)

    def at_end(self, data: np.ndarray) -> torch.Tensor:
        """A view of a copy of `data` (uint8) whose last byte is the last before the guard."""
        place = len(self._bytes) - len(data)
        self._bytes[place:] = data
        return self._tensor[place:]

    def at_start(self, data: np.ndarray) -> torch.Tensor:
        """A view of a copy of `data` (uint8) whose first byte is the first behind the guard."""
        self._bytes[: len(data)] = data
        return self._tensor[: len(data)]


def _forbid(address: int, nbytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect failed")
