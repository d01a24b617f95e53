"""Making a complete snapshot the newest one, as files under the run's folder."""

import json
import logging
from collections.abc import Callable

from tahq.coordinator.options import CoordinatorOptions
from tahq.coordinator.reports import SnapshotParts
from tahq.errors import SnapshotError
from tahq.fault_points import PUBLISHED, PUBLISHING, reached
from tahq.pipeline.checkpoint.snapshot import StageFile, discard, prune, publish

Publish = Callable[[SnapshotParts], None]
"""Called with every stage's part; raises OSError or SnapshotError if it cannot, or if a part is missing (`error`)."""

log = logging.getLogger(__name__)


class SnapshotPublisher:
    """Writes the manifest, moves `latest`, removes what is older than the newest few.

    Args:
        options: where the run's folder is, and how many snapshots to keep.
    """

    def __init__(self, options: CoordinatorOptions) -> None:
        self._snapshots = options.run_folder / "snapshots"
        self._keep = options.keep_snapshots
        self._meta = {
            "run_id": options.run_id,
            "config": json.loads(options.config_json),
            "config_hash": options.config_hash,
            "version": options.version,
        }

    def __call__(self, parts: SnapshotParts) -> None:
        """Publish one snapshot, or remove what there is of one that failed.

        Raises:
            SnapshotError: it has failed, or cannot be published; `latest` names the one before.
        """
        if parts.error:
            self._discard(parts.step)
            raise SnapshotError(parts.error)
        reached(PUBLISHING, step=parts.step)
        files = [StageFile(part.file, part.sha256, part.nbytes) for part in parts.parts]
        publish(self._snapshots, parts.step, files, {**self._meta, "codecs": dict(parts.codecs)})
        try:
            prune(self._snapshots, self._keep, base=parts.base)
        except SnapshotError as error:
            log.warning("%s", error)  # the new one is complete all the same
        reached(PUBLISHED, step=parts.step)

    def _discard(self, step: int) -> None:
        try:
            discard(self._snapshots, step)
        except SnapshotError as error:
            log.warning("%s", error)  # why there is no snapshot says more
