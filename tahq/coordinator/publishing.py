"""Makes complete checkpoints the newest one, beside the training.

Publishing forces files to the disk and removes older checkpoints, gigabytes perhaps; a COMMIT must not wait for either.
The coordinator's own thread takes the outcomes, in the order in which the checkpoints were complete.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tahq.comm.control.messages import Snapshotted
from tahq.coordinator.journal import gone
from tahq.coordinator.options import CoordinatorOptions
from tahq.errors import SnapshotError
from tahq.fault_points import PUBLISHED, PUBLISHING, reached
from tahq.pipeline.checkpoint.manifest import StageFile
from tahq.pipeline.checkpoint.snapshot import discard, prune, publish

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotParts:
    """Every stage's part of the checkpoint after `step` steps, by stage.

    `codecs` is what `LinkCodecs.saved` returned then; `base` the checkpoint at which lost stages may have to begin
    again, None: this one.
    """

    step: int
    parts: tuple[Snapshotted, ...]
    codecs: Mapping[str, Any] = field(default_factory=dict)
    base: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def error(self) -> str:
        """What went wrong, by stage; empty if every part is durable."""
        return "; ".join(f"stage {part.stage}: {part.error}" for part in self.parts if part.error)


Publish = Callable[[SnapshotParts], None]
"""Raises OSError or SnapshotError if it cannot publish, or if a part is missing (`error`)."""


def publish_to_folder(options: CoordinatorOptions, parts: SnapshotParts) -> None:
    """Write the manifest, move `latest`, remove all but the newest few; or remove the parts of a failed checkpoint.

    Raises:
        SnapshotError: it has failed, or cannot be published; `latest` names the one before.
        UserError: the run's folder is gone.
    """
    snapshots = options.run_folder / "snapshots"
    if not options.run_folder.is_dir():
        raise gone(options.run_folder)
    if parts.error:
        _try_to(lambda: discard(snapshots, parts.step))  # the part's own error says more than one of discarding
        raise SnapshotError(parts.error)
    reached(PUBLISHING, step=parts.step)
    files = [StageFile(part.file, part.sha256, part.nbytes) for part in parts.parts]
    meta = {
        "run_id": options.run_id,
        "config": json.loads(options.config_json),
        "config_hash": options.config_hash,
        "version": options.version,
        "codecs": dict(parts.codecs),
    }
    publish(snapshots, parts.step, files, meta)
    _try_to(lambda: prune(snapshots, options.keep_snapshots, base=parts.base))  # the new one is complete regardless
    reached(PUBLISHED, step=parts.step)


def _try_to(remove: Callable[[], object]) -> None:
    try:
        remove()
    except SnapshotError as error:
        log.warning("%s", error)


class Publishing:
    """One checkpoint at a time; all calls come from one thread.

    Args:
        publish: called where the executor runs it.
        executor: runs one call after the other; None: in a thread.
    """

    def __init__(self, publish: Publish, executor: Executor | None = None) -> None:
        self._publish = publish
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="tahq-publish")
        self._begun: deque[tuple[SnapshotParts, Future[str]]] = deque()

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Checkpoints that were begun and not taken, in words."""
        return tuple(f"the checkpoint after step {parts.step}" for parts, _ in self._begun)

    def begin(self, parts: SnapshotParts) -> None:
        """Publish these after those before."""
        self._begun.append((parts, self._executor.submit(self._error_of, parts)))

    def take(self, *, wait: bool = False) -> list[tuple[SnapshotParts, str]]:
        """Return what was published since the last call, with what went wrong ("": nothing).

        Args:
            wait: until everything that was begun is published.

        Raises:
            UserError: the run's folder is gone.
            Exception: what `publish` raised that is neither OSError nor SnapshotError.
        """
        taken = []
        while self._begun and (wait or self._begun[0][1].done()):
            parts, future = self._begun.popleft()
            taken.append((parts, future.result()))
        return taken

    def close(self) -> None:
        """Return when everything that was begun is published."""
        self._executor.shutdown(wait=True)

    def _error_of(self, parts: SnapshotParts) -> str:
        try:
            self._publish(parts)
        except (OSError, SnapshotError) as error:
            return parts.error or f"coordinator: {error}"
        return parts.error
