"""TCP's congestion control in a namespace.

Linux lets a namespace use only what the machine's first one allows to everybody, by default its own default
and reno. Something else, even as root, has to be allowed there first; it is for the moment of setting, and a
lock keeps other networks that are being built from taking it back too early.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tahq.errors import NetworkError
from tahq_netem.leftovers import STATE_FOLDER
from tahq_netem.namespaces import read_sysctl, write_sysctl

_SETTING: Final = "net.ipv4.tcp_congestion_control"
_ALLOWED: Final = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_DEFAULT: Final = "cubic"


def set_congestion_control(namespace: str, wanted: str | None) -> str:
    """Set TCP's congestion control; None: cubic, or the kernel's own where it has none. Returns what is in force.

    Raises:
        NetworkError: the kernel does not have it.
    """
    available = read_sysctl(namespace, "net.ipv4.tcp_available_congestion_control").split()
    if wanted is not None or _DEFAULT in available:
        chosen = wanted or _DEFAULT
        try:
            _set(namespace, chosen)
        except NetworkError as error:
            raise NetworkError(
                f"no congestion control {chosen}: {error}; this kernel has {', '.join(available)}"
            ) from None
    return read_sysctl(namespace, _SETTING)


def _set(namespace: str, name: str) -> None:
    try:
        # Not only what is listed as available: the kernel may load a module for it.
        write_sysctl(namespace, _SETTING, name)
    except NetworkError:
        with _allowed_to_all(name):
            write_sysctl(namespace, _SETTING, name)


@contextmanager
def _allowed_to_all(name: str) -> Iterator[None]:
    with open(STATE_FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = _ALLOWED.read_text().strip()
        try:
            _allow(f"{before} {name}")
            yield
        finally:
            _allow(before)


def _allow(names: str) -> None:
    try:
        _ALLOWED.write_text(names)
    except OSError as error:
        raise NetworkError(f"{_ALLOWED} cannot be set to {names!r} ({error.strerror})") from None
