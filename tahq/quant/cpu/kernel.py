"""How the CPU backends compile their kernels and spread them over threads.

Every kernel releases the GIL and is cached on disk, beside its source or in NUMBA_CACHE_DIR. Arithmetic is
strict IEEE fp32: no fused multiply-add, no reassociation, true division, subnormals kept. `estimate` is for sums and
logarithms, which need not be equal to the bit.
"""

import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])
R = TypeVar("R")

MIN_ELEMENTS_PER_THREAD = 1 << 15
"""Below about 0.1 ms of work another thread costs more than it saves."""


def load_numba() -> None:
    """Load what numba needs for any kernel, compiled or from its cache: about 0.4 s of a core, less for each fork."""
    import_module("numba.np.arraymath")  # imports most of the modules
    context = import_module("numba.core.registry").cpu_target
    context.typing_context.refresh()
    context.target_context.refresh()


def kernel(function: F) -> F:
    """Compile at the first call: strict fp32, x/0 as IEEE has it, inlined into other kernels."""
    return _compile(function)


def estimate(function: F) -> F:
    """Like `kernel`, but sums may be reordered and multiply-adds fused: not for results that must equal others."""
    return _compile(function, fastmath={"reassoc", "contract", "nsz"})


def _compile(function: F, **options: Any) -> F:
    """Without numba's runtime: counting the references to every array and slice took most of the time.

    A kernel therefore cannot allocate arrays; it is given memory to work in.
    """
    options |= {"nogil": True, "cache": True, "error_model": "numpy", "forceinline": True, "_nrt": False}
    function.__qualname__ += f"-{_stamp_of(function.__module__)}"
    compiled: F = numba.njit(**options)(function)
    return compiled


@cache
def _stamp_of(module: str) -> str:
    """A hash of the files of tahq.quant that a module is compiled from; part of the names of cached files.

    numba itself checks only the file of the kernel that is called: it would go on using a cached kernel with code
    inlined from other files that have been edited since, or replaced by a newer tahq.
    """
    sources = [Path(path).read_bytes() for path in sorted(_files_of(module))]
    return blake2b(b"".join(sources), digest_size=4).hexdigest()


@cache
def _files_of(module: str) -> frozenset[str]:
    """The files of a module and of those of tahq.quant and tahq.memory that it imports, directly or not."""
    path = str(sys.modules[module].__file__)
    imported = re.findall(
        r"^from (tahq\.(?:quant|memory)\.[\w.]+) import", Path(path).read_text(encoding="utf-8"), re.MULTILINE
    )
    return frozenset([path]).union(*map(_files_of, imported))


class Team(ExitStack):
    """Up to `threads` threads that share the tiles of one tensor; a context that ends them.

    The pool is made when there is enough to share. numba's own threading layer would admit only one Python
    thread at a time.
    """

    def __init__(self, threads: int, num_elements: int) -> None:
        super().__init__()
        self._threads = max(1, min(threads, num_elements // MIN_ELEMENTS_PER_THREAD))
        self._pool: ThreadPoolExecutor | None = None

    def share(self, count: int, work: Callable[[int, int], R], *, multiple_of: int = 1) -> list[R]:
        """The results of work(first, stop) over consecutive ranges that cover 0 … count − 1, in order.

        Every range starts at a multiple of `multiple_of`, so that no two share a byte of the stream.
        """
        ranges = split(count, self._threads, multiple_of)
        if len(ranges) == 1:
            return [work(*ranges[0])]
        if self._pool is None:
            self._pool = self.enter_context(ThreadPoolExecutor(self._threads - 1, "tahq-codec"))
        others = [self._pool.submit(work, *part) for part in ranges[1:]]
        return [work(*ranges[0]), *(other.result() for other in others)]


def split(count: int, parts: int, multiple_of: int = 1) -> list[tuple[int, int]]:
    """At most `parts` ranges (first, stop) of about equal length that cover 0 … count − 1; one if count is 0."""
    blocks = -(-count // multiple_of)
    parts = max(1, min(parts, blocks))
    starts = [blocks * part // parts * multiple_of for part in range(parts)]
    return list(zip(starts, [*starts[1:], count], strict=True))
