"""`tahq-netem sweep` and `tahq-netem plot`, without the command line."""

import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from rich.console import Console

from tahq_netem.sweep.plots import draw_plots
from tahq_netem.sweep.progress import SweepProgress
from tahq_netem.sweep.results import ResultFile, read_all
from tahq_netem.sweep.runner import Outside, SweepOutcome, SweepRun
from tahq_netem.sweep.spec import SweepConfig, load_sweep
from tahq_netem.sweep.tables import sweep_report


def run_sweep_file(path: Path, results: Path | None = None, limit_s: float | None = None) -> SweepOutcome:
    """Measure the points of a sweep.yaml that have no result yet.

    Args:
        path: the sweep.yaml.
        results: the JSON lines; None: beside the file, under the sweep's name.
        limit_s: start no point that is expected to end later.

    Raises:
        UserError: an invalid file, or a machine that cannot build such networks.
    """
    config = load_sweep(path)
    return run_sweep(config, results or path.parent / f"{config.name}.jsonl", limit_s)


def run_sweep(config: SweepConfig, results: Path, limit_s: float | None = None) -> SweepOutcome:
    """Measure the points of a configuration that have no result yet."""
    console = Console(soft_wrap=True)
    with _Ending() as ending, ResultFile(results) as file, SweepProgress(console) as progress:
        outside = Outside(is_ending=ending.has_begun)
        try:
            outcome = SweepRun(config, file, progress, outside, limit_s).run()
            ending.raise_again()
        except (KeyboardInterrupt, SystemExit):
            progress.say(f"stopped; the results so far are in {results}, and the same command continues from there")
            raise
    console.print(
        f"{results}: {outcome.num_done} points done, {outcome.num_failed} failed, {outcome.num_left} left",
        highlight=False,
    )
    return outcome


class _Ending:
    """A context in which SIGTERM and SIGHUP unwind as Ctrl-C does, so that sessions and networks are closed.

    An exception raised by a handler is lost in callbacks of Python itself (weak references), and becomes another error
    in an event loop. So the signal is kept, the sweep checks for it between points, and it is raised again at the end.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[signal.Signals, object] = {}

    def has_begun(self) -> bool:
        """Whether a signal has arrived."""
        return self._number is not None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self.raise_again()

    def raise_again(self) -> None:
        """Raise SystemExit if a signal has arrived."""
        if self._number is not None:
            raise SystemExit(128 + self._number)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self.raise_again()


def plot_results(results: Sequence[Path], out: Path) -> list[Path]:
    """Write the table and the plots of result files.

    Args:
        results: JSON lines of sweeps.
        out: the table, such as table.md; plots have its name and a suffix: table-throughput.png.

    Returns:
        The written files.
    """
    rows = read_all(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(sweep_report(rows), encoding="utf-8")
    return [out, *draw_plots(rows, out.with_suffix(""))]
