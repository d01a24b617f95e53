"""The result as a Markdown page: the machine, and the tests' outcomes and figures from pytest's JUnit XML."""

import os
import platform
import subprocess
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

_KINDS = {"failure": "failed", "error": "error", "skipped": "skipped"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One test.

    Attributes:
        name: ``test_kernel.py::test_rate[10]``.
        result: passed, failed, error or skipped.
        duration_s: by the guest's clock.
        reason: why it was skipped or failed, its first line.
        figures: what the test recorded with `record_property`.
    """

    name: str
    result: str
    duration_s: float
    reason: str
    figures: tuple[tuple[str, str], ...]


def parse_outcomes(junit_xml: str) -> list[Outcome]:
    """The tests in the order that they ran."""
    return [_outcome(case) for case in ET.fromstring(junit_xml).iter("testcase")]


def _outcome(case: ET.Element) -> Outcome:
    marks = [child for child in case if child.tag in _KINDS]
    file = case.get("classname", "").rpartition(".")[2]
    return Outcome(
        name=f"{file}.py::{case.get('name')}",
        result=_KINDS[marks[0].tag] if marks else "passed",
        duration_s=float(case.get("time", "0")),
        reason=(marks[0].get("message") or "").partition("\n")[0] if marks else "",
        figures=tuple((each.get("name", ""), each.get("value", "")) for each in case.iter("property")),
    )


def summarise(outcomes: Sequence[Outcome]) -> str:
    """``12 passed, 1 skipped``."""
    counts = Counter(outcome.result for outcome in outcomes)
    return ", ".join(
        f"{counts[result]} {result}" for result in ("passed", "failed", "error", "skipped") if counts[result]
    )


CHECKOUT: Final = Path(__file__).resolve().parents[2]
_HEAD = """\
# The kernel backend on a kernel with netem

Made by `make test-netem-vm`, which boots Debian's cloud kernel under qemu and runs `pytest -m netem_kernel tests/netem`
inside. Times and rates are by the guest's clock.
"""
_VIRTUAL_CLOCK = """
The guest's clock is virtual: one emulated instruction is one nanosecond, and an idle guest's clock jumps to its next
timer. What the kernel's shapers do to packets is seen as it would be on one real processor of 10⁹ instructions a
second, however busy the host is; what that processor is too slow for is not seen, and says nothing of a faster one.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One boot, for the page.

    Attributes:
        machine: what qemu emulated, in words.
        has_virtual_clock: whether to explain the clock.
        qemu: its version line.
        report: the guest's, as `guest_init` sends it.
        outcomes: of the tests.
        host_s: how long it took here, image included.
    """

    machine: str
    has_virtual_clock: bool
    qemu: str
    report: dict[str, Any]
    outcomes: Sequence[Outcome]
    host_s: float


def write_page(run: Run, path: Path) -> None:
    """Write the page, with its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    commit = tested_commit(CHECKOUT, time.time() - run.host_s)
    path.write_text(render(run, datetime.now(UTC).date().isoformat(), host_hardware(), commit), encoding="utf-8")


def render(run: Run, date: str, hardware: str, commit: str = "not known") -> str:
    """The page's text."""
    facts = [
        ("date", date),
        ("commit", commit),
        ("host", hardware),
        ("emulator", f"{run.qemu}; {run.machine}"),
        ("guest's kernel", f"Linux {run.report['kernel']}, clock source {run.report['clock']}"),
        ("result", f"{summarise(run.outcomes)} (exit status {run.report['exit_status']})"),
        ("time", f"{run.report['guest_s']:.0f} s in the guest, {run.host_s:.0f} s here with building the image"),
    ]
    parts = [
        _HEAD,
        _table(("", ""), facts),
        _VIRTUAL_CLOCK if run.has_virtual_clock else "",
        _figures(run.outcomes),
        "\n## Tests\n",
        _table(("test", "result", "guest s"), [_row(outcome) for outcome in run.outcomes]),
    ]
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def tested_commit(checkout: Path, started_s: float) -> str:
    """The commit that is checked out, and how the tree that was tested may differ from it.

    Args:
        checkout: the folder that went into the guest.
        started_s: when, in seconds since 1970.
    """
    try:
        commit, committed_s = _git(checkout, "log", "-1", "--format=%H %ct").split()
        changed = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError, ValueError):
        return "not known: git does not tell"
    came_later = ", committed while the tests ran" if float(committed_s) > started_s else ""
    return f"{commit}{came_later}{', and changes that are in no commit' if changed else ''}"


def _git(checkout: Path, *arguments: str) -> str:
    argv = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def host_hardware() -> str:
    """Processor, cores and kernel of this machine."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"


def _figures(outcomes: Sequence[Outcome]) -> str:
    rows = [(outcome.name, name, value) for outcome in outcomes for name, value in outcome.figures]
    return "## Figures\n\n" + _table(("test", "what", "measured"), rows) if rows else ""


def _row(outcome: Outcome) -> tuple[str, str, str]:
    reason = f": {outcome.reason}" if outcome.reason else ""
    return outcome.name, f"{outcome.result}{reason}", f"{outcome.duration_s:.1f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
