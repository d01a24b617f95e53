"""One boot: the kernel and the archive under qemu, its console on our stdout, its report read when it has powered off.

Two kinds of time. With ``--clock host`` the guest's clock is this machine's. With ``--clock virtual``, the default,
qemu counts instructions: one is one nanosecond, and when the guest idles, its clock jumps to the next timer. A guest's
second is then the same however busy this machine is, so delays and rates are measured as on a processor of 10^9
instructions a second, and repeat; only how long we wait for them varies. qemu lets several processors take turns
there, which kernels that wait for each other in loops do not survive, so the virtual clock comes with one processor.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tahq.errors import TahqError, UserError

_PR_SET_PDEATHSIG: Final = 1
_KERNEL_OPTIONS: Final = (
    "console=ttyS0",
    "quiet",
    "panic=-1",  # reboot at once, which -no-reboot turns into the end of qemu
    "mitigations=off",
    "nokaslr",
    "apparmor=0",
    "audit=0",
    "random.trust_cpu=on",
    "tsc=reliable",
    "rcupdate.rcu_expedited=1",  # a namespace is gone in milliseconds, not in several grace periods
)
_PROCESSOR: Final = {
    "kvm": "host",
    # Without "fast short rep mov" the kernel copies eight bytes an instruction, not one.
    "tcg": "max,-erms,-fsrm",
}


class VmError(TahqError):
    """The guest did not end with a report."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What qemu emulates.

    Attributes:
        accelerator: ``tcg`` (emulation) or ``kvm``.
        clock: ``virtual`` (instructions) or ``host``; kvm has only the latter.
        num_cpus: processors; one with the virtual clock.
        memory_mib: memory, of which the unpacked archive takes its share.
    """

    accelerator: str
    clock: str
    num_cpus: int
    memory_mib: int

    def arguments(self) -> list[str]:
        """The part of qemu's command line that describes the machine."""
        count = ["-icount", "shift=0,sleep=off"] if self.clock == "virtual" else []
        return [
            *("-machine", f"pc,accel={self.accelerator}", "-cpu", _PROCESSOR[self.accelerator]),
            *("-smp", str(self.num_cpus), "-m", str(self.memory_mib)),
            *count,
            *("-rtc", "clock=vm" if self.clock == "virtual" else "clock=host"),
        ]

    def describe(self) -> str:
        """One line for the result."""
        clock = "virtual clock, 1 ns an instruction" if self.clock == "virtual" else "the host's clock"
        return f"{self.accelerator}, {clock}, {self.num_cpus} CPU{'s' * (self.num_cpus > 1)}, {self.memory_mib} MiB"


def choose_machine(accelerator: str, clock: str | None, num_cpus: int | None, memory_mib: int) -> Machine:
    """Fill in what was not asked for: the virtual clock under emulation, and as many processors as the clock can have.

    Raises:
        UserError: what was asked for does not go together.
    """
    clock = clock or ("virtual" if accelerator == "tcg" else "host")
    if (accelerator, clock) == ("kvm", "virtual"):
        raise UserError("KVM runs on the host's clock; --clock virtual needs --accel tcg")
    if clock == "virtual" and num_cpus not in (None, 1):
        raise UserError(f"the virtual clock has one processor, not {num_cpus}; more need --clock host")
    return Machine(accelerator, clock, num_cpus or (1 if clock == "virtual" else 2), memory_mib)


def boot(
    command: list[str], report: Path, timeout_s: float, show: Callable[[bytes], None] | None = None
) -> dict[str, Any]:
    """Run qemu until it ends, hand its console on, and return the guest's report.

    Args:
        command: as `command_line` makes it.
        report: the file behind the second serial port.
        timeout_s: by this machine's clock; qemu is killed then.
        show: gets the console's bytes as they come; stdout by default.

    Raises:
        VmError: timeout, qemu's own failure, or a guest that ended without a report.
    """
    show = show or _to_stdout
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, preexec_fn=_die_with_parent
    ) as process:
        try:
            if not _follow(process, time.monotonic() + timeout_s, show):
                raise VmError(f"the guest was not done after {timeout_s:.0f} s; allow more with --timeout")
            status = process.wait(timeout=10)
        finally:
            process.kill()
    return read_report(report, status)


def command_line(qemu: str, machine: Machine, kernel: Path, image: Path, report: Path) -> list[str]:
    """qemu with no device but two serial ports: the console on stdout, the report into a file."""
    return [
        *(qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *machine.arguments(),
        *("-kernel", str(kernel), "-initrd", str(image), "-append", " ".join(_KERNEL_OPTIONS)),
        *("-serial", "stdio", "-serial", f"file:{report}"),
    ]


def read_report(report: Path, qemu_status: int) -> dict[str, Any]:
    """The guest's report, checked to be one.

    Raises:
        VmError: there is none, or the guest's init failed.
    """
    text = report.read_text(encoding="ascii", errors="replace") if report.exists() else ""
    try:
        found: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError:
        raise VmError(f"the guest ended without a report (qemu's status {qemu_status}); its console says why") from None
    if found.get("exit_status") is None:
        raise VmError(f"the guest's init failed:\n{found.get('error', text)}")
    return found


def _follow(process: subprocess.Popen[bytes], deadline_s: float, show: Callable[[bytes], None]) -> bool:
    """Hand on what the console says until qemu closes it; False if the deadline comes first."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left_s := deadline_s - time.monotonic()) > 0:
            if selector.select(left_s):
                data = os.read(process.stdout.fileno(), 65536)
                if not data:
                    return True
                show(data)
    return False


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _to_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
