"""Where processes of one machine are about to compile the same kernels, one does, and the others read its cache.

Four workers that start together would otherwise compile all at once, each slowing the others. The lock is the
operating system's (flock), so a process that dies inside it does not keep it.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_compiles(folder: Path | None = None) -> Iterator[None]:
    """A context for whatever compiles or loads kernels.

    Who is first goes ahead; who comes meanwhile waits until the first has left, and then goes ahead at once
    with all others: from then on they load.

    Args:
        folder: where the lock is; by default the system's for temporary files.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"tahq-kernels-{os.getuid()}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not _is_first(lock):
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)  # which unlocks it


def _is_first(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
