"""The namespaces of one network: made together, guarded while they exist, removed together."""

import os
from collections.abc import Iterable
from typing import Any, Final

from tahq_netem.congestion_control import set_congestion_control
from tahq_netem.description import NetworkPlan
from tahq_netem.leftovers import Guard, forget_process, note_process
from tahq_netem.names import namespace_prefix
from tahq_netem.namespaces import (
    create_namespace,
    end_processes,
    list_namespaces,
    read_sysctl,
    remove_namespace,
    write_sysctl,
)

_AFTER_IDLE: Final = "tcp_slow_start_after_idle"


class NamespaceGroup:
    """One namespace a label, up at once; `close`, or the end of this process, removes them all.

    Raises:
        NetworkError: the kernel or the user may not; nothing stays behind.
    """

    def __init__(self, labels: Iterable[str]) -> None:
        self._owner = os.getpid()
        self._is_closed = False
        prefix = namespace_prefix(self._owner, list_namespaces())
        self._names: dict[str, str] = {}
        note_process()
        self._guard = Guard(self._remove)
        try:
            for label in labels:
                self._names[label] = prefix + label  # first: a signal may come when it is half made
                create_namespace(prefix + label)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, label: str) -> str:
        return self._names[label]

    def tune_tcp(self, plan: NetworkPlan) -> dict[str, Any]:
        """Set up TCP in every namespace; returns what is in force, for the record.

        Buffers get room for the largest product of rate and round trip, as hosts on such paths are set up:
        else the window, not the link, would limit a long flow. Metrics of earlier connections are not
        kept, so that every connection starts alike.

        Raises:
            NetworkError: the kernel does not have that congestion control.
        """
        in_force = {}
        for name in self._names.values():
            write_sysctl(name, "net.ipv4.tcp_no_metrics_save", "1")
            pauses = {_AFTER_IDLE: _set_after_idle(name, plan.tcp_slow_start_after_idle)}
            buffers = {key: _widen(name, f"net.ipv4.{key}", _window_nbytes(plan)) for key in ("tcp_rmem", "tcp_wmem")}
            control = set_congestion_control(name, plan.congestion_control)
            in_force = {"congestion_control": control, **pauses, **buffers}
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


def _set_after_idle(namespace: str, is_slow: bool | None) -> bool:
    """Whether connections begin slowly again after a pause; None leaves the kernel's own. Returns what is in force."""
    if is_slow is not None:
        write_sysctl(namespace, f"net.ipv4.{_AFTER_IDLE}", str(int(is_slow)))
    return read_sysctl(namespace, f"net.ipv4.{_AFTER_IDLE}").strip() == "1"


def _window_nbytes(plan: NetworkPlan) -> int:
    """Twice the largest product of rate and round trip: half of a socket's buffer is for the kernel's own use."""
    products = (
        rate / 8 * plan.round_trip_s(*pair) for pair in plan.paths if (rate := plan.rate_bits_per_s(*pair)) is not None
    )
    return int(2 * max(products, default=0.0)) + (1 << 20)


def _widen(namespace: str, name: str, nbytes: int) -> str:
    least, default, most = read_sysctl(namespace, name).split()
    if nbytes > int(most):
        write_sysctl(namespace, name, f"{least} {default} {nbytes}")
    return read_sysctl(namespace, name)
