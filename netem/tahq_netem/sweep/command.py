"""`tahq-netem sweep` and `tahq-netem plot`, without the command line."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from tahq_netem.sweep.plots import draw_plots
from tahq_netem.sweep.progress import SweepProgress
from tahq_netem.sweep.results import ResultFile, read_results
from tahq_netem.sweep.runner import Outside, SweepOutcome, SweepRun
from tahq_netem.sweep.spec import SweepConfig, load_sweep
from tahq_netem.sweep.tables import sweep_report


def run_sweep_file(path: Path, results: Path | None = None, limit_s: float | None = None) -> SweepOutcome:
    """Measure the points of a sweep.yaml that have no result yet.

    `results` defaults to the sweep's name beside the file; no point is started that is expected to end after `limit_s`.
    """
    config = load_sweep(path)
    return run_sweep(config, results or path.parent / f"{config.name}.jsonl", limit_s)


def run_sweep(config: SweepConfig, results: Path, limit_s: float | None = None) -> SweepOutcome:
    """Measure the points of a configuration that have no result yet."""
    console = Console(soft_wrap=True)
    with ResultFile(results) as file, SweepProgress(console) as progress:
        try:
            with _unwinding() as has_begun:
                outcome = SweepRun(config, file, progress, Outside(is_ending=has_begun), limit_s).run()
        except (KeyboardInterrupt, SystemExit):
            progress.say(f"stopped; the results so far are in {results}, and the same command continues from there")
            raise
    console.print(
        f"{results}: {outcome.num_done} points done, {outcome.num_failed} failed, {outcome.num_left} left",
        highlight=False,
    )
    return outcome


@contextmanager
def _unwinding() -> Iterator[Callable[[], bool]]:
    """Have SIGTERM and SIGHUP unwind as Ctrl-C does, so that sessions and networks are closed.

    An exception raised by a handler is lost in callbacks of Python itself (weak references), and becomes another error
    in an event loop. So the sweep asks between points whether a signal has arrived (the value of the context), and
    SystemExit is raised again at the end.
    """
    arrived: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield lambda: bool(arrived)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            raise SystemExit(128 + arrived[0])


def plot_results(results: Sequence[Path], out: Path) -> list[Path]:
    """Write the table of result files to `out`, such as table.md, and the plots beside it; return the written files."""
    # If two files have a point, the later file's row counts.
    rows = list({id: row for path in results for id, row in read_results(path).items()}.values())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(sweep_report(rows), encoding="utf-8")
    return [out, *draw_plots(rows, out.with_suffix(""))]
