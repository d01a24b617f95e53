"""Files of checkpoints that come from other workers: copies kept for other stages, and what a lost stage restarts from.

::

    copies/stage-003/step-00000050/stage-003-88ab….safetensors

A file is complete, durable and the right one, or does not exist: it grows under another name, and is continued there
the next time, in this process or another.
"""

import hashlib
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tahq.comm.control.messages import Assign, Copied, Copy
from tahq.errors import PeerLostError, RemoteProtocolError, SnapshotError, TahqError, UserError
from tahq.pipeline.checkpoint.durable_file import sync_folder
from tahq.pipeline.checkpoint.manifest import FOLDER_PREFIX, snapshot_name

PARTIAL_SUFFIX = ".partial"
_LEAVE_S = 2.0
"""How long `close` waits for the keeper's thread, which may be reading a large file."""

log = logging.getLogger(__name__)

Pieces = Callable[[int], Iterator[bytes]]
"""The bytes of a file from an offset on; they end early if the file is no longer wanted."""
FetchCopy = Callable[[Copy, int, Callable[[], bool]], Iterator[bytes]]
"""(order, offset, whether it is still wanted) -> the bytes of the file from there on."""
Fetch = Callable[[str, str, str, int], Iterator[bytes]]
"""(address of the worker that has it, its public key, SHA-256, offset) -> the bytes of the file from there on."""


def has_file(path: Path, sha256: str) -> bool:
    """Whether the file exists and has this hash (hex)."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


def fetch_file(path: Path, sha256: str, pieces: Pieces, is_wanted: Callable[[], bool] = lambda: True) -> bool:
    """Fetch a file to its place, durably.

    Args:
        path: its place; the folder is made if it does not exist. One process at a time fetches it.
        sha256: its hash, in hex.
        pieces: its source.
        is_wanted: whether it is still wanted when the pieces have ended.

    Returns:
        False if it is no longer wanted; the part that has come is kept.

    Raises:
        RemoteProtocolError: the content is wrong; nothing is kept.
        SnapshotError: the file cannot be written.
        PeerLostError: from `pieces`; the part that has come is kept.
    """
    partial_path = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_path.open("a+b") as file:
            digest = _append(file, pieces)
            if not is_wanted():
                return False
            file.flush()
            os.fsync(file.fileno())
        if digest != sha256:
            raise RemoteProtocolError(
                f"{path.name} arrived with SHA-256 {digest[:16]}…, expected {sha256[:16]}…; it was dropped"
            )
        partial_path.replace(path)
        sync_folder(path.parent)
    except (RemoteProtocolError, OSError) as error:
        with suppress(OSError):  # the first error is the one to report
            partial_path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise SnapshotError(f"cannot write {partial_path}: {error.strerror}; free space there") from error
        raise
    return True


def _append(file: BinaryIO, pieces: Pieces) -> str:
    """Append what is missing; returns the SHA-256 of the whole file."""
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
    for piece in pieces(file.seek(0, os.SEEK_END)):
        digest.update(piece)
        file.write(piece)
    return digest.hexdigest()


class CopyKeeper:
    """Keeps copies of other stages' files on this host, fetched beside the training.

    One thread, one file at a time. An order for a stage replaces an older one for the same stage that is in progress or
    waits. An existing file is only compared, so an order may be repeated at any time.

    Args:
        folder: `copies` in the run's folder.
        stage: this worker's.
        fetch: the source of bytes.
        report: told the outcome of each order, in the keeper's thread.
        offer: told hash and place of every file that is here.
    """

    def __init__(
        self,
        folder: Path,
        stage: int,
        fetch: FetchCopy,
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
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tahq-copies", daemon=True)
        self._thread.start()

    def order(self, order: Copy) -> None:
        """Get this file; returns at once. Any thread may call it."""
        with self._lock:
            newest = self._wanted.get(order.stage)
            if newest is None or newest.step <= order.step:
                self._wanted[order.stage] = order
        self._jobs.put(partial(self._carry_out, order))

    def prune(self, step: int) -> None:
        """Remove copies of checkpoints after fewer steps than this; returns at once."""
        self._jobs.put(partial(self._remove_before, step))

    def close(self) -> None:
        """Stop; a file in progress is continued another time. Safe to call twice."""
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join(_LEAVE_S)

    def path_of(self, order: Copy) -> Path:
        """The place of a copy."""
        return self._folder / f"stage-{order.stage:03d}" / snapshot_name(order.step) / order.file

    def _run(self) -> None:
        while not self._is_closed and (job := self._jobs.get()) is not None:
            job()

    def _carry_out(self, order: Copy) -> None:
        try:
            if self._is_here(order):
                self._offer(order.sha256, self.path_of(order))
                self._tell(Copied(order.step, order.stage, self._stage))
        except TahqError as error:
            log.warning("cannot copy %s to this host: %s", order.file, error)
            self._tell(Copied(order.step, order.stage, self._stage, str(error)))

    def _is_here(self, order: Copy) -> bool:
        """Fetch the file unless it is here already; False if it is no longer wanted."""

        def is_wanted() -> bool:
            return not self._is_closed and self._wanted.get(order.stage) == order

        if Path(order.file).name != order.file:
            raise RemoteProtocolError(f"{order.file!r} is not a plain file name")
        path = self.path_of(order)
        if has_file(path, order.sha256):
            return True
        if not order.address:
            raise PeerLostError(f"{order.file} is not on this host, and no other worker has it now")
        fetch = self._fetch
        return is_wanted() and fetch_file(path, order.sha256, lambda offset: fetch(order, offset, is_wanted), is_wanted)

    def _tell(self, copied: Copied) -> None:
        try:
            self._report(copied)
        except TahqError as error:
            log.warning("cannot report the copy of stage %d to the coordinator: %s", copied.stage, error)

    def _remove_before(self, step: int) -> None:
        for folder in self._folder.glob(f"stage-*/{FOLDER_PREFIX}*"):
            number = folder.name.removeprefix(FOLDER_PREFIX)
            if number.isdecimal() and int(number) < step:
                shutil.rmtree(folder, ignore_errors=True)


# -- restarting a stage ------------------------------------------------------------------------------


def restored(assign: Assign, run_folder: Path, num_stages: int, fetch: Fetch, working: Callable[[str], None]) -> Assign:
    """The assignment with the checkpoint to restart from, whose file is on this disk when this returns.

    That is the newest complete checkpoint, from this host's disk or from a worker that has a copy; or else the older
    one of which a copy exists off every stage's host. Without any checkpoint the stage starts from the beginning.

    Args:
        assign: from the coordinator.
        run_folder: on this host.
        num_stages: of the run.
        fetch: the source of files; raises PeerLostError or RemoteProtocolError.
        working: told the present activity.

    Raises:
        PeerLostError: this stage's file cannot be had; the message names it, with every reason.
    """
    reasons: list[str] = []
    for candidate in _candidates(assign):
        name = own_file(candidate, num_stages)
        if name is None or _can_get(candidate, name, run_folder, fetch, working, reasons):
            return candidate
        reasons.append(f"{name} is missing or damaged on this host")
    raise PeerLostError(
        f"stage {assign.stage} cannot restart: {'; '.join(dict.fromkeys(reasons))}; no other host has a copy"
    )


def own_file(assign: Assign, num_stages: int) -> str | None:
    """The stage's file in the checkpoint; None without a checkpoint, or if another number of stages wrote it."""
    if not assign.snapshot or len(assign.snapshot_files) != num_stages:
        return None
    mine = [name for name in assign.snapshot_files if name.startswith(f"stage-{assign.stage:03d}-")]
    return mine[0] if mine and Path(mine[0]).name == mine[0] else None


def _candidates(assign: Assign) -> Iterator[Assign]:
    yield assign
    if assign.copied_step >= 0:
        yield replace(
            assign,
            snapshot=assign.copied_snapshot,
            snapshot_files=assign.copied_files,
            start_step=assign.copied_step,
        )


def _can_get(
    assign: Assign, name: str, run_folder: Path, fetch: Fetch, working: Callable[[str], None], reasons: list[str]
) -> bool:
    path, sha256 = run_folder / assign.snapshot / name, assign.snapshot_files[name]
    if has_file(path, sha256):
        return True
    for step, address, key in assign.sources:
        if step != assign.start_step:
            continue
        working(f"fetching {name}")
        log.info("fetching %s from %s", name, address)
        try:
            return fetch_file(path, sha256, partial(fetch, str(address), str(key), sha256))
        except (PeerLostError, RemoteProtocolError, UserError) as error:
            log.warning("%s", error)
            reasons.append(str(error))
    return False
