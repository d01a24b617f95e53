"""The frames that a link has sent, kept on disk until no peer can ask for them again.

A restarted stage computes its steps since the checkpoint again, from the frames that its neighbours sent it the first
time and keep here. Each step has a file, ``step-00000012.frames``, with one frame after the other: its header
(`frame.py`), whose checksum covers the payload, then the payload. Nothing is synced to the disk: the log is for
neighbours that die; after the death of this machine the frames are computed again anyway.

When the log would grow too long, steps before the newest complete checkpoint are removed first: only a stage that
returns from an older copy needs them. If that is not enough, or a write fails, the log is given up, and the user is
warned, once per checkpoint: until the next checkpoint is complete the neighbour cannot return alone, and all stages
would go back to the previous one. All steps up to the current one are removed, and logging starts again with the next
step, so that the log is complete again soon after there is room.
"""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch

from tahq.comm.link.frame import (
    HEADER_NBYTES,
    Frame,
    buffer_of,
    header_of,
    pack_header,
    peek_payload_nbytes,
    unpack_header,
)
from tahq.errors import FrameLogError, RemoteProtocolError
from tahq.units import format_size

_log = logging.getLogger(__name__)
_TRIES = 5


class FrameLog:
    """The frames that one end of a link has sent; any thread may call it.

    Args:
        folder: for this link alone; files that an earlier process left in it are removed.
        link: the link's number, for messages.
        limit_nbytes: the most that it may take on the disk.
        on_given_up: called with the reason when the log is given up, by the thread that sends.
        inside: an enclosing folder; it and those in between are removed with the last log in them.
    """

    def __init__(
        self,
        folder: Path,
        link: int,
        limit_nbytes: int,
        *,
        on_given_up: Callable[[str], None] | None = None,
        inside: Path | None = None,
    ) -> None:
        self._folder = folder
        self._link = link
        self._limit_nbytes = limit_nbytes
        self._on_given_up = on_given_up
        self._around = [each for each in folder.parents if inside is not None and each.is_relative_to(inside)]
        self._lock = threading.Lock()
        self.nbytes = 0
        """What it takes on the disk."""
        self._step_nbytes: dict[int, int] = {}
        """What each step's file takes."""
        self._first = 0
        """Steps before this one are missing, or incomplete."""
        self._droppable = 0
        """Steps before this one may be removed when room is needed."""
        self._is_told = False
        """Whether the user was warned since the newest checkpoint that it was given up."""
        self._file: BinaryIO | None = None
        """Of the newest step, open for writing."""
        shutil.rmtree(folder, ignore_errors=True)

    def begin(self, step: int) -> None:
        """Start at this step: another process sent the frames of earlier ones."""
        self._first = step

    def is_complete_from(self, step: int) -> bool:
        """Whether every frame of this step and of all later ones is here."""
        return step >= self._first

    def append(self, frame: Frame, send: Callable[[], None] = lambda: None) -> None:
        """Keep a frame whose payload lies in host memory; step numbers never decrease.

        `send` is called first, as writing takes milliseconds. A later reader of the log waits until the frame is in it.
        """
        with self._lock:
            send()
            step = frame.id.step
            if step < self._first:
                return
            payload = buffer_of(frame.payload)
            try:
                if not self._has_room(HEADER_NBYTES + len(payload)):
                    raise OSError(f"it would take more than {format_size(self._limit_nbytes)} (run.frame_log)")
                header = header_of(frame, 0, self._link)._replace(payload_nbytes=len(payload))
                file = self._open(step)
                file.write(pack_header(header, payload))
                file.write(payload)
                file.flush()
                self._step_nbytes[step] += HEADER_NBYTES + len(payload)
                self.nbytes += HEADER_NBYTES + len(payload)
            except OSError as error:
                self._give_up(step, error)

    def _has_room(self, nbytes: int) -> bool:
        for step in [step for step in self._step_nbytes if step < self._droppable]:
            if self.nbytes + nbytes <= self._limit_nbytes:
                break
            self._remove(step)
            self._first = step + 1
        return self.nbytes + nbytes <= self._limit_nbytes

    def _open(self, step: int) -> BinaryIO:
        path = str(self._path(step))
        if self._file is None or self._file.name != path:
            self._close_file()
            self._make_folder()
            self._file = open(path, "ab", opener=partial(os.open, mode=0o600))  # noqa: SIM115
            self._step_nbytes.setdefault(step, 0)
        return self._file

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.frames"

    def _make_folder(self) -> None:
        """Make it, even while a worker that leaves removes an enclosing folder because it is empty."""
        for left in reversed(range(_TRIES)):
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            # FileExistsError, too: mkdir found a folder that was gone when `exist_ok` checked it.
            except (FileNotFoundError, FileExistsError):
                if not left:
                    raise
            else:
                return

    def _give_up(self, step: int, error: OSError) -> None:
        reason = f"{self._folder}: {error.strerror or error}"
        if not self._is_told:
            self._is_told = True
            _log.warning(
                "link %d: sent frames are not kept any more until the next checkpoint: %s. If the peer dies before "
                "that, all stages go back to the last checkpoint",
                self._link,
                reason,
            )
            if self._on_given_up is not None:
                self._on_given_up(reason)
        self._first = step + 1
        for kept in list(self._step_nbytes):
            self._remove(kept)

    def read(self, first: int, last: int | None = None) -> Iterator[Frame]:
        """The frames of steps first … last (None: to the newest); FrameLogError if some are missing or damaged."""
        with self._lock:
            if not self.is_complete_from(first):
                raise FrameLogError(
                    f"link {self._link}: frames since step {first + 1} are not kept: the log begins at step "
                    f"{self._first + 1}",
                    self._link,
                )
            files = dict(self._step_nbytes)
        for step, nbytes in files.items():
            if first <= step and (last is None or step <= last):
                yield from self._read_file(self._path(step), nbytes)

    def _read_file(self, path: Path, nbytes: int) -> Iterator[Frame]:
        try:
            with path.open("rb") as file:
                while file.tell() < nbytes:
                    data = file.read(HEADER_NBYTES)
                    payload_nbytes = peek_payload_nbytes(data)
                    if not 0 <= payload_nbytes <= nbytes - file.tell():
                        raise RemoteProtocolError(f"{path} ends in the middle of a frame")
                    payload = bytearray(payload_nbytes)
                    file.readinto(payload)
                    header = unpack_header(data, memoryview(payload), path)
                    yield header.frame(
                        torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0).byte()
                    )
        except (OSError, RemoteProtocolError) as error:
            raise FrameLogError(f"link {self._link}: its frame log cannot be read: {error}", self._link) from error

    def free_before(self, step: int, droppable: int = 0) -> None:
        """Steps before this one are not needed any more; those before `droppable` stay if there is room."""
        with self._lock:
            self._droppable = droppable
            for kept in [kept for kept in self._step_nbytes if kept < step]:
                self._remove(kept)
            if self._first <= max(step, droppable):
                self._is_told = False

    def close(self) -> None:
        """Remove the log, which a link that ends in order no longer needs; the last one's enclosing folders, too."""
        with self._lock:
            for kept in list(self._step_nbytes):
                self._remove(kept)
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):  # another link or stage still has files there
                for folder in self._around:
                    folder.rmdir()

    def _remove(self, step: int) -> None:
        if self._file is not None and self._file.name == str(self._path(step)):
            self._close_file()
        self.nbytes -= self._step_nbytes.pop(step)
        try:
            self._path(step).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("link %d: %s cannot be removed: %s", self._link, self._path(step), error.strerror)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # kept frames were flushed; unflushed bytes belong to a log that is given up
                file.close()
