"""The guest's first process: mounts, loads modules, runs one command, reports on the second serial port, powers off.

It runs on the bare kernel before anything else, so it is one file, uses only the standard library, and calls mount,
finit_module and reboot itself. Its task is in /guest.json:

``{"modules": [paths], "argv": [...], "env": {...}, "cwd": "...", "attach": "a file to report"}``

The report is one line of JSON: exit status, kernel, processor, seconds by the guest's clock, and the attached file's
text if there is such a file.
"""

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
import termios
import time
import traceback
from typing import Any, Final

_MOUNTS: Final = (
    ("proc", "/proc", "proc"),
    ("sysfs", "/sys", "sysfs"),
    ("devtmpfs", "/dev", "devtmpfs"),
    ("devpts", "/dev/pts", "devpts"),
    ("tmpfs", "/dev/shm", "tmpfs"),
    ("tmpfs", "/tmp", "tmpfs"),
    ("tmpfs", "/run", "tmpfs"),
)
_SYS_FINIT_MODULE: Final = {"x86_64": 313, "aarch64": 273}
_RB_POWER_OFF: Final = 0x4321FEDC
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_REPORT_PORT: Final = "/dev/ttyS1"

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Do what /guest.json says; whatever happens, report and power off."""
    started_s = time.monotonic()
    report: dict[str, Any] = {"exit_status": None}
    try:
        _mount_all()
        with open("/guest.json", encoding="utf-8") as file:
            task = json.load(file)
        for module in task["modules"]:
            load_module(module)
        _set_up("lo")
        report["exit_status"] = run_task(task)
        report["attached"] = read_if_there(task["attach"])
    except Exception:
        report["error"] = traceback.format_exc()
    report |= _machine() | {"guest_s": time.monotonic() - started_s}
    _send(report)
    os.sync()
    _libc.reboot(_RB_POWER_OFF)


def _mount_all() -> None:
    for source, target, kind in _MOUNTS:
        os.makedirs(target, exist_ok=True)
        _check(_libc.mount(source.encode(), target.encode(), kind.encode(), 0, None), target)


def load_module(path: str) -> None:
    """Load one module, whose dependencies are loaded.

    Raises:
        OSError: the kernel refused, or there is no such file.
    """
    with open(path, "rb") as file:
        _check(_libc.syscall(_SYS_FINIT_MODULE[os.uname().machine], file.fileno(), b"", 0), path)


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _set_up(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", interface.encode(), 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", interface.encode(), flags | _IFF_UP))


def run_task(task: dict[str, Any]) -> int:
    """The command's exit status; orphans that end meanwhile are reaped, which is the first process's duty."""
    child = os.fork()
    if child == 0:
        _become(task)
    while True:
        ended, status = os.wait()
        if ended == child:
            return os.waitstatus_to_exitcode(status)


def _become(task: dict[str, Any]) -> None:
    try:
        os.setsid()
        os.chdir(task["cwd"])
        os.execve(task["argv"][0], task["argv"], task["env"])
    except OSError as error:
        print(f"cannot run {task['argv'][0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def read_if_there(path: str) -> str | None:
    """The file's text, or None without a file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    with open("/sys/devices/system/clocksource/clocksource0/current_clocksource", encoding="utf-8") as file:
        clock = file.read().strip()
    return {"kernel": os.uname().release, "cpu": names[0], "num_cpus": len(names), "clock": clock}


def _send(report: dict[str, Any]) -> None:
    with open(_REPORT_PORT, "w", encoding="ascii") as port:
        port.write(json.dumps(report) + "\n")
        port.flush()
        termios.tcdrain(port)


if __name__ == "__main__":
    main()
