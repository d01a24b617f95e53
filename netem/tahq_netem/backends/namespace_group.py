"""The namespaces of one network: made together, tuned, removed together, and never left behind.

While a process lives, a `Guard` removes what it made: at exit, at SIGTERM and SIGHUP, and at Ctrl-C by way of
KeyboardInterrupt. For SIGKILL, each process leaves a note in `STATE_FOLDER` with its start time, and the next process
that builds a network removes the namespaces of those that are gone. The start time tells a process from a later one
with the same pid.

Linux lets a namespace use only those congestion controls that the machine's first namespace allows to everybody, by
default its own default and reno. Any other, even for root, has to be allowed there first. It is allowed only while it
is being set; a lock keeps other networks that are being built from taking it back too early.
"""

import atexit
import fcntl
import json
import logging
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from tahq.errors import NetworkError
from tahq_netem.backends.namespaces import (
    create_namespace,
    end_processes,
    list_namespaces,
    namespace_prefix,
    owner_pid,
    read_sysctl,
    remove_namespace,
    write_sysctl,
)
from tahq_netem.network.description import NetworkPlan
from tahq_netem.programs import stat_fields

_log = logging.getLogger(__name__)
STATE_FOLDER: Final = Path("/run/tahq-netem")
"""Has a note for each process with namespaces: <pid>.json."""
_CONTROL: Final = "net.ipv4.tcp_congestion_control"
_ALLOWED: Final = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_DEFAULT_CONTROL: Final = "cubic"
_AFTER_IDLE: Final = "tcp_slow_start_after_idle"


class Guard:
    """Calls `remove` when this process ends, unless it was released before.

    Signals are taken over only where they would end the process at once: a handler that the program has installed
    stays. Guards nest; the last one acts first.
    """

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove
        self._owner = os.getpid()
        self._is_active = True
        self._previous: dict[int, Any] = {}
        atexit.register(self._at_exit)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
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
                    signal.signal(number, handler)

    def _at_exit(self) -> None:
        if self._is_active and os.getpid() == self._owner:
            self._remove()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            self._at_exit()
        except Exception:
            traceback.print_exc()  # the process is about to end
        finally:
            signal.signal(number, self._previous[number])
            os.kill(os.getpid(), number)


def note_process() -> None:
    """Leave a note that this process has namespaces, before it makes the first."""
    pid = os.getpid()
    try:
        STATE_FOLDER.mkdir(parents=True, exist_ok=True)
        _note(pid).write_text(json.dumps({"pid": pid, "start_ticks": start_ticks(pid)}))
    except PermissionError:
        raise NetworkError("network namespaces need root") from None
    except OSError as error:
        raise NetworkError(f"cannot write {_note(pid)}: {error.strerror}; networks are noted there") from None


def _forget_process(pid: int) -> None:
    if not any(owner_pid(name) == pid for name in list_namespaces()):
        _note(pid).unlink(missing_ok=True)


def _note(pid: int) -> Path:
    return STATE_FOLDER / f"{pid}.json"


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None for a zombie, or if there is no such process."""
    fields = stat_fields(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


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
        _forget_process(pid)
    return removed


class NamespaceGroup:
    """One namespace for each label; `close`, or the end of this process, removes them all."""

    def __init__(self, labels: Iterable[str]) -> None:
        self._owner = os.getpid()
        self._is_closed = False
        prefix = namespace_prefix(self._owner, list_namespaces())
        self._names: dict[str, str] = {}
        note_process()
        self._guard = Guard(self._remove)
        try:
            for label in labels:
                self._names[label] = prefix + label  # first: a signal may come while it is being made
                create_namespace(prefix + label)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, label: str) -> str:
        return self._names[label]

    def tune_tcp(self, plan: NetworkPlan) -> dict[str, Any]:
        """Set up TCP in every namespace; return what is in force, for the record.

        Buffers get room for the largest product of rate and round trip: otherwise the window, not the link, would limit
        a long flow. Metrics of earlier connections are not kept, so that every connection starts alike.
        """
        products = ((plan.rate_bits_per_s(*pair) or 0.0) / 8 * plan.round_trip_s(*pair) for pair in plan.paths)
        # The kernel keeps half of a socket's buffer for itself.
        window_nbytes = int(2 * max(products, default=0.0)) + (1 << 20)
        in_force: dict[str, Any] = {}
        for name in self._names.values():
            write_sysctl(name, "net.ipv4.tcp_no_metrics_save", "1")
            if plan.tcp_slow_start_after_idle is not None:
                write_sysctl(name, f"net.ipv4.{_AFTER_IDLE}", str(int(plan.tcp_slow_start_after_idle)))
            in_force = {
                "congestion_control": set_congestion_control(name, plan.congestion_control),
                _AFTER_IDLE: read_sysctl(name, f"net.ipv4.{_AFTER_IDLE}") == "1",
                **{key: _widen(name, f"net.ipv4.{key}", window_nbytes) for key in ("tcp_rmem", "tcp_wmem")},
            }
        return in_force

    def close(self) -> None:
        """End what runs in the namespaces and remove them; a second time, or in a forked child, does nothing."""
        if os.getpid() == self._owner and not self._is_closed:
            self._is_closed = True
            self._remove()
            self._guard.release()

    def _remove(self) -> None:
        names = list(self._names.values())
        self._names = {}
        end_processes(names)
        for name in names:
            remove_namespace(name)
        _forget_process(self._owner)


def _widen(namespace: str, name: str, nbytes: int) -> str:
    least, default, most = read_sysctl(namespace, name).split()
    if nbytes > int(most):
        write_sysctl(namespace, name, f"{least} {default} {nbytes}")
    return read_sysctl(namespace, name)


def set_congestion_control(namespace: str, wanted: str | None) -> str:
    """Set TCP's congestion control (None: cubic if the kernel has it, else its default); return what is in force."""
    available = read_sysctl(namespace, "net.ipv4.tcp_available_congestion_control").split()
    if wanted is None and _DEFAULT_CONTROL not in available:
        return read_sysctl(namespace, _CONTROL)
    chosen = wanted or _DEFAULT_CONTROL
    try:
        try:
            # Tried even if it is not listed as available: the kernel may load a module for it.
            write_sysctl(namespace, _CONTROL, chosen)
        except NetworkError:
            with _allowed_to_all(chosen):
                write_sysctl(namespace, _CONTROL, chosen)
    except NetworkError as error:
        raise NetworkError(f"no congestion control {chosen}: {error}; this kernel has {', '.join(available)}") from None
    return read_sysctl(namespace, _CONTROL)


@contextmanager
def _allowed_to_all(name: str) -> Iterator[None]:
    with open(STATE_FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = _ALLOWED.read_text().strip()
        try:
            _ALLOWED.write_text(f"{before} {name}")
        except OSError as error:
            raise NetworkError(f"{name} cannot be allowed in {_ALLOWED} ({error.strerror})") from None
        try:
            yield
        finally:
            _ALLOWED.write_text(before)
