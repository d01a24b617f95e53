"""`tahq-netem sweep` and `tahq-netem plot`, without the command line around them."""

import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from rich.console import Console

from tahq_netem.plots import draw_plots
from tahq_netem.runtimes.registry import RUNTIMES
from tahq_netem.sweep_networks import calibrate_quickly, open_network
from tahq_netem.sweep_progress import SweepProgress
from tahq_netem.sweep_results import ResultFile, read_all
from tahq_netem.sweep_runner import Outside, SweepOutcome, SweepRun
from tahq_netem.sweep_spec import SweepConfig, load_sweep
from tahq_netem.tables import sweep_report


def run_sweep_file(path: Path, results: Path | None = None, limit_s: float | None = None) -> SweepOutcome:
    """Measure what a sweep.yaml asks for and has no result yet.

    Args:
        path: the sweep.yaml.
        results: the JSON lines; None: beside the file, under the sweep's name.
        limit_s: begin no point that is expected to end after so many seconds.

    Raises:
        UserError: a file that makes no sense, or a machine that cannot make such networks.
    """
    config = load_sweep(path)
    return run_sweep(config, results or path.parent / f"{config.name}.jsonl", limit_s)


def run_sweep(config: SweepConfig, results: Path, limit_s: float | None = None) -> SweepOutcome:
    """The same of a configuration."""
    console = Console(soft_wrap=True)
    with _Ending() as ending, ResultFile(results) as file, SweepProgress(console) as progress:
        outside = Outside(RUNTIMES, open_network, calibrate_quickly, is_ending=ending.has_begun)
        try:
            outcome = SweepRun(config, file, progress, outside, limit_s).run()
            ending.raise_again()
        except (KeyboardInterrupt, SystemExit):
            progress.say(f"stopped; what was measured is in {results}, and the same command goes on from there")
            raise
    console.print(
        f"{results}: {outcome.num_done} points done, {outcome.num_failed} failed, {outcome.num_left} left",
        highlight=False,
    )
    return outcome


class _Ending:
    """A context in which SIGTERM and SIGHUP unwind as Ctrl-C does: whoever made sessions and networks takes them down.

    What a handler raises is lost where Python itself has called back, from a weak reference for instance, and in an
    event loop it becomes another error. So the signal is kept, the sweep asks for it between points, and it is raised
    again at the end, whatever else has come of it.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[signal.Signals, object] = {}

    def has_begun(self) -> bool:
        """Whether a signal has come."""
        return self._number is not None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self.raise_again()

    def raise_again(self) -> None:
        """SystemExit, if a signal has come."""
        if self._number is not None:
            raise SystemExit(128 + self._number)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self.raise_again()


def plot_results(results: Sequence[Path], out: Path) -> list[Path]:
    """Write the table and the plots of result files.

    Args:
        results: JSON lines of sweeps.
        out: where to: `table.md` is the name of the table, and plots have its name and a suffix: table-throughput.png.

    Returns:
        What was written.
    """
    rows = read_all(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(sweep_report(rows), encoding="utf-8")
    return [out, *draw_plots(rows, out.with_suffix(""))]
