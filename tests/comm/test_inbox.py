import threading
import time

import pytest

from tahq.comm.inbox import Inbox
from tahq.errors import TahqError


def test_items_come_in_order_then_time_runs_out():
    inbox = Inbox[int]("link 1")
    for item in range(3):
        inbox.put(item)
    assert [inbox.get(0.0) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TimeoutError, match=r"link 1: nothing came within 0\.0 s"):
        inbox.get(0.0)


def test_failure_comes_after_what_is_queued_and_stays():
    inbox = Inbox[int]("link 1")
    inbox.put(1)
    inbox.fail(TahqError("first"))
    inbox.fail(TahqError("second"))
    assert inbox.get(0.0) == 1
    for _ in range(3):
        with pytest.raises(TahqError, match="first"):
            inbox.get(None)


def test_abort_comes_before_what_is_queued_and_stays():
    inbox = Inbox[int]("link 1")
    inbox.put(1)
    inbox.fail(TahqError("failed"))
    inbox.abort(TahqError("aborted"))
    for _ in range(3):
        with pytest.raises(TahqError, match="aborted"):
            inbox.get(None)


@pytest.mark.parametrize("how", ["put", "fail", "abort"])
def test_waiting_ends_at_once(how):
    inbox = Inbox[object]("link 1")
    threading.Timer(0.05, getattr(inbox, how), [TahqError("now")]).start()
    started_s = time.monotonic()
    if how == "put":
        assert isinstance(inbox.get(None), TahqError)
    else:
        with pytest.raises(TahqError, match="now"):
            inbox.get(None)
    assert time.monotonic() - started_s < 1.0
