"""``python -m vm``: run the kernel backend's tests, or any command, on a kernel that has netem.

The tests are collected here, where everything can be imported: the guest has no torch, and a file that imports it would
fail to be collected although none of its tests is wanted.

The exit status is the command's; 1 if the guest did not end, 2 if something is missing here, 130 and 143 if
interrupted.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from tahq.errors import TahqError, UserError

from .debian_packages import PackageCache, default_cache, ensure_qemu
from .guest_image import ATTACHED, Unpacked, write_image
from .qemu import Machine, boot, choose_machine, command_line
from .result_page import Run, parse_outcomes, write_page

MARKER: Final = "netem_kernel"
_NO_TESTS_COLLECTED: Final = 5


def select_tests(checkout: Path, arguments: list[str]) -> list[str]:
    """The ids of the tests, relative to the checkout.

    Args:
        checkout: the folder with pyproject.toml.
        arguments: to narrow the choice, as pytest takes them (`-k jitter`).

    Raises:
        UserError: collecting failed, or nothing is marked.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", MARKER, "tests/netem", *arguments]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    selected = [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]
    if done.returncode not in (0, _NO_TESTS_COLLECTED):
        raise UserError(f"pytest could not collect tests/netem:\n{done.stdout.strip()}")
    if not selected:
        raise UserError(f"no test of tests/netem is marked {MARKER} and fits {' '.join(arguments) or 'anything'}")
    return selected


def files_of(selected: list[str]) -> list[str]:
    """The files of these tests, each once, in order."""
    return list(dict.fromkeys(test.partition("::")[0] for test in selected))


CHECKOUT: Final = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, and turn what went wrong into one line and an exit status."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    try:
        return run_command(options) if options.command else run_tests(options)
    except TahqError as error:
        print(f"netem VM: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def run_tests(options: argparse.Namespace) -> int:
    """Run the marked tests in the guest, and write the page if one is wanted."""
    started_s = time.monotonic()
    narrowed = shlex.split(options.pytest)
    selected = select_tests(CHECKOUT, narrowed)
    # The newer family of reports has no place for what a test records.
    report_options = (f"--junitxml={ATTACHED}", "-o", "junit_family=xunit1")
    argv = ["python", "-m", "pytest", "-m", MARKER, "-v", "-p", "no:cacheprovider", *report_options]
    print(f"netem VM: {len(selected)} tests, {machine_of(options).describe()}", flush=True)
    report = _boot(options, [*argv, *narrowed, *files_of(selected)])
    if options.result is not None and report.get("attached"):
        _write_result(options, report, time.monotonic() - started_s)
    return int(report["exit_status"])


def run_command(options: argparse.Namespace) -> int:
    """Run one command in the guest, for a look around."""
    return int(_boot(options, options.command)["exit_status"])


def machine_of(options: argparse.Namespace) -> Machine:
    """The machine that the options ask for."""
    return choose_machine(options.accel, options.clock, options.cpus, options.memory)


def _boot(options: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    machine, qemu, cache = machine_of(options), ensure_qemu(), PackageCache(options.cache)
    packages = Unpacked(cache.unpacked(options.kernel_package), cache.unpacked("busybox-static"))
    with tempfile.TemporaryDirectory(prefix="tahq-vm-") as folder:
        image, report = Path(folder, "root.cpio"), Path(folder, "report")
        write_image(image, packages, CHECKOUT, argv)
        command = command_line(qemu, machine, packages.kernel_image, image, report)
        return boot(command, report, options.timeout)


def _write_result(options: argparse.Namespace, report: dict[str, Any], host_s: float) -> None:
    machine = machine_of(options)
    version = subprocess.run([ensure_qemu(), "--version"], capture_output=True, text=True, check=True).stdout
    run = Run(
        machine=machine.describe(),
        has_virtual_clock=machine.clock == "virtual",
        qemu=version.splitlines()[0],
        report=report,
        outcomes=parse_outcomes(report["attached"]),
        host_s=host_s,
    )
    write_page(run, options.result)
    print(f"netem VM: wrote {options.result}")


def _stop(signal_number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + signal_number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vm", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--result", type=Path, help="Markdown page to write")
    add("--pytest", default="", metavar="ARGS", help="more arguments of pytest, such as '-k jitter'")
    add("--timeout", type=float, default=3600.0, metavar="S", help="seconds of this machine's time (default 3600)")
    add("--accel", choices=("tcg", "kvm"), default="tcg", help="emulation, or KVM where it works (default tcg)")
    add("--clock", choices=("virtual", "host"), help="the guest's clock: instructions counted, or this machine's")
    add("--cpus", type=int, help="processors (default: 1 with the virtual clock, else 2)")
    add("--memory", type=int, default=1024, metavar="MIB", help="memory in MiB (default 1024)")
    add("--kernel-package", default="linux-image-cloud-amd64", metavar="NAME", help="Debian package of the kernel")
    add("--cache", type=Path, default=default_cache(), metavar="FOLDER", help="unpacked packages (default %(default)s)")
    add("command", nargs="*", help="run this in the guest instead of the tests; `python` is its Python")
    return parser
