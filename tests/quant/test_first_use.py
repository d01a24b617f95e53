"""Of several that are about to compile, one goes ahead and the others follow together."""

import fcntl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tahq.quant.first_use import one_compiles

PATIENCE_S = 30


def num_waiting(folder) -> int:
    """How many wait for the lock in this folder."""
    (path,) = folder.iterdir()
    inode = f":{path.stat().st_ino}"
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return sum(fields[1] == "->" and any(field.endswith(inode) for field in fields) for fields in locks)


def test_who_comes_while_the_first_compiles_waits_and_then_all_go_together(tmp_path):
    done, together = [], threading.Barrier(3, timeout=PATIENCE_S)

    def follow():
        with one_compiles(tmp_path):
            assert done == ["first"]
            together.wait()  # breaks if the three do not get here at the same time

    with ThreadPoolExecutor(3) as pool:
        with one_compiles(tmp_path):
            followers = [pool.submit(follow) for _ in range(3)]
            deadline_s = time.monotonic() + PATIENCE_S
            while num_waiting(tmp_path) < 3 and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert not any(follower.done() for follower in followers)
            done.append("first")
        for follower in followers:
            follower.result(PATIENCE_S)


def test_the_lock_is_free_again_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), one_compiles(tmp_path):
        raise ZeroDivisionError
    (path,) = tmp_path.iterdir()
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_lock_belongs_to_one_user(tmp_path):
    with one_compiles(tmp_path):
        (lock,) = tmp_path.iterdir()
    assert lock.stat().st_mode & 0o777 == 0o600
