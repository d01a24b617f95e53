"""``python -m vm``: run the kernel backend's tests, or any command, on a kernel that has netem.

The tests are collected here, where everything can be imported: the guest has no torch, and a file that imports it would
fail to be collected although none of its tests is wanted.

The exit status is the command's; 1 if the guest did not end, 2 if something is missing here, 130 and 143 if
interrupted.
"""

import argparse
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn

from tahq.errors import TahqError, UserError

from .image import CHECKOUT, KERNEL_PACKAGE, apt_get, run, unpacked_package, write_image

_RESULTS = {"failure": "failed", "error": "error", "skipped": "skipped"}
_HEAD: Final = """\
# The kernel backend on a kernel with netem

Made by `make test-netem-vm`, which boots Debian's cloud kernel under qemu and runs `pytest -m netem_kernel tests/netem`
inside. Times and rates are by the guest's clock: with `-icount`, one emulated instruction is one nanosecond, and an
idle guest's clock jumps to its next timer. So the kernel's shapers do to packets what they would do on one real
processor of 10⁹ instructions per second, however busy the host is.
"""
MARKER: Final = "netem_kernel"
QEMU: Final = "qemu-system-x86_64"
_NO_TESTS_COLLECTED: Final = 5
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
MACHINES: Final = {
    # One processor: qemu lets several take turns under the virtual clock, and kernels that wait for each other in
    # loops do not survive that. Without "fast short rep mov" the kernel copies eight bytes per instruction, not one.
    "tcg": "-machine pc,accel=tcg -cpu max,-erms,-fsrm -smp 1 -icount shift=0,sleep=off -rtc clock=vm",
    "kvm": "-machine pc,accel=kvm -cpu host -smp 2 -rtc clock=host",
}
"""qemu's machine by accelerator: `tcg` counts instructions as time, `kvm` has the host's clock."""


class VmError(TahqError):
    """The guest did not end with a report."""


@dataclass(frozen=True, slots=True)
class GuestReport:
    """What the guest reports when it is done: a line by init.sh, and pytest's JUnit XML."""

    exit_status: int
    kernel: str
    clock: str
    guest_s: float
    junit_xml: str

    @classmethod
    def parse(cls, text: str) -> "GuestReport":
        """Read a report; ValueError if it is incomplete."""
        first, _, junit_xml = text.partition("\n")
        status, kernel, clock, guest_s = first.split()
        return cls(int(status), kernel, clock, float(guest_s), junit_xml)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests or a command; turn errors into one line and an exit status."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    try:
        if options.command:
            return boot(options.command, options.accel, options.timeout).exit_status
        return run_tests(options)
    except TahqError as error:
        print(f"netem VM: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def run_tests(options: argparse.Namespace) -> int:
    """Run the marked tests in the guest, and write the page if one is wanted."""
    started_s = time.time()
    commit = run("git", "-C", str(CHECKOUT), "describe", "--always", "--abbrev=40", "--dirty").strip()
    narrowed = shlex.split(options.pytest)
    files = files_with_tests(CHECKOUT, narrowed)
    # Only this family of reports has a place for the figures that a test records.
    report_options = ("--junitxml=/tmp/report", "-o", "junit_family=xunit1", "-p", "no:cacheprovider")
    argv = ["python", "-m", "pytest", "-v", "-m", MARKER, *report_options, *narrowed, *files]
    report = boot(argv, options.accel, options.timeout)
    if options.result is not None and report.junit_xml:
        emulator = f"{run(QEMU, '--version').splitlines()[0]}; `{MACHINES[options.accel]}`"
        options.result.parent.mkdir(parents=True, exist_ok=True)
        options.result.write_text(render(report, emulator, commit, time.time() - started_s), encoding="utf-8")
        print(f"netem VM: wrote {options.result}")
    return report.exit_status


def files_with_tests(checkout: Path, arguments: Sequence[str]) -> list[str]:
    """The test files, relative to the checkout, that have marked tests which fit pytest's `arguments` (`-k jitter`)."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", MARKER, "tests/netem", *arguments]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, _NO_TESTS_COLLECTED):
        raise UserError(f"pytest could not collect tests/netem:\n{done.stdout.strip()}")
    tests = [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]
    if not tests:
        raise UserError(f"no test of tests/netem is marked {MARKER} and fits {' '.join(arguments) or 'anything'}")
    return list(dict.fromkeys(test.partition("::")[0] for test in tests))


def boot(argv: Sequence[str], accelerator: str, timeout_s: float) -> GuestReport:
    """Boot the guest with its console on stdout, let it run `argv`, and return its report.

    Raises:
        UserError: qemu, the kernel or a part of the image is missing.
        VmError: the guest was not done in time, or ended without a report.
    """
    if shutil.which(QEMU) is None:
        if os.geteuid() != 0:
            raise UserError(f"{QEMU} is missing; install it with: sudo apt-get install qemu-system-x86")
        apt_get("install", "--yes", "--no-install-recommends", "qemu-system-x86")
    [kernel] = unpacked_package(KERNEL_PACKAGE).glob("boot/vmlinuz-*")
    with tempfile.TemporaryDirectory(prefix="tahq-vm-") as folder:
        image, report = Path(folder, "root.cpio"), Path(folder, "report")
        write_image(image, argv)
        command = [
            *(QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-m", "1024"),
            *MACHINES[accelerator].split(),
            *("-kernel", str(kernel), "-initrd", str(image), "-append", " ".join(_KERNEL_OPTIONS)),
            *("-serial", "stdio", "-serial", f"file:{report}"),
        ]
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise VmError(f"the guest was not done after {timeout_s:.0f} s; allow more with --timeout") from None
        text = report.read_text(encoding="utf-8", errors="replace") if report.exists() else ""
    try:
        return GuestReport.parse(text)
    except ValueError:
        raise VmError("the guest ended without a report; its console says why") from None


def render(report: GuestReport, emulator: str, commit: str, host_s: float) -> str:
    """The result as a Markdown page; `host_s` are the seconds of the whole run on this machine."""
    from tahq_netem.measure.machine import processor  # which imports torch

    cases = list(ET.fromstring(report.junit_xml).iter("testcase"))
    counts = Counter(_result(case)[0] for case in cases)
    facts = [
        ("date", datetime.now(UTC).date().isoformat()),
        ("commit", commit),
        ("host", f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}"),
        ("emulator", emulator),
        ("guest's kernel", f"Linux {report.kernel}, clock source {report.clock}"),
        ("result", f"{', '.join(f'{n} {result}' for result, n in counts.items())} (exit status {report.exit_status})"),
        ("time", f"{report.guest_s:.0f} s in the guest, {host_s:.0f} s here with building the image"),
    ]
    figures = [
        (_name(case), each.get("name", ""), each.get("value", "")) for case in cases for each in case.iter("property")
    ]
    outcomes = [(_name(case), ": ".join(filter(None, _result(case))), case.get("time", "")) for case in cases]
    tables = [_table(("", ""), facts), "## Figures\n", _table(("test", "what", "measured"), figures)]
    return "\n".join([_HEAD, *tables, "## Tests\n", _table(("test", "result", "guest s"), outcomes)])


def _name(case: ET.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}"


def _result(case: ET.Element) -> tuple[str, str]:
    """The outcome, and the first line of the reason if it did not pass."""
    for child in case:
        if child.tag in _RESULTS:
            return _RESULTS[child.tag], (child.get("message") or "").partition("\n")[0]
    return "passed", ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _stop(signal_number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + signal_number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vm", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--result", type=Path, help="Markdown page to write")
    add("--pytest", default="", metavar="ARGS", help="more arguments of pytest, such as '-k jitter'")
    add("--timeout", type=float, default=3600.0, metavar="S", help="seconds of this machine's time (default 3600)")
    add("--accel", choices=MACHINES, default="tcg", help="emulation, or KVM where it works (default tcg)")
    add("command", nargs="*", help="run this in the guest instead of the tests; `python` is its Python")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
