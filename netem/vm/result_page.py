"""The result as a Markdown page: the machine, and the tests' outcomes and figures from pytest's JUnit XML."""

import os
import platform
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_RESULTS = {"failure": "failed", "error": "error", "skipped": "skipped"}
_HEAD: Final = """\
# The kernel backend on a kernel with netem

Made by `make test-netem-vm`, which boots Debian's cloud kernel under qemu and runs `pytest -m netem_kernel tests/netem`
inside. Times and rates are by the guest's clock: with `-icount`, one emulated instruction is one nanosecond, and an
idle guest's clock jumps to its next timer. So the kernel's shapers do to packets what they would do on one real
processor of 10⁹ instructions per second, however busy the host is.
"""


@dataclass(frozen=True, slots=True)
class GuestReport:
    """What the guest reports when it is done; see init.sh."""

    exit_status: int
    kernel: str
    clock: str
    guest_s: float
    junit_xml: str

    @classmethod
    def parse(cls, text: str) -> "GuestReport":
        """Read a report.

        Raises:
            ValueError: it is incomplete.
        """
        first, _, junit_xml = text.partition("\n")
        status, kernel, clock, guest_s = first.split()
        return cls(int(status), kernel, clock, float(guest_s), junit_xml)


def render(report: GuestReport, emulator: str, commit: str, host_s: float) -> str:
    """The page's text; `host_s` are the seconds of the whole run on this machine."""
    cases = list(ET.fromstring(report.junit_xml).iter("testcase"))
    counts = Counter(_result(case)[0] for case in cases)
    facts = [
        ("date", datetime.now(UTC).date().isoformat()),
        ("commit", commit),
        ("host", _hardware()),
        ("emulator", emulator),
        ("guest's kernel", f"Linux {report.kernel}, clock source {report.clock}"),
        ("result", f"{', '.join(f'{n} {result}' for result, n in counts.items())} (exit status {report.exit_status})"),
        ("time", f"{report.guest_s:.0f} s in the guest, {host_s:.0f} s here with building the image"),
    ]
    figures = [
        (_name(case), each.get("name", ""), each.get("value", "")) for case in cases for each in case.iter("property")
    ]
    outcomes = [(_name(case), ": ".join(filter(None, _result(case))), case.get("time", "")) for case in cases]
    return "\n".join(
        [
            _HEAD,
            _table(("", ""), facts),
            "## Figures\n",
            _table(("test", "what", "measured"), figures),
            "## Tests\n",
            _table(("test", "result", "guest s"), outcomes).rstrip("\n") + "\n",
        ]
    )


def _name(case: ET.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}"


def _result(case: ET.Element) -> tuple[str, str]:
    """The outcome, and the first line of the reason if it did not pass."""
    for child in case:
        if child.tag in _RESULTS:
            return _RESULTS[child.tag], (child.get("message") or "").partition("\n")[0]
    return "passed", ""


def tested_commit(checkout: Path) -> str:
    """The commit that is checked out, and whether the tree differs from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", checkout, *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "HEAD") or "unknown") + (", and uncommitted changes" if changed else "")


def _hardware() -> str:
    from tahq_netem.measure.machine import processor  # which imports torch

    return f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
