"""Keeps copies of other stages' snapshots on this host, fetched bit by bit beside the training.

::

    copies/stage-003/step-00000050/stage-003-88ab….safetensors

One thread, one file at a time. An order for a stage takes the place of an older one for the same stage that is under
way or waits. What is there already is only compared, so an order may be given again at any time.
"""

import logging
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tahq.comm.control.messages import Copied, Copy
from tahq.errors import PeerLostError, RemoteProtocolError, TahqError
from tahq.pipeline.checkpoint.fetched_file import fetch_file, has_file
from tahq.pipeline.checkpoint.manifest import FOLDER_PREFIX, snapshot_name

_LEAVE_S = 2.0
"""How long the thread may take to leave: it may be reading a large file."""
_log = logging.getLogger(__name__)

Fetch = Callable[[Copy, int, Callable[[], bool]], Iterator[bytes]]
"""(order, offset, is it wanted still) -> the bytes of the file from there on."""


class _Prune(NamedTuple):
    step: int


class CopyKeeper:
    """One worker's keeper.

    Args:
        folder: `copies` in the run's folder.
        stage: whose worker keeps them.
        fetch: where bytes come from.
        report: told what came of each order; called in the keeper's thread.
        offer: told the hash and the place of every file that is here.
    """

    def __init__(
        self,
        folder: Path,
        stage: int,
        fetch: Fetch,
        report: Callable[[Copied], None],
        offer: Callable[[str, Path], None],
    ) -> None:
        self._folder = folder
        self._stage = stage
        self._fetch = fetch
        self._report = report
        self._offer = offer
        self._lock = threading.Lock()
        self._wanted: dict[int, Copy] = {}
        self._jobs: queue.SimpleQueue[Copy | _Prune | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tahq-copies", daemon=True)
        self._thread.start()

    def order(self, order: Copy) -> None:
        """Have this file here; returns at once. Any thread may call it."""
        with self._lock:
            newest = self._wanted.get(order.stage)
            if newest is None or newest.step <= order.step:
                self._wanted[order.stage] = order
        self._jobs.put(order)

    def prune(self, step: int) -> None:
        """Nobody will want a copy of a snapshot after fewer steps than this; returns at once."""
        self._jobs.put(_Prune(step))

    def close(self) -> None:
        """Leave what is under way, to be gone on with another time; safe to call twice."""
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join(_LEAVE_S)

    def path_of(self, order: Copy) -> Path:
        """Where a copy lies."""
        return self._folder / f"stage-{order.stage:03d}" / snapshot_name(order.step) / order.file

    def _run(self) -> None:
        while not self._is_closed and (job := self._jobs.get()) is not None:
            if isinstance(job, _Prune):
                self._remove_before(job.step)
            else:
                self._carry_out(job)

    def _carry_out(self, order: Copy) -> None:
        try:
            if self._is_here(order):
                self._offer(order.sha256, self.path_of(order))
                self._say(Copied(order.step, order.stage, self._stage))
        except TahqError as error:
            _log.warning("no copy of %s is kept here: %s", order.file, error)
            self._say(Copied(order.step, order.stage, self._stage, str(error)))

    def _is_here(self, order: Copy) -> bool:
        def is_wanted() -> bool:
            return not self._is_closed and self._wanted.get(order.stage) == order

        if Path(order.file).name != order.file:
            raise RemoteProtocolError(f"{order.file!r} is not a plain file name")
        path = self.path_of(order)
        if not order.address and not has_file(path, order.sha256):
            raise PeerLostError(f"{order.file} is not here, and nobody else has it now")
        return has_file(path, order.sha256) or (
            is_wanted()
            and fetch_file(path, order.sha256, lambda offset: self._fetch(order, offset, is_wanted), is_wanted)
        )

    def _say(self, copied: Copied) -> None:
        try:
            self._report(copied)
        except TahqError as error:
            _log.warning("the coordinator does not hear of the copy of stage %d: %s", copied.stage, error)

    def _remove_before(self, step: int) -> None:
        for folder in self._folder.glob(f"stage-*/{FOLDER_PREFIX}*"):
            number = folder.name.removeprefix(FOLDER_PREFIX)
            if number.isdecimal() and int(number) < step:
                shutil.rmtree(folder, ignore_errors=True)
