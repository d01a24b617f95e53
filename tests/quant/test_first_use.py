"""Of several processes about to compile the same kernels, one compiles and the others follow together."""

import fcntl
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tahq.quant.codec import one_compiles

PATIENCE_S = 30
KERNELS = "tah on cpu"


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    """Locks of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def only_lock(locks):
    (path,) = locks.rglob("*.lock")
    return path


def test_processes_that_come_while_the_first_compiles_wait_and_then_go_together():
    done, together = [], threading.Barrier(3, timeout=PATIENCE_S)

    def follow():
        with one_compiles(KERNELS):
            assert done == ["first"]
            together.wait()  # breaks if the three do not get here at the same time

    with ThreadPoolExecutor(3) as pool:
        with one_compiles(KERNELS):
            followers = [pool.submit(follow) for _ in range(3)]
            time.sleep(0.2)
            assert not any(follower.done() for follower in followers)
            done.append("first")
        for follower in followers:
            follower.result(PATIENCE_S)


def compile_beside(kernels, **options):
    """Be about to compile in another thread; TimeoutError if that has to wait for this one."""

    def compile_them():
        with one_compiles(kernels, **options):
            pass

    with ThreadPoolExecutor(1) as pool:
        pool.submit(compile_them).result(PATIENCE_S)


def test_processes_with_other_kernels_or_another_cache_do_not_wait(tmp_path, monkeypatch):
    with one_compiles(KERNELS):
        compile_beside("fixed on cpu")
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "mine"))
        compile_beside(KERNELS)


def test_process_that_has_waited_too_long_goes_ahead_and_says_so(caplog):
    with one_compiles(KERNELS):
        compile_beside(KERNELS, longest_s=0.1)
    assert f"{KERNELS}: another process has been compiling it" in caplog.text


def test_the_lock_is_free_again_after_an_error(locks):
    with pytest.raises(ZeroDivisionError), one_compiles(KERNELS):
        raise ZeroDivisionError
    with only_lock(locks).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert only_lock(locks).stat().st_mode & 0o777 == 0o600
    assert only_lock(locks).parent.stat().st_mode & 0o777 == 0o700
