"""The outcomes of tries: a JSON file that grows with each try, and a table of it."""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import harness

from chaos.row import Figures, Row

_ROOT = Path(__file__).parents[2]
RESULTS_FOLDER = _ROOT / "benchmarks" / "results"
_MAX_ERROR_LENGTH = 4000


@dataclass(frozen=True, slots=True)
class Try:
    """One try at a row."""

    row: str
    number: int
    passed: bool
    took_s: float
    figures: Figures = field(default_factory=dict)
    error: str = ""
    commit: str = ""
    """Short hash of the code; + if it was changed."""


def default_path(hardware: str) -> Path:
    """Where the results of this machine and month go."""
    return RESULTS_FOLDER / f"chaos_{hardware}_{datetime.now(UTC):%Y%m}.json"


class Results:
    """Every try so far, on disk after each, in FILE.json (continued if it exists) and as a table in FILE.md."""

    def __init__(self, path: Path, note: str = "") -> None:
        self.path = path
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._rows: dict[str, dict[str, str]] = content.get("rows", {})
        self._tries = [Try(**each) for each in content.get("tries", [])]
        self._machines: list[str] = content.get("machines", [])
        self._notes = dict.fromkeys([*content.get("notes", []), *([note] if note else [])])
        self._commit = harness.commit()

    def has_passed(self, row: str, number: int) -> bool:
        """Whether this try was made, and passed."""
        return any(each.row == row and each.number == number and each.passed for each in self._tries)

    def failures(self, rows: list[str]) -> int:
        """Tries that failed, of these rows."""
        return sum(not each.passed for each in self._tries if each.row in rows)

    def add(self, row: Row, done: Try) -> None:
        """Note a try. A failed one stays on record when it is tried again."""
        self._rows[row.name] = {"fault": row.fault, "shows": row.shows}
        figures = {key: round(value, 3) if isinstance(value, float) else value for key, value in done.figures.items()}
        error, took_s = done.error.replace(f"{_ROOT}/", "")[-_MAX_ERROR_LENGTH:], round(done.took_s, 2)
        self._tries.append(replace(done, took_s=took_s, figures=figures, error=error, commit=self._commit))
        self._machines = list(dict.fromkeys([*self._machines, harness.describe()]))
        self._write()

    def adopt(self, others: "Results") -> None:
        """Add the tries of another file."""
        self._rows |= others._rows
        self._tries += others._tries
        self._machines = list(dict.fromkeys([*self._machines, *others._machines]))
        self._write()

    def _write(self) -> None:
        content = {
            "machines": self._machines,
            "notes": list(self._notes),
            "rows": self._rows,
            "tries": [asdict(each) for each in self._tries],
        }
        for path, text in (
            (self.path, json.dumps(content, indent=1) + "\n"),
            (self.path.with_suffix(".md"), self._table()),
        ):
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)

    def _table(self) -> str:
        commits = dict.fromkeys(each.commit for each in self._tries if each.commit)
        lines = [
            "# Chaos",
            "",
            *(f"- {each}" for each in (*self._machines, *self._notes)),
            f"- commits: {', '.join(commits)}",
            "",
            "Each row is a fault in real processes ([more on each](../../docs/dev/chaos.md)). Figures are medians over",
            "the tries that passed, the largest in brackets. BX: losses, final weights and optimizer states are those",
            "of the undisturbed run, bit for bit.",
            "",
            "| fault | must show | passed | restarts | detected after | stall | recovery | steps lost | besides |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        return "\n".join([*lines, *(self._table_row(name) for name in self._rows)]) + "\n"

    def _table_row(self, name: str) -> str:
        tries = [each for each in self._tries if each.row == name]
        passed = [each.figures for each in tries if each.passed]
        standard = ("restarts", "detected_s", "stall_s", "recovery_s", "steps_lost")
        cells = [_cell(passed, figure) for figure in standard]
        besides = sorted({key for figures in passed for key in figures} - set(standard))
        more = "; ".join(f"{key.removesuffix('_s').replace('_', ' ')}: {_cell(passed, key)}" for key in besides)
        row = self._rows[name]
        count = f"{len(passed)} of {len(tries)}"
        return f"| {row['fault']} | {row['shows']} | {count} | {' | '.join(cells)} | {more} |"


def _cell(tries: list[Figures], name: str) -> str:
    values = [figures[name] for figures in tries if figures.get(name) is not None]
    if not values:
        return ""
    numbers = [value for value in values if isinstance(value, int | float)]
    if not numbers:
        return ", ".join(sorted({str(value) for value in values}))
    unit = " s" if name.endswith("_s") else ""
    middle, largest = median(numbers), max(numbers)
    return f"{middle:.4g}{unit}" if middle == largest else f"{middle:.3g} ({largest:.3g}){unit}"
