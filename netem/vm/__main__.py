"""``python -m vm``: run the kernel backend's tests, or any command, on a kernel that has netem.

The tests are collected here, where everything can be imported: the guest has no torch, and a file that imports it would
fail to be collected although none of its tests is wanted.

The exit status is the command's; 1 if the guest did not end, 2 if something is missing here, 130 and 143 if
interrupted.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from tahq.errors import TahqError, UserError

from .image import CHECKOUT, KERNEL_PACKAGE, apt_get, run, unpacked_package, write_image
from .result_page import GuestReport, render, tested_commit

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
    started_s, commit = time.time(), tested_commit(CHECKOUT)
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
    """The test files, relative to the checkout, that have marked tests which fit pytest's `arguments` (`-k jitter`).

    Raises:
        UserError: collecting failed, or no test fits.
    """
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
