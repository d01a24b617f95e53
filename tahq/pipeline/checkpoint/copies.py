"""Checkpoint files from other workers: copies kept for other stages, and the file that a lost stage restarts from.

::

    copies/stage-003/step-00000050/stage-003-88ab….safetensors

A file has its name only when it is complete, durable and verified. Until then it grows under another name, from which
a later fetch continues, in this process or another.
"""

import fcntl
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
from typing import Any

from tahq.comm.control.messages import Assign, Copied, Copy, Published
from tahq.comm.zmq.files import FileSource
from tahq.errors import PeerLostError, RemoteProtocolError, SnapshotError, TahqError, UserError
from tahq.pipeline.checkpoint.durable_file import sha256_of, sync_folder
from tahq.pipeline.checkpoint.manifest import FOLDER_PREFIX, snapshot_name
from tahq.units import format_size

PARTIAL_SUFFIX = ".partial"
_LEAVE_S = 2.0
"""How long `close` waits for the thread, which may be reading a large file."""

log = logging.getLogger(__name__)

Fetch = Callable[..., Iterator[bytes]]
"""`tahq.comm.zmq.files.pieces` for one endpoint."""
Pieces = Callable[[int], Iterator[bytes]]
"""The bytes of a file from an offset on; they end early if it is no longer wanted."""


def has_file(path: Path, sha256: str, working: Callable[[str], None] = lambda activity: None) -> bool:
    """Whether the file exists and has this hash (hex)."""
    try:
        return path.is_file() and sha256_of(path, working) == sha256
    except OSError:
        return False


def fetch_file(path: Path, sha256: str, pieces: Pieces, is_wanted: Callable[[], bool] = lambda: True) -> bool:
    """Fetch a file with this hash (hex) from `pieces` to its place, durably.

    Returns False if it is no longer wanted when the pieces have ended; the received part is kept.

    Raises:
        RemoteProtocolError: the content is wrong; nothing is kept.
        SnapshotError: the file cannot be written.
        PeerLostError: from `pieces`, or another process is fetching it; the received part is kept.
    """
    partial_path = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_path.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PeerLostError(f"another process is fetching {path}; wait for it") from None
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256")
            for piece in pieces(file.seek(0, os.SEEK_END)):
                digest.update(piece)
                file.write(piece)
            if not is_wanted():
                return False
            file.flush()
            os.fsync(file.fileno())
        if (found := digest.hexdigest()) != sha256:
            raise RemoteProtocolError(
                f"{path.name} arrived with SHA-256 {found[:16]}…, expected {sha256[:16]}…; it was dropped"
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


def own_file(assign: Assign, num_stages: int) -> str | None:
    """The stage's file in the checkpoint; None without a checkpoint, or if another number of stages wrote it."""
    if not assign.snapshot or len(assign.snapshot_files) != num_stages:
        return None
    mine = [name for name in assign.snapshot_files if name.startswith(f"stage-{assign.stage:03d}-")]
    return mine[0] if mine and Path(mine[0]).name == mine[0] else None


class CheckpointCopies:
    """One worker's part in copies: offers its own files, keeps copies of others', fetches what it lacks.

    Copies are fetched beside the training by one thread, one file at a time. An order for a stage replaces an older one
    for the same stage that is in progress or waits. A file that is here is only compared, so an order may be repeated
    at any time.

    `fetch` raises PeerLostError or RemoteProtocolError; `offer` is called with hash and place of every file that others
    may fetch, and `report` with the outcome of each order, in the thread.
    """

    def __init__(
        self,
        assign: Assign,
        run_folder: Path,
        num_stages: int,
        rate_bits_per_s: float,
        fetch: Fetch,
        offer: Callable[[str, Path], None],
        report: Callable[[Copied], None],
    ) -> None:
        self._assign = assign
        self._run_folder = run_folder
        self._num_stages = num_stages
        self._rate_bits_per_s = rate_bits_per_s
        self._fetch = fetch
        self.offer = offer
        self._report = report
        self._lock = threading.Lock()
        self._wanted: dict[int, Copy] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tahq-copies", daemon=True)
        self._thread.start()

    def obey(self, order: Copy | Published) -> None:
        """Fetch a copy, or remove those that are older than any lost stage will need; returns at once."""
        if isinstance(order, Published):
            self._jobs.put(partial(self._remove_before, order.base))
            return
        with self._lock:
            newest = self._wanted.get(order.stage)
            if newest is None or newest.step <= order.step:
                self._wanted[order.stage] = order
        self._jobs.put(partial(self._carry_out, order))

    def close(self) -> None:
        """Stop; a file in progress is continued another time. Safe to call twice."""
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join(_LEAVE_S)

    def path_of(self, order: Copy) -> Path:
        """The place of a copy."""
        return self._run_folder / "copies" / f"stage-{order.stage:03d}" / snapshot_name(order.step) / order.file

    def _run(self) -> None:
        while not self._is_closed and (job := self._jobs.get()) is not None:
            job()

    def _carry_out(self, order: Copy) -> None:
        copied = Copied(order.step, order.stage, self._assign.stage)
        try:
            if not self._is_here(order):
                return
            self.offer(order.sha256, self.path_of(order))
        except TahqError as error:
            log.warning("cannot copy %s to this host: %s", order.file, error)
            copied = replace(copied, error=str(error))
        try:
            self._report(copied)
        except TahqError as error:
            log.warning("cannot report the copy of stage %d to the coordinator: %s", order.stage, error)

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
        pieces = self._pieces(
            (order.address, order.public_key), order.sha256, rate_bits_per_s=self._rate_bits_per_s, is_wanted=is_wanted
        )
        return is_wanted() and fetch_file(path, order.sha256, pieces, is_wanted)

    def _pieces(self, place: tuple[str, str], sha256: str, **options: Any) -> Pieces:
        address, public_key = place
        source = FileSource(address, self._assign.run_id, sha256, public_key)
        return lambda offset: self._fetch(source, offset=offset, **options)

    def _remove_before(self, step: int) -> None:
        for folder in (self._run_folder / "copies").glob(f"stage-*/{FOLDER_PREFIX}*"):
            number = folder.name.removeprefix(FOLDER_PREFIX)
            if number.isdecimal() and int(number) < step:
                shutil.rmtree(folder, ignore_errors=True)

    # -- restarting this stage -------------------------------------------------------------------

    def restored(self, working: Callable[[str], None]) -> Assign:
        """The assignment with the checkpoint to restart from, whose file is on this disk when this returns.

        That is the newest complete checkpoint, from this host's disk or from a worker that has a copy; or else the
        older one of which a copy exists off every stage's host. Without any checkpoint the stage starts from the
        beginning. Others may then fetch the file from here.

        `working` is called with the present activity.

        Raises:
            PeerLostError: this stage's file is nowhere to be found; the message names it, with every reason.
        """
        assign, reasons = self._assign, list[str]()
        candidates = [assign]
        if assign.copied_step >= 0:
            snapshot, files = assign.copied_snapshot, assign.copied_files
            candidates.append(replace(assign, snapshot=snapshot, snapshot_files=files, start_step=assign.copied_step))
        for candidate in candidates:
            name = own_file(candidate, self._num_stages)
            if name is None:
                return candidate
            path, sha256 = self._run_folder / candidate.snapshot / name, candidate.snapshot_files[name]
            places = [(str(address), str(key)) for at, address, key in assign.sources if at == candidate.start_step]
            fetched = (self._is_fetched(path, sha256, each, working, reasons) for each in places)
            if has_file(path, sha256, working) or any(fetched):
                self.offer(sha256, path)
                return candidate
            reasons.append(f"{name} is missing or damaged on this host")
        raise PeerLostError(
            f"stage {assign.stage} cannot restart: {'; '.join(dict.fromkeys(reasons))}; no other host has a copy"
        )

    def _is_fetched(
        self, path: Path, sha256: str, place: tuple[str, str], working: Callable[[str], None], reasons: list[str]
    ) -> bool:
        """Fetch the file from this address; returns whether that worked, or adds the reason why not."""

        def pieces(offset: int) -> Iterator[bytes]:
            nbytes = offset
            for piece in self._pieces(place, sha256)(offset):
                nbytes += len(piece)
                working(f"fetching {path.name}, {format_size(nbytes)}")
                yield piece

        working(f"fetching {path.name}")
        log.info("fetching %s from %s", path.name, place[0])
        try:
            return fetch_file(path, sha256, pieces)
        except (PeerLostError, RemoteProtocolError, UserError) as error:
            log.warning("%s", error)
            reasons.append(str(error))
            return False
