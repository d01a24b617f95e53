"""What a link has sent, kept on disk until nobody can ask for it again.

A stage that is started again computes its steps since the snapshot once more, from the frames that its neighbours sent
it then: they keep them here. One file a step, ``step-00000012.frames``, and in it one frame after the other: its header
(`frame.py`), whose checksum covers the payload, and the payload. Nothing is synchronised to the disk: the log is there
for neighbours that die, not for the death of this machine, after which it would be computed anew anyway.

When the log would become too long, steps before the newest complete snapshot go first: only a stage that comes back
from an older copy wants those. When that is not enough, or the disk takes no more, it is given up, which the user is
told once until the next snapshot: then the neighbour cannot come back alone until that is complete, and all stages
would go back to the one before. What was kept of the step that it happened at, and of those before, is removed; from
the next step on it is tried again, so that the log is complete again soon after there is room.
"""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from tahq.comm.link.frame import (
    HEADER_NBYTES,
    Frame,
    FrameHeader,
    FrameKind,
    buffer_of,
    pack_header,
    peek_payload_nbytes,
    unpack_header,
)
from tahq.errors import FrameLogError, RemoteProtocolError
from tahq.units import format_size

_log = logging.getLogger(__name__)
_SUFFIX = ".frames"
_TRIES = 5


@dataclass(slots=True)
class _StepFile:
    path: Path
    nbytes: int = 0


class FrameLog:
    """The frames that one end of a link has sent; any thread may call it.

    Args:
        folder: of this link alone; what an earlier process has left in it is removed.
        link: the link's number, for messages.
        limit_nbytes: the most that it may take on the disk.
        on_given_up: told why, when the log is given up; called by the thread that sends.
        inside: a folder around it; it and those in between are removed with the last log in them.
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
        self._is_told = False
        """Whether the user knows that it was given up since the newest snapshot."""
        self._lock = threading.Lock()
        self._files: dict[int, _StepFile] = {}
        self._nbytes = 0
        self._given_up_at: int | None = None
        """The step at which it was given up; frames of this step and of those before are not all here."""
        self._first = 0
        """Of the steps before this one nothing is here, or not all."""
        self._droppable = 0
        shutil.rmtree(folder, ignore_errors=True)
        self._open: tuple[int, int] | None = None
        """The step whose file is open, and its descriptor."""

    @property
    def nbytes(self) -> int:
        """What it takes on the disk."""
        return self._nbytes

    def begin(self, step: int) -> None:
        """Nothing of the steps before this one will be kept: another process sent it."""
        self._first = step

    def is_complete_from(self, step: int) -> bool:
        """Whether every frame of this step and of all later ones is here."""
        return step >= self._first and (self._given_up_at is None or step > self._given_up_at)

    def append(self, frame: Frame) -> None:
        """Keep a frame whose payload lies in host memory; steps never go back."""
        with self._lock:
            step = frame.id.step
            if self._given_up_at is not None and step <= self._given_up_at:
                return
            payload = buffer_of(frame.payload)
            try:
                if not self._has_room(HEADER_NBYTES + len(payload)):
                    raise OSError(f"it would take more than {format_size(self._limit_nbytes)} (run.frame_log)")
                self._write(step, _header(frame, self._link, len(payload)), payload)
            except OSError as error:
                self._give_up(step, error)

    def _has_room(self, nbytes: int) -> bool:
        """Whether so much more fits, after steps have gone that may."""
        for step in [step for step in self._files if step < self._droppable]:
            if self._nbytes + nbytes <= self._limit_nbytes:
                break
            self._remove([step])
            self._first = step + 1
        return self._nbytes + nbytes <= self._limit_nbytes

    def _write(self, step: int, header: FrameHeader, payload: memoryview) -> None:
        descriptor = self._descriptor(step)
        rest = [memoryview(pack_header(header, payload)), payload]
        nbytes = sum(map(len, rest))
        while rest:
            written = os.writev(descriptor, rest)
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if written:
                rest[0] = rest[0][written:]
        self._files[step].nbytes += nbytes
        self._nbytes += nbytes

    def _descriptor(self, step: int) -> int:
        if self._open is not None and self._open[0] == step:
            return self._open[1]
        self._close_file()
        self._make_folder()
        path = self._folder / f"step-{step:08d}{_SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._files.setdefault(step, _StepFile(path))
        self._open = (step, descriptor)
        return descriptor

    def _make_folder(self) -> None:
        """Make it, though a worker that leaves may remove a folder around it that is empty just now."""
        for left in reversed(range(_TRIES)):
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            # FileExistsError, too: mkdir found one, and it was gone when `exist_ok` looked whether it is a folder.
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
                "link %d: what was sent is kept no longer, until the next snapshot: %s. If the peer dies before that, "
                "all stages go back to the last snapshot",
                self._link,
                reason,
            )
            if self._on_given_up is not None:
                self._on_given_up(reason)
        self._given_up_at = step
        self._remove(list(self._files))

    def read(self, first: int, last: int | None = None) -> Iterator[Frame]:
        """The frames of steps first … last (None: to the newest), as they were sent.

        Raises:
            FrameLogError: they are not all here, or damaged; the message names the file.
        """
        if not self.is_complete_from(first):
            since = max(self._first, -1 if self._given_up_at is None else self._given_up_at + 1)
            raise FrameLogError(
                f"link {self._link}: frames since step {first + 1} are not kept: the log begins at step {since + 1}",
                self._link,
            )
        with self._lock:
            files = [(step, file.path, file.nbytes) for step, file in self._files.items()]
        for step, path, nbytes in files:
            if first <= step and (last is None or step <= last):
                yield from self._read_file(path, nbytes)

    def _read_file(self, path: Path, nbytes: int) -> Iterator[Frame]:
        try:
            with path.open("rb") as file:
                while file.tell() < nbytes:
                    data = file.read(HEADER_NBYTES)
                    payload = bytearray(_payload_nbytes(data, nbytes - file.tell(), path))
                    file.readinto(payload)
                    header = unpack_header(data, memoryview(payload), str(path))
                    tensor = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0).byte()
                    yield Frame(header.id, header.codec, header.dtype, header.shape, tensor, header.shard)
        except (OSError, RemoteProtocolError) as error:
            raise FrameLogError(f"link {self._link}: its frame log cannot be read: {error}", self._link) from error

    def free_before(self, step: int, droppable: int = 0) -> None:
        """Nobody will ask for anything of the steps before this one; those before `droppable` stay if there is room."""
        with self._lock:
            self._droppable = droppable
            self._remove([kept for kept in self._files if kept < step])
            if self._given_up_at is not None and self._given_up_at < max(step, droppable):
                self._is_told = False

    def close(self) -> None:
        """Remove it: who closes a link in order needs no log of it any more. Folders around it go with the last one."""
        with self._lock:
            self._remove(list(self._files))
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):  # of another link, or another stage, there is something left
                for folder in self._around:
                    folder.rmdir()

    def _remove(self, steps: list[int]) -> None:
        if self._open is not None and self._open[0] in steps:
            with suppress(OSError):  # it goes, whatever was in it
                self._close_file()
        for step in steps:
            file = self._files.pop(step)
            self._nbytes -= file.nbytes
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("link %d: %s cannot be removed: %s", self._link, file.path, error.strerror)

    def _close_file(self) -> None:
        if self._open is not None:
            _, descriptor = self._open
            self._open = None  # whatever the disk says to what it has kept back until now
            os.close(descriptor)


def _header(frame: Frame, link: int, nbytes: int) -> FrameHeader:
    return FrameHeader(
        kind=FrameKind.DATA,
        epoch=0,
        link=link,
        sequence=0,
        id=frame.id,
        shard=frame.shard,
        codec=frame.codec,
        dtype=frame.dtype,
        shape=frame.shape,
        total_nbytes=nbytes,
        payload_nbytes=nbytes,
    )


def _payload_nbytes(header: bytes, left: int, path: Path) -> int:
    """The payload's length as the header at hand names it, within what is left of the file."""
    nbytes = peek_payload_nbytes(header)
    if not 0 <= nbytes <= left:
        raise RemoteProtocolError(f"{path} ends in the middle of a frame")
    return nbytes
