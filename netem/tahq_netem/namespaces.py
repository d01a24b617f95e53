"""Network namespaces through system calls: made, entered, removed.

A namespace belongs to a thread. `entered` moves the calling thread into one and back, whatever happens:
sockets opened and processes started meanwhile live there, and no other thread of the process notices. So
nothing needs to run between fork and exec, and nothing needs a fork of its own.
"""

import ctypes
import errno
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from pyroute2 import IPRoute, NetlinkError

from tahq.errors import NetworkError
from tahq_netem.names import NAMESPACE_FOLDER

_CLONE_NEWNET: Final = 0x40000000
_MS_BIND: Final = 4096
_MNT_DETACH: Final = 2
_OWN: Final = "/proc/thread-self/ns/net"

GRACE_S: Final = 3.0
"""How long processes in a namespace that is removed have to leave in order."""


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        rights = " (a container needs CAP_SYS_ADMIN for it)" if number == errno.EPERM else ""
        raise NetworkError(f"cannot {what}: {os.strerror(number)}{rights}")


def namespace_path(namespace: str) -> Path:
    """The file that keeps a namespace alive."""
    return NAMESPACE_FOLDER / namespace


def list_namespaces() -> list[str]:
    """Names of every namespace on this machine that has one."""
    return sorted(os.listdir(NAMESPACE_FOLDER)) if NAMESPACE_FOLDER.is_dir() else []


def create_namespace(namespace: str) -> None:
    """Make a namespace whose lo is up, with IPv6 off.

    Raises:
        NetworkError: the kernel or the user may not, or the name is taken.
    """
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
            _call("make a network namespace", _libc().unshare(_CLONE_NEWNET))
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
    # Router solicitations and the like would be traffic that nobody asked for.
    with suppress(FileNotFoundError):
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    with IPRoute() as kernel:
        kernel.link("set", index=1, state="up")


class HiddenNamespaceError(NetworkError):
    """A namespace's name is held by a mount that nobody can reach at present."""


def remove_namespace(namespace: str) -> None:
    """Unbind a namespace; its devices go with the last process in it. One that is gone already is no error.

    Raises:
        HiddenNamespaceError: something was mounted over it.
        NetworkError: this user may not.
    """
    path = namespace_path(namespace)
    # Not mounted (EINVAL) or not there (ENOENT): half made, or removed by another sweep.
    _libc().umount2(os.fsencode(path), _MNT_DETACH)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise HiddenNamespaceError(
                f"cannot remove namespace {namespace}: {NAMESPACE_FOLDER} was mounted over itself since it was made, "
                f"as `ip netns` does; `umount {NAMESPACE_FOLDER}` shows it again"
            ) from None
        raise NetworkError(f"cannot remove namespace {namespace}: {error.strerror}; that needs root") from None


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """The calling thread is in `namespace` until the end of the block.

    Raises:
        NetworkError: there is no such namespace, or this user may not enter it.
    """
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
    """The calling thread is back in its namespace after the block."""
    home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        result = _libc().setns(home, _CLONE_NEWNET)
        os.close(home)
        _call("return to the namespace of this process", result)


@contextmanager
def netlink(namespace: str) -> Iterator[IPRoute]:
    """pyroute2's IPRoute of a namespace; the calling thread is in it meanwhile."""
    with entered(namespace), IPRoute() as kernel:
        yield kernel


@contextmanager
def refusals_explained() -> Iterator[None]:
    """What the kernel refuses within the block is a NetworkError that says what to do."""
    try:
        yield
    except NetlinkError as error:
        # 95 and 2 come from parts that are not there, 1 from too few rights.
        reason = os.strerror(error.code)
        raise NetworkError(f"the kernel refuses a part of the network ({reason}); see `tahq-netem probe`") from error


def popen(
    namespace: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """`subprocess.Popen(argv, env=env, **options)` of a process in `namespace`."""
    with entered(namespace):
        return subprocess.Popen(argv, env=env, **options)


def call_in(namespace: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` with the calling thread in `namespace`; sockets that it opens stay in there."""
    with entered(namespace):
        return function(*args)


def write_sysctl(namespace: str, name: str, value: str) -> None:
    """Set a setting such as net.ipv4.tcp_congestion_control, of this namespace only.

    Raises:
        NetworkError: the kernel does not take it.
    """
    path = Path("/proc/sys") / name.replace(".", "/")
    try:
        call_in(namespace, path.write_text, value)
    except OSError as error:
        raise NetworkError(f"the kernel refuses {name} = {value}: {error.strerror}") from None


def read_sysctl(namespace: str, name: str) -> str:
    """A setting as it is in a namespace.

    Raises:
        NetworkError: the kernel does not have it.
    """
    try:
        text: str = call_in(namespace, (Path("/proc/sys") / name.replace(".", "/")).read_text)
    except OSError as error:
        raise NetworkError(f"the kernel does not tell {name}: {error.strerror}") from None
    return text.strip()


def processes_in(*namespaces: str) -> list[int]:
    """Pids of the processes whose main thread is in one of these namespaces; this process is never one of them."""
    wanted = {identity for name in namespaces if (identity := _identity(namespace_path(name))) is not None}
    others = (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid())
    return [pid for pid in others if _identity(f"/proc/{pid}/ns/net") in wanted]


def _identity(path: str | Path) -> tuple[int, int] | None:
    """What two names of one namespace have in common; None: not there, or its process has ended."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def end_processes(namespaces: Sequence[str], grace_s: float = GRACE_S) -> None:
    """SIGTERM for every process in these namespaces and, for those still there after `grace_s`, SIGKILL."""
    _signal_all(namespaces, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and processes_in(*namespaces):
        time.sleep(0.02)
    _signal_all(namespaces, signal.SIGKILL)


def _signal_all(namespaces: Sequence[str], number: signal.Signals) -> None:
    for pid in processes_in(*namespaces):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
