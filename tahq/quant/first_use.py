"""Where processes of one machine are about to compile the same kernels, one does, and the others read its cache.

Four workers that start together would otherwise compile all at once, each slowing the others. The lock is the
operating system's (flock), so a process that dies inside it does not keep it.

A lock is for one set of kernels in one cache. Others on the machine, of another run or another installation, are none
of a worker's business: a stage that comes back in the middle of a run waits for nobody but who compiles what it needs
itself. And for him not for ever: he may have been stopped, and two who compile are slower, not wrong.
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
"""Who has waited longer than this says so."""
_LONGEST_S = 60.0
_CACHES = ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR")
_INSTALLATION = Path(__file__).resolve().parent


@contextmanager
def one_compiles(kernels: str, folder: Path | None = None, longest_s: float = _LONGEST_S) -> Iterator[None]:
    """A context for whatever compiles or loads kernels.

    Who is first goes ahead; who comes meanwhile waits until the first has left, and then goes ahead at once
    with all others: from then on they load.

    Args:
        kernels: names what is compiled or loaded; who says something else is not waited for.
        folder: where the locks are; by default the system's for temporary files.
        longest_s: who has waited for so long goes ahead.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"tahq-kernels-{os.getuid()}" / f"{_name_of(kernels)}.lock"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not _takes(lock, fcntl.LOCK_EX):
            _wait(lock, kernels, longest_s)
        yield
    finally:
        os.close(lock)  # which unlocks it


def _name_of(kernels: str) -> str:
    """The same for all that would read each other's cache."""
    told = "\n".join((kernels, str(_INSTALLATION), *(os.environ.get(name, "") for name in _CACHES)))
    return blake2b(told.encode(), digest_size=8).hexdigest()


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
