"""The progress of a sweep: a bar on a terminal, plain lines elsewhere.

The bar goes by the time that points are expected to take, not by their number: one at 20 Mbit/s takes as long as ten
unshaped ones.
"""

from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tahq_netem.sweep.points import Point
from tahq_netem.sweep.results import DONE


class SweepProgress:
    """Writes the progress of a sweep to a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._left = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[left]} left"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("sweep", left=0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def begin(self, num_points: int, num_missing: int, expected_s: float) -> None:
        """Print how much there is to do."""
        self._left = num_missing
        self.say(f"{num_points} points, {num_missing} to measure, about {expected_s / 60:.0f} min or more")
        self._bar.update(self._task, total=max(expected_s, 1e-9), left=num_missing)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, highlight=False, markup=False)

    def start(self, point: Point) -> None:
        """Show that a point is being measured."""
        self._bar.update(self._task, description=point.label)

    def finish(self, point: Point, row: dict[str, Any], expected_s: float) -> None:
        """Show a point's result."""
        self._left -= 1
        self._bar.update(self._task, advance=expected_s, left=self._left)
        self.say(f"[{self._left} left] {point.label}: {_result_line(row)}")


def _result_line(row: dict[str, Any]) -> str:
    if row["status"] != DONE:
        return f"FAILED: {row['error']}"
    share = f", {row['share_of_bound']:.0%} of the bound" if row["share_of_bound"] is not None else ""
    busy = f"{row['busy_cores']:.2f} cores busy (others {row['busy_cores_of_others']:.2f})"
    return f"{row['tokens_per_s']:,.0f} tokens/s, {row['step_s']:.2f} s per step{share}, {busy}"
