"""Network namespaces through system calls: created, entered, removed, and how they are named.

A namespace is called `tahq-<pid>-<host>` (`tahq-<pid>.<n>-<host>` for further networks of one process); the pid is
that of the process that created it and will remove it. Devices exist inside namespaces only, so their names need no
pid.

A network namespace belongs to a thread. `entered` moves the calling thread into one and back: sockets opened and
processes started meanwhile live there, and other threads of the process are not affected.
"""

import ctypes
import errno
import functools
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from pyroute2 import IPRoute, NetlinkError

from tahq.errors import NetworkError

NAMESPACE_FOLDER: Final = Path("/run/netns")
"""The folder that `ip netns` uses, too."""
SWITCH: Final = "_switch"
"""Label of the namespace that joins the hosts; host names cannot start with an underscore."""
HOST_DEVICE: Final = "eth0"
"""The only network device of a host, besides lo."""
GRACE_S: Final = 3.0
"""Time for processes to exit after SIGTERM when their namespace is removed."""

_NAMESPACE: Final = re.compile(r"tahq-(?P<pid>[0-9]+)(?:\.[0-9]+)?-(?P<host>.+)")
_CLONE_NEWNET, _CLONE_NEWNS, _CLONE_FS = 0x40000000, 0x00020000, 0x200
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH: Final = 2
_OWN: Final = "/proc/thread-self/ns/net"
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _SOCK_DESTROY = 4, 20, 21
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_STATES: Final = sum(1 << state for state in (1, 4, 5, 8))
"""ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT."""
_HEADER: Final = struct.Struct("=IHHII")
_DIAG_REQUEST: Final = struct.Struct("=BBBBI48s")
"""`struct inet_diag_req_v2` of linux/inet_diag.h."""
_NO_CONNECTION: Final = bytes(40) + b"\xff" * 8  # INET_DIAG_NOCOOKIE


def namespace_prefix(pid: int, taken: Collection[str]) -> str:
    """A name prefix for a new network of process `pid` that none of the `taken` names starts with."""
    prefixes = [f"tahq-{pid}-", *(f"tahq-{pid}.{number}-" for number in range(1, len(taken) + 1))]
    return next(prefix for prefix in prefixes if not any(name.startswith(prefix) for name in taken))


def owner_pid(namespace: str) -> int | None:
    """The pid of the process that created a namespace; None if the name is not one of tahq's."""
    match = _NAMESPACE.fullmatch(namespace)
    return None if match is None else int(match["pid"])


def host_address(index: int) -> str:
    """The IPv4 address of the index-th host."""
    return f"10.77.0.{index + 1}"


def host_mac(index: int) -> str:
    """The link-layer address of the index-th host (locally administered)."""
    return f"02:77:00:00:00:{index + 1:02x}"


def namespace_path(namespace: str) -> Path:
    """The file that keeps a namespace alive."""
    return NAMESPACE_FOLDER / namespace


def list_namespaces() -> list[str]:
    """The names of all named namespaces on this machine."""
    return sorted(os.listdir(NAMESPACE_FOLDER)) if NAMESPACE_FOLDER.is_dir() else []


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        rights = " (a container needs CAP_SYS_ADMIN for it)" if number == errno.EPERM else ""
        raise NetworkError(f"cannot {what}: {os.strerror(number)}{rights}")


def create_namespace(namespace: str) -> None:
    """Create a namespace with lo up and IPv6 off."""
    NAMESPACE_FOLDER.mkdir(parents=True, exist_ok=True)
    path = namespace_path(namespace)
    try:
        path.touch(mode=0o444, exist_ok=False)
    except FileExistsError:
        raise NetworkError(f"namespace {namespace} exists already; `tahq-netem clean` removes leftovers") from None
    except PermissionError:
        raise NetworkError(f"cannot write to {NAMESPACE_FOLDER}: namespaces need root") from None
    try:
        with _returning():
            _call("create a network namespace", _libc().unshare(_CLONE_NEWNET))
            _call(f"bind {path}", _libc().mount(_OWN.encode(), os.fsencode(path), b"none", _MS_BIND, None))
            _prepare()
    except (OSError, NetlinkError) as error:
        remove_namespace(namespace)
        number = error.code if isinstance(error, NetlinkError) else error.errno or 0
        raise NetworkError(f"cannot set up a network namespace: {os.strerror(number)}; that needs root") from error
    except BaseException:
        remove_namespace(namespace)
        raise


def _prepare() -> None:
    with suppress(FileNotFoundError):  # IPv6 would add router solicitations to the measured traffic
        for which in ("all", "default"):
            Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6").write_text("1")
    with _netlink_socket() as kernel:
        kernel.link("set", index=1, state="up")


def remove_namespace(namespace: str) -> bool:
    """Unbind a namespace; its devices go with the last process in it. Removing it twice is not an error.

    Returns whether it is gone; False if other mounts hide it and it cannot be removed now.
    """
    path = namespace_path(namespace)
    # Not mounted (EINVAL) or not there (ENOENT): creation was interrupted, or another process removed it.
    _libc().umount2(os.fsencode(path), _MNT_DETACH)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return _remove_hidden(path)
        raise NetworkError(f"cannot remove namespace {namespace}: {error.strerror}; that needs root") from None
    return True


def _remove_hidden(path: Path) -> bool:
    """Remove a namespace whose mount lies under another mount of its folder; return whether that worked.

    `ip netns` bind-mounts /run/netns over itself. The mounts made before stay below, out of reach, and keep their
    files from being deleted (EBUSY), but only in this mount namespace. Deleting the file from a private copy of the
    mount namespace, where both layers are unmounted, makes the kernel detach its mounts everywhere. Other programs'
    namespaces are not touched. Mount namespaces belong to threads, so a thread does it.
    """
    removed: list[bool] = []
    thread = threading.Thread(target=lambda: removed.append(_unlink_in_private_mounts(path)), name="netns-remove")
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down
        return False
    thread.join()
    return removed == [True]


def _unlink_in_private_mounts(path: Path) -> bool:
    libc, name, folder = _libc(), os.fsencode(path), os.fsencode(path.parent)
    if libc.unshare(_CLONE_NEWNS | _CLONE_FS) or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    while True:
        while libc.umount2(name, _MNT_DETACH) == 0:
            pass
        try:
            path.unlink(missing_ok=True)
        except OSError:
            if libc.umount2(folder, _MNT_DETACH) != 0:
                return False
        else:
            return True


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Move the calling thread into `namespace` for the duration of the block."""
    try:
        target = os.open(namespace_path(namespace), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NetworkError(f"cannot open namespace {namespace}: {error.strerror}; was its network closed?") from None
    try:
        with _returning():
            _call(f"enter namespace {namespace}", _libc().setns(target, _CLONE_NEWNET))
            yield
    finally:
        os.close(target)


@contextmanager
def _returning() -> Iterator[None]:
    """Return the calling thread to its own namespace after the block."""
    home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        result = _libc().setns(home, _CLONE_NEWNET)
        os.close(home)
        _call("return to the namespace of this process", result)


def _netlink_socket() -> IPRoute:
    """An IPRoute, made with signals held back: one that interrupts asyncio's constructor prints a traceback later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        return IPRoute()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def netlink(namespace: str) -> Iterator[IPRoute]:
    """pyroute2's IPRoute of a namespace, with the calling thread inside it."""
    with entered(namespace), _netlink_socket() as kernel:
        yield kernel


@contextmanager
def refusals_explained() -> Iterator[None]:
    """Turn the kernel's refusals within the block into a NetworkError that says what to do."""
    try:
        yield
    except NetlinkError as error:
        reason = os.strerror(error.code)
        raise NetworkError(f"the kernel refuses a part of the network ({reason}); see `tahq-netem probe`") from error


def write_sysctl(namespace: str, name: str, value: str) -> None:
    """Set a kernel setting such as net.ipv4.tcp_congestion_control in this namespace only."""
    try:
        with entered(namespace):
            Path("/proc/sys", *name.split(".")).write_text(value)
    except OSError as error:
        raise NetworkError(f"the kernel refuses {name} = {value}: {error.strerror}") from None


def read_sysctl(namespace: str, name: str) -> str:
    """The value of a kernel setting in a namespace."""
    try:
        with entered(namespace):
            return Path("/proc/sys", *name.split(".")).read_text().strip()
    except OSError as error:
        raise NetworkError(f"cannot read {name} from the kernel: {error.strerror}") from None


def processes_in(*namespaces: str) -> list[int]:
    """Pids of the other processes whose main thread is in one of these namespaces."""
    wanted = {_identity(namespace_path(name)) for name in namespaces} - {None}
    others = (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid())
    return [pid for pid in others if _identity(f"/proc/{pid}/ns/net") in wanted]


def _identity(path: str | Path) -> tuple[int, int] | None:
    """Device and inode, by which two names of one namespace are recognised; None: the process has ended."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def end_processes(namespaces: Sequence[str], grace_s: float = GRACE_S) -> None:
    """Send SIGTERM to every process in these namespaces and, after `grace_s`, SIGKILL to those that are left."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 0.0)):
        for pid in processes_in(*namespaces):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline_s = time.monotonic() + wait_s
        while time.monotonic() < deadline_s and processes_in(*namespaces):
            time.sleep(0.02)


def reset_connections(namespace: str) -> int:
    """End every established TCP connection to another host; return how many there were.

    The kernel sends RST to the peer, and the program here gets ECONNABORTED, as when a router forgets a connection.
    pyroute2's DiagSocket ignores errors, so these messages are packed and parsed here.
    """
    with entered(namespace), _diag_socket() as kernel:
        connections = [
            (family, identity)
            for family in (socket.AF_INET, socket.AF_INET6)
            for identity in _connections(kernel, family)
            if not _is_within_host(family, identity)
        ]
        return sum(_destroy(kernel, family, identity) for family, identity in connections)


def try_reset() -> None:
    """End a connection that does not exist; raises NetworkError if this kernel cannot end connections."""
    with _diag_socket() as kernel:
        # Ending a connection fails alike without the connection and without the module; listing them does not.
        list(_connections(kernel, socket.AF_INET))
        _destroy(kernel, socket.AF_INET, _NO_CONNECTION)


def _diag_socket() -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)


def _connections(kernel: socket.socket, family: int) -> Iterator[bytes]:
    """The identity of each connection: both ports and addresses, interface and cookie, as the kernel packs them."""
    _send(kernel, _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, family, bytes(48))
    while True:
        for kind, body in _messages(kernel.recv(1 << 16)):
            if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                _check(body)
                return
            yield body[4:52]


def _destroy(kernel: socket.socket, family: int, identity: bytes) -> bool:
    """Whether there still was such a connection."""
    _send(kernel, _SOCK_DESTROY, _REQUEST | _ACK, family, identity)
    [(_, body)] = _messages(kernel.recv(1 << 16))
    if _error_number(body) == errno.ENOENT:
        return False
    _check(body)
    return True


def _send(kernel: socket.socket, kind: int, flags: int, family: int, identity: bytes) -> None:
    body = _DIAG_REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _STATES, identity)
    kernel.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 0, 0) + body)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def _error_number(message: bytes) -> int:
    return -int.from_bytes(message[:4], sys.byteorder, signed=True)


def _check(message: bytes) -> None:
    if number := _error_number(message):
        reasons = {
            errno.ENOENT: "it has no module tcp_diag",
            errno.EOPNOTSUPP: "it was built without CONFIG_INET_DIAG_DESTROY",
        }
        raise NetworkError(f"this kernel cannot reset connections: {reasons.get(number, os.strerror(number))}")


def _is_within_host(family: int, identity: bytes) -> bool:
    """Connections of a host to itself are not the network's to end."""
    size = 4 if family == socket.AF_INET else 16
    source, destination = ip_address(identity[4 : 4 + size]), ip_address(identity[20 : 20 + size])
    return source == destination or (getattr(destination, "ipv4_mapped", None) or destination).is_loopback
