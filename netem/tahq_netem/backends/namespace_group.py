"""The namespaces of one network: made together, guarded while they exist, removed together, and their TCP settings.

Linux lets a namespace use only those congestion controls that the machine's first namespace allows to everybody, by
default its own default and reno. Any other, even for root, has to be allowed there first. It is allowed only while it
is being set; a lock keeps other networks that are being built from taking it back too early.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tahq.errors import NetworkError
from tahq_netem.backends.leftovers import STATE_FOLDER, Guard, forget_process, note_process
from tahq_netem.backends.namespaces import (
    create_namespace,
    end_processes,
    list_namespaces,
    namespace_prefix,
    read_sysctl,
    remove_namespace,
    write_sysctl,
)
from tahq_netem.network.description import NetworkPlan

_CONTROL: Final = "net.ipv4.tcp_congestion_control"
_ALLOWED: Final = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_DEFAULT_CONTROL: Final = "cubic"
_AFTER_IDLE: Final = "tcp_slow_start_after_idle"


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
        in_force: dict[str, Any] = {}
        for name in self._names.values():
            write_sysctl(name, "net.ipv4.tcp_no_metrics_save", "1")
            if plan.tcp_slow_start_after_idle is not None:
                write_sysctl(name, f"net.ipv4.{_AFTER_IDLE}", str(int(plan.tcp_slow_start_after_idle)))
            in_force = {
                "congestion_control": set_congestion_control(name, plan.congestion_control),
                _AFTER_IDLE: read_sysctl(name, f"net.ipv4.{_AFTER_IDLE}") == "1",
                **{key: _widen(name, f"net.ipv4.{key}", _window_nbytes(plan)) for key in ("tcp_rmem", "tcp_wmem")},
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
        forget_process(self._owner)


def _window_nbytes(plan: NetworkPlan) -> int:
    """Twice the largest product of rate and round trip: the kernel keeps half of a socket's buffer for itself."""
    products = ((plan.rate_bits_per_s(*pair) or 0.0) / 8 * plan.round_trip_s(*pair) for pair in plan.paths)
    return int(2 * max(products, default=0.0)) + (1 << 20)


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
