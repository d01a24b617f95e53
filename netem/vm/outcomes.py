"""What pytest reports of a run, out of its JUnit XML: each test's outcome, time and the figures that it recorded."""

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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
