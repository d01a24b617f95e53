"""Nothing stays behind: namespaces go with their process, and those of a killed process at the next start.

While a process lives, a `Guard` removes what it made: at exit, at SIGTERM and SIGHUP, and at Ctrl-C by way of
KeyboardInterrupt. For SIGKILL, each process leaves a note in `STATE_FOLDER` with its start time, and the next process
that builds a network removes the namespaces of those that are gone. The start time tells a process from a later one
with the same pid.
"""

import atexit
import json
import logging
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

from tahq.errors import NetworkError
from tahq_netem.backends.namespaces import end_processes, list_namespaces, owner_pid, remove_namespace

_log = logging.getLogger(__name__)
STATE_FOLDER: Final = Path("/run/tahq-netem")
"""Has a note for each process with namespaces: <pid>.json."""

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Guard:
    """Calls `remove` when this process ends, unless it was released before.

    Signals are taken over only where they would end the process at once: a handler that the program has installed
    stays. Guards nest; the last one acts first.
    """

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove
        self._owner = os.getpid()
        self._is_active = True
        self._previous: dict[int, object] = {}
        atexit.register(self._at_exit)
        for number in _ENDING:
            handler = signal.getsignal(number)
            if handler is signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), Guard):
                with suppress(ValueError):  # signals can be handled in the main thread only
                    signal.signal(number, self._on_signal)
                    self._previous[number] = handler

    def release(self) -> None:
        """Stop guarding."""
        self._is_active = False
        atexit.unregister(self._at_exit)
        for number, handler in self._previous.items():
            # A younger guard that is still there calls this one, which then only passes the signal on.
            if signal.getsignal(number) == self._on_signal:
                with suppress(ValueError):
                    signal.signal(number, handler)  # type: ignore[arg-type]

    def _at_exit(self) -> None:
        if self._is_active and os.getpid() == self._owner:
            self._remove()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            self._at_exit()
        except Exception:
            traceback.print_exc()  # the process is about to end
        finally:
            older = self._previous[number]
            if callable(older):
                older(number, frame)
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)


def note_process() -> None:
    """Leave a note that this process has namespaces, before it makes the first."""
    pid = os.getpid()
    note = _note(pid)
    try:
        STATE_FOLDER.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"pid": pid, "start_ticks": start_ticks(pid)}))
    except PermissionError:
        raise NetworkError("network namespaces need root") from None
    except OSError as error:
        raise NetworkError(f"cannot write {note}: {error.strerror}; networks are noted there") from None


def forget_process(pid: int) -> None:
    """Delete a process's note if none of its namespaces is left."""
    if not any(owner_pid(name) == pid for name in list_namespaces()):
        _note(pid).unlink(missing_ok=True)


def _note(pid: int) -> Path:
    return STATE_FOLDER / f"{pid}.json"


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None for a zombie, or if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the name in brackets, which may hold spaces and brackets itself.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int) -> bool:
    """Whether the process that made the namespaces of `pid` still runs; without a note, any process of that pid."""
    now = start_ticks(pid)
    try:
        noted = json.loads(_note(pid).read_text())["start_ticks"]
    except (OSError, ValueError, KeyError, TypeError):
        noted = now
    return now is not None and now == noted


def sweep_leftovers() -> list[str]:
    """Remove the namespaces of processes that are gone, ending what still runs in them; return their names.

    Names hidden by other programs' mounts may have to stay; they are harmless, and logged at debug level.
    """
    owners = {name: pid for name in list_namespaces() if (pid := owner_pid(name)) is not None}
    noted = {int(note.stem) for note in STATE_FOLDER.glob("[0-9]*.json") if note.stem.isdigit()}
    dead = {pid for pid in noted | set(owners.values()) if not is_alive(pid)}
    leftovers = [name for name, pid in owners.items() if pid in dead]
    end_processes(leftovers, grace_s=0.0)
    removed = [name for name in leftovers if remove_namespace(name)]
    for name in set(leftovers) - set(removed):
        _log.debug("namespace %s is hidden by another mount and stays", name)
    for pid in dead:
        forget_process(pid)
    return removed
