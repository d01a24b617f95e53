"""What `tahq doctor` checks of a machine itself: software, GPU, clock, limits, keys and network card.

Nothing here depends on a run; `host_check` adds what a run's stage needs. Heavy modules are imported by the checks that
need them, so that a host of another version can be asked at all.
"""

import ctypes
import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from tahq import __version__

Level = Literal["fine", "warning", "fault"]
Fix = Literal["", "install", "workdir", "chmod", "copy-key", "copy-model", "copy-data"]
"""What `tahq doctor --fix` does about a finding."""

ANYWHERE: Final = "198.51.100.1"
"""An address on the internet that no machine has: the route to it is the default route."""
_LEAST_OPEN_FILES, _GOOD_OPEN_FILES = 256, 1024
_LEAST_DISK_NBYTES, _LEAST_MEMORY_NBYTES = 5 * 2**30, 2 * 2**30
_SLOW_CARD_MBIT_PER_S = 100
_CLOCK_UNSYNCHRONISED = 5
"""The kernel's TIME_ERROR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check of one machine.

    Attributes:
        check: the thing that was looked at, such as ``disk``.
        found: what there is, or what is wrong with it.
        wanted: what tahq needs; empty: nothing in particular.
        remedy: what to type; empty: nothing is to be done.
        stage: the stage whose host this is; None: this machine.
    """

    check: str
    found: str
    wanted: str = ""
    remedy: str = ""
    level: Level = "fine"
    fix: Fix = ""
    host: str = "this machine"
    stage: int | None = None


def fault(check: str, found: str, remedy: str, *, wanted: str = "", fix: Fix = "") -> Finding:
    """A finding that keeps a run from starting."""
    return Finding(check=check, found=found, remedy=remedy, wanted=wanted, fix=fix, level="fault")


def warning(check: str, found: str, remedy: str, *, wanted: str = "", fix: Fix = "") -> Finding:
    """A finding that a run can live with."""
    return Finding(check=check, found=found, remedy=remedy, wanted=wanted, fix=fix, level="warning")


def machine_checks(device: str = "auto", towards: str = ANYWHERE) -> Iterator[Finding]:
    """All checks of this machine.

    Args:
        device: the device that a worker will use here.
        towards: IP address of the machine to reach through the network card.
    """
    yield Finding(check="Python", found=f"{platform.python_version()}, {sys.executable}", wanted="3.11 or newer")
    yield Finding(check="tahq", found=f"{__version__}, {Path(__file__).parents[2]}")
    yield from gpus(device)
    yield clock()
    yield open_files()
    yield network_card(towards)


def gpus(device: str) -> Iterator[Finding]:
    """Each GPU with its driver, or the reason that torch cannot use it; a fault unless the device is the CPU."""
    import torch

    from tahq.config.stage_estimate import FIRST_WITH_BF16
    from tahq.units import format_size

    built = f"torch {torch.__version__}"
    with warnings.catch_warnings(record=True) as said:  # torch warns of an old driver
        warnings.simplefilter("always")
        is_usable = torch.cuda.is_available()
    driver = _driver()
    if is_usable:
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            text = f"cuda:{index}: {card.name}, {format_size(card.total_memory)}; driver {driver or 'unknown'}, {built}"
            text += "" if card.major >= FIRST_WITH_BF16[0] else "; no bf16, so products are in fp16 by default"
            broken = _kernel_failure(index)
            yield fault("GPU", f"{text}: {broken}", _OTHER_TORCH) if broken else Finding(check="GPU", found=text)
        yield from _triton()
    elif not driver:
        wanted = "a GPU" if device.startswith("cuda") else ""
        yield Finding(check="GPU", found=f"none, no NVIDIA driver; {built}", wanted=wanted)
    elif device == "cpu":
        yield Finding(check="GPU", found=f"not used; driver {driver}, {built}")
    else:
        reason, remedy = _unusable_reason([str(each.message) for each in said])
        yield fault("GPU", f"driver {driver}, but {built} cannot use the GPU: {reason}", remedy)


_OTHER_TORCH: Final = "python -m pip install --force-reinstall torch, in a build for this GPU (https://pytorch.org)"


def _driver() -> str:
    """The version of the NVIDIA driver that the kernel has loaded; empty: none."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""


def _unusable_reason(said: list[str]) -> tuple[str, str]:
    import torch

    if torch.version.cuda is None:
        return "this torch is built for CPUs", f"{sys.executable} -m pip install --force-reinstall torch"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides it", "unset CUDA_VISIBLE_DEVICES, or set it to 0"
    try:
        torch.empty(0, device="cuda")
        reason = "no device"
    except (RuntimeError, AssertionError) as error:
        reason = str(error)
    first = (said or [reason])[0].splitlines()[0]
    return first, f"nvidia-smi; if that works, {_OTHER_TORCH}; else install a newer driver and reboot"


def _kernel_failure(index: int) -> str:
    """Why a GPU does not compute; empty if it does."""
    import torch

    try:
        torch.ones(2, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _triton() -> Iterator[Finding]:
    """Triton compiles the codecs' GPU kernels, and needs a C compiler once for each."""
    if find_spec("triton") is None:
        yield warning("Triton", "not installed", f"{sys.executable} -m pip install triton", wanted="for fast codecs")
        return
    compiler = next(
        (path for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name and (path := shutil.which(name))), None
    )
    if compiler is None:
        yield fault(
            "Triton", "there is no C compiler, which Triton needs", "sudo apt-get install gcc", wanted="gcc or clang"
        )
    else:
        yield Finding(check="Triton", found=f"compiles with {compiler}")


def clock() -> Finding:
    """The time here, and whether the kernel's clock is kept by a time server."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    # the kernel's struct timex is smaller than this; zeros ask without setting anything
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    kept = "not known to be synchronised" if state in (_CLOCK_UNSYNCHRONISED, -1) else "synchronised"
    return Finding(check="clock", found=f"{now}, {kept}")


def open_files() -> Finding:
    """The limit of open files, sockets included, of a process."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, remedy = f"{_GOOD_OPEN_FILES} or more", f"ulimit -n {_GOOD_OPEN_FILES}"
    if hard < _GOOD_OPEN_FILES:
        remedy = "echo '* - nofile 65536' | sudo tee /etc/security/limits.d/tahq.conf, and log in again"
    if most >= _GOOD_OPEN_FILES:
        return Finding(check="open files", found=f"{most:,}", wanted=wanted)
    make = fault if most < _LEAST_OPEN_FILES else warning
    return make("open files", f"a process may open {most} files", remedy, wanted=wanted)


def network_card(towards: str) -> Finding:
    """The device, address and speed with which this machine reaches an address."""
    try:
        asked = ["ip", "-json", "route", "get", towards]
        route = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout)[0]
    except FileNotFoundError:
        return Finding(check="network card", found="unknown: there is no program ip")
    except (subprocess.SubprocessError, ValueError, IndexError):
        return Finding(check="network card", found=f"no route to {'the internet' if towards == ANYWHERE else towards}")
    name, address = route["dev"], route.get("prefsrc", "no address")
    speed, duplex = _of_card(name, "speed"), _of_card(name, "duplex")
    known = f"{speed} Mbit/s, {duplex} duplex" if speed.isdecimal() else "speed unknown"
    found = f"{name}, {address}, {known}, MTU {_of_card(name, 'mtu')}"
    if duplex == "half" or (speed.isdecimal() and int(speed) < _SLOW_CARD_MBIT_PER_S):
        return warning("network card", found, f"ethtool {name}; try another cable and port of the switch")
    return Finding(check="network card", found=found)


def _of_card(name: str, what: str) -> str:
    try:
        return (Path("/sys/class/net") / name / what).read_text().strip()
    except OSError:  # a card without a link, or without this value
        return ""


def room() -> Iterator[Finding]:
    """Free disk and memory here, without a run that says how much it needs."""
    import torch

    from tahq.memory.free_memory import free_bytes
    from tahq.units import format_size

    here = shutil.disk_usage(Path.cwd()).free
    memory = free_bytes(torch.device("cpu"))
    for check, free, least, remedy in (
        ("disk", here, _LEAST_DISK_NBYTES, f"du -xsh {Path.cwd()}/* | sort -h; remove what is not needed"),
        ("memory", memory, _LEAST_MEMORY_NBYTES, "ps aux --sort=-rss | head; end what is not needed"),
    ):
        found, wanted = f"{format_size(free)} free", f"{format_size(least)} or more"
        if free < least:
            yield warning(check, found, remedy, wanted=wanted)
        else:
            yield Finding(check=check, found=found, wanted=wanted)


def key_file(path: Path, *, is_needed: bool) -> Finding:
    """A secret key's file: readable by its owner only, and well-formed; a wrong one is a fault if it is needed."""
    from tahq.comm.keys import read_key_file
    from tahq.errors import UserError

    try:
        return Finding(check="key", found=f"{path}, public {read_key_file(path).public[:16]}…")
    except UserError as error:
        what = str(error).partition(";")[0]
    fix: Fix = ""
    if not path.exists():
        remedy = f"tahq keygen --out {path}"
    elif path.stat().st_mode & 0o077:
        remedy, fix = f"chmod 600 {shlex.quote(str(path))}", "chmod"
    else:
        remedy = f"mv {path} {path}.old && tahq keygen --out {path}"
    return (fault if is_needed else warning)("key", what, remedy, wanted="mode 600, one secret key", fix=fix)
