"""Runs a benchmark: options, repeats, and a result file with hardware, date, commit and command.

A benchmark declares its tables; the harness does the rest:

    def tables(options):
        yield Table(("rate", "Mbit/s"), ((rate, spread(repeat(options, goodput, rate))) for rate in options.rates))

    if __name__ == "__main__":
        main(__doc__, tables, {"--rates": {"type": int, "nargs": "+", "default": [20, 100]}}, repeats=3)

Rows are measured one by one as the table is read, and each is printed as soon as it is there. The first line of the
script's docstring is the title of the result; `--output` says where the result goes.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml


@dataclass(frozen=True, slots=True)
class Table:
    """Columns by their names, rows as cells (text, or numbers printed as they are), and a line above."""

    columns: Sequence[str]
    rows: Iterable[Sequence[object]]
    caption: str = ""
    heading: str = ""

    def lines(self) -> Iterator[str]:
        """Markdown; measures the rows."""
        yield from [f"## {self.heading}", ""] if self.heading else []
        yield from [self.caption, ""] if self.caption else []
        yield from (_row(self.columns), "|---" * len(self.columns) + "|")
        for row in self.rows:
            say(_row(row))
            yield _row(row)


Tables = Callable[[argparse.Namespace], Iterable[Table | str]]


def main(
    doc: str | None,
    tables: Tables,
    arguments: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    *,
    repeats: int | None = None,
) -> None:
    """Measure the tables (text between them is taken as it is) and write the result.

    Args:
        doc: the script's docstring; its first line is the title.
        tables: what is measured, from the options.
        arguments: the script's own options, as `add_argument` takes them.
        repeats: default of `--repeats`, how often each figure is measured; None: no such option.
    """
    title = (doc or "").strip().partition("\n")[0].rstrip(".")
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the result (Markdown); default: only printed")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help=f"measurements per figure (default {repeats})")
    for name, argument in arguments.items():
        parser.add_argument(name, **argument)
    options = parser.parse_args()
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    text = f"# {title}\n\n{describe()}. Commit {commit()}. `{command}`\n"
    for part in tables(options):
        text += "\n"
        for line in [part] if isinstance(part, str) else part.lines():
            text += f"{line}\n"
            if options.output is not None:  # what is measured so far
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(text, encoding="utf-8")
    print(text, end="")


def repeat(options: argparse.Namespace, measure: Callable[..., float], *arguments: object) -> list[float]:
    """One figure as often as `--repeats` says."""
    return [measure(*arguments) for _ in range(options.repeats)]


def spread(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """The median, with the least and the largest value."""
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle}{unit} ({low} to {high})" if len(values) > 1 else f"{middle}{unit}"


def say(text: str) -> None:
    """Report progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def rows_path(options: argparse.Namespace) -> Path:
    """The JSON lines beside the result file, so that an interrupted benchmark goes on; temporary without `--output`."""
    if options.output is None:
        return Path(tempfile.mkdtemp(prefix="tahq-bench-")) / "rows.jsonl"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    return Path(options.output).with_suffix(".jsonl")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows measured so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a measured row."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def medians_in_turn(calls: Mapping[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median milliseconds of each call, all of them called in turn, `repeats` times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(milliseconds(call, device))
    return {name: statistics.median(each) for name, each in times.items()}


def milliseconds(call: Callable[[], object], device: torch.device, count: int = 1) -> float:
    """Time per call of `count` calls in a row, from an idle device to an idle device."""
    if device.type != "cuda":
        begin_s = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin_s) * 1e3 / count
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / count


@dataclass(frozen=True, slots=True)
class Run:
    """A run of `tahq-launch` that ended as it should: its lines of metrics.jsonl, its output, and seconds in all.

    `config` is the run's config.yaml, in which everything is chosen. `planned_at_s` and `trained_at_s` are the times,
    by `time.time()`, at which it was written and at which the last step was done.
    """

    steps: list[dict[str, Any]]
    output: str
    seconds: float
    first_step_s: float
    config: dict[str, Any]
    planned_at_s: float
    trained_at_s: float

    def step_times_s(self, settle: int = 0) -> list[float]:
        """Seconds of each step after the first `settle`."""
        return [step["step_time_s"] for step in self.steps[settle:]]


def launch(
    config: Mapping[str, Any] | Path,
    env: Mapping[str, str] = MappingProxyType({}),
    with_run: Callable[[Path], object] = lambda folder: None,
    stop_after: int | None = None,
) -> Run:
    """Run a cluster.yaml, as users do, in a folder of its own; a run that fails ends the program.

    `with_run` is called with the run's folder before it is removed. A run that is stopped after so many steps, as by
    `tahq stop --now`, spares the checkpoint at its end, which takes longer than the steps of a large model.
    """
    with tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        folder = Path(name)
        path = folder / "cluster.yaml"
        values = yaml.safe_load(config.read_text()) if isinstance(config, Path) else dict(config)
        if stop_after:  # before its end
            values["training"] = {**values["training"], "steps": 10 * stop_after}
        path.write_text(yaml.safe_dump(values))
        run = folder / "runs" / values["run"]["name"]
        metrics, chosen = run / "metrics.jsonl", run / "config.yaml"
        with (folder / "output").open("w+") as output:
            begin = time.perf_counter()
            command = [sys.executable, "-m", "tahq_launch.cli", "launch", str(path)]
            process = subprocess.Popen(
                command, cwd=folder, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            while not (metrics.is_file() and metrics.stat().st_size) and process.poll() is None:
                time.sleep(0.02)
            first_step_s = time.perf_counter() - begin
            if stop_after:
                while process.poll() is None and metrics.read_text().count("\n") < stop_after:
                    time.sleep(0.02)
                process.send_signal(signal.SIGINT)
                process.send_signal(signal.SIGTERM)  # the second signal does not wait for a checkpoint
            status = process.wait()
            seconds = time.perf_counter() - begin
            output.seek(0)
            text = output.read()
        if status and not (stop_after and status in (128 + signal.SIGINT, 128 + signal.SIGTERM)):
            sys.exit(f"tahq-launch ended with status {status}: {text[-2000:]}")
        with_run(run)
        return Run(
            steps=[json.loads(line) for line in metrics.read_text().splitlines()][:stop_after],
            output=text,
            seconds=seconds,
            first_step_s=first_step_s,
            config=yaml.safe_load(chosen.read_text()),
            planned_at_s=chosen.stat().st_mtime,
            trained_at_s=metrics.stat().st_mtime,
        )


def processor() -> str:
    """The processor's name, as the kernel has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def describe() -> str:
    """Accelerators if there are any, processor, cores, versions and date."""
    count = torch.cuda.device_count()
    gpus = f"{count} × {torch.cuda.get_device_name(0)}; " if count else ""
    return (
        f"{gpus}{processor()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, {datetime.now(UTC).date().isoformat()}"
    )


def commit() -> str:
    """The commit that is measured; `unknown` outside a checkout, with + if files were changed."""
    git = ["git", "-C", str(Path(__file__).parent)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return f"{found.stdout.strip()}{'+' if changed.stdout else ''}" if found.returncode == 0 else "unknown"


def need_gpu(device: str = "cuda") -> None:
    """End the program with status 2 where it is to run on a GPU (`auto` too), and there is none."""
    if device != "cpu" and not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).name}: no CUDA device; see --help for what it needs", file=sys.stderr)
        sys.exit(2)


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
