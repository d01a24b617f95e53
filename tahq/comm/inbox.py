"""A queue between an I/O thread and the thread that computes; it can be made to raise instead.

`get` blocks in the operating system, without polling. A failure comes after what was put before it;
an abort comes at once. Either stays: every later `get` raises it too.
"""

import queue
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _Wake:
    """Put into the queue so that the waiting thread looks at the errors."""


class Inbox(Generic[Item]):
    """Items in the order they were put; `name` begins the message of a TimeoutError."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Item | _Wake] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._abort: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """What `get` raises sooner or later; None while all is well."""
        return self._abort or self._failure

    def put(self, item: Item) -> None:
        """Add an item."""
        self._queue.put(item)

    def fail(self, error: Exception) -> None:
        """Raise `error` after everything put so far was taken; the first failure counts."""
        self._failure = self._failure or error
        self._queue.put(_Wake())

    def abort(self, error: Exception) -> None:
        """Raise `error` from now on, whatever is queued; the first abort counts."""
        self._abort = self._abort or error
        self._queue.put(_Wake())

    def get(self, timeout_s: float | None) -> Item:
        """The next item.

        Args:
            timeout_s: how long to wait; None = until there is one; 0 = only look.

        Raises:
            TimeoutError: there was none in time.
            Exception: what `fail` or `abort` was given.
        """
        self._raise(self._abort)
        try:
            item = self._queue.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except queue.Empty:
            raise TimeoutError(f"{self._name}: nothing came within {timeout_s} s") from None
        self._raise(self._abort)
        if isinstance(item, _Wake):
            self._queue.put(item)
            self._raise(self._failure)
            raise AssertionError("woken without a reason")
        return item

    def _raise(self, error: Exception | None) -> None:
        if error is not None:
            raise error.with_traceback(None)
