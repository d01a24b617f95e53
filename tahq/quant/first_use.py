"""If several processes of a machine need the same kernels, one compiles them and the others load its cache.

Four workers that start together would otherwise all compile at once, each slowing the others. The lock is the
operating system's (flock), so a process that dies while holding it releases it.

There is one lock per set of kernels and cache, so a stage that returns in the middle of a run only waits for a process
that compiles the same kernels. It does not wait forever: the other process may have been stopped, and compiling twice
is slower, not wrong.
"""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

_log = logging.getLogger(__name__)
_POLL_S = 0.02
_TELLING_S = 1.0
"""Longer waits are logged."""
_LONGEST_S = 60.0
_CACHES = ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR")
_INSTALLATION = Path(__file__).resolve().parent


@contextmanager
def one_compiles(kernels: str, folder: Path | None = None, longest_s: float = _LONGEST_S) -> Iterator[None]:
    """A context in which kernels are compiled or loaded.

    The first process enters at once. The others wait until it has left, then enter together, and load.

    Args:
        kernels: names the kernels; processes with another name do not wait for each other.
        folder: of the lock files; the default is the system's temporary folder.
        longest_s: after waiting this long a process enters anyway.
    """
    # Equal for processes that would read each other's cache.
    cache_of = "\n".join((kernels, str(_INSTALLATION), *(os.environ.get(name, "") for name in _CACHES)))
    name = blake2b(cache_of.encode(), digest_size=8).hexdigest()
    path = (folder or Path(tempfile.gettempdir())) / f"tahq-kernels-{os.getuid()}" / f"{name}.lock"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not _takes(lock, fcntl.LOCK_EX):
            _wait(lock, kernels, longest_s)
        yield
    finally:
        os.close(lock)  # which unlocks it


def _wait(lock: int, kernels: str, longest_s: float) -> None:
    began_s = time.monotonic()
    while not _takes(lock, fcntl.LOCK_SH):
        if time.monotonic() - began_s >= longest_s:
            _log.warning("%s: another process has been compiling it for %.0f s; not waiting longer", kernels, longest_s)
            return
        time.sleep(_POLL_S)
    waited_s = time.monotonic() - began_s
    if waited_s > _TELLING_S:
        _log.info("%s: waited %.1f s for another process that has compiled it", kernels, waited_s)


def _takes(lock: int, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
