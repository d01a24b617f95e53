"""Snapshots being made the newest one, beside the training.

Publishing forces files to the disk and removes older snapshots, gigabytes perhaps; a COMMIT must not wait for either.
What it comes to is taken by the coordinator's own thread, in the order in which the snapshots were complete.
"""

from collections import deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from tahq.coordinator.publisher import Publish
from tahq.coordinator.reports import SnapshotParts
from tahq.errors import TahqError


class Publishing:
    """One snapshot at a time; all calls come from one thread.

    Args:
        publish: see `Publish`; called where the executor runs it.
        executor: runs one call after the other; None: in a thread.
    """

    def __init__(self, publish: Publish, executor: Executor | None = None) -> None:
        self._publish = publish
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="tahq-publish")
        self._begun: deque[tuple[SnapshotParts, Future[str]]] = deque()

    @property
    def outstanding(self) -> tuple[str, ...]:
        """What was begun and not taken, in words."""
        return tuple(f"the snapshot after step {parts.step}" for parts, _ in self._begun)

    def begin(self, parts: SnapshotParts) -> None:
        """Publish these when those before are."""
        self._begun.append((parts, self._executor.submit(self._error_of, parts)))

    def take(self, *, wait: bool = False) -> list[tuple[SnapshotParts, str]]:
        """What has been published since the last call, with what went wrong ("": nothing).

        Args:
            wait: until all that was begun is.

        Raises:
            Exception: what `publish` raised that is neither OSError nor TahqError.
        """
        taken = []
        while self._begun and (wait or self._begun[0][1].done()):
            parts, future = self._begun.popleft()
            taken.append((parts, future.result()))
        return taken

    def close(self) -> None:
        """Return when all that was begun is published."""
        self._executor.shutdown(wait=True)

    def _error_of(self, parts: SnapshotParts) -> str:
        try:
            self._publish(parts)
        except (OSError, TahqError) as error:
            return parts.error or f"coordinator: {error}"
        return parts.error
