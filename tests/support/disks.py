"""Small disks, really full: a file system in memory, and a file that takes all that is left of it."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[None]:
    """A file system of its own at this folder, which is made; CalledProcessError where none can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "small", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def can_mount() -> bool:
    """Whether this user may make such a disk, by trying."""
    command = "mount -t tmpfs none /mnt"
    return (
        os.geteuid() == 0 and not subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True).returncode
    )


def fill(path: Path) -> None:
    """Write until the disk takes no more."""
    with path.open("ab", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2  # full, apart from less than this


@contextmanager
def kept_full(path: Path) -> Iterator[None]:
    """Have somebody take whatever room there is, and all that others free; give it back at the end."""
    is_over = threading.Event()

    def keep_full() -> None:
        fill(path)
        while not is_over.wait(0.005):
            fill(path)

    thread = threading.Thread(target=keep_full, name="filler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        path.unlink(missing_ok=True)
