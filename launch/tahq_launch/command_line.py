"""The common parts of all commands: options, tables, result files, and how they end.

- A command ends with an exit status and at most one line on stderr.
- A mistake of the user is one line, ``tahq-launch: cluster.yaml:3: …``, without a traceback.
- A traceback is shown with ``--debug``, and is always in the log of a run that has one.
- The exit status is the error class's (`tahq.errors`); any other exception is status 1.
"""

import atexit
import errno
import gc
import io
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from tahq import __version__
from tahq.errors import TahqError, UserError, brief, file_errors, message_of
from tahq.observe import figures

if TYPE_CHECKING:
    from rich.table import Table

    from tahq_launch.runs.pull import Which

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CLUSTER.YAML", help="Configuration of the run, e.g. launch/examples/demo.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key of the file, e.g. --set training.steps=200 --set emulate.rate=50mbit. May be repeated.",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run of this name from its newest checkpoint. Default: a new run.")
]

_USUAL = gc.get_threshold()
_SELDOM = 100_000
"""New objects between collections of garbage while a command imports: each collection visits much of what is there."""


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"tahq {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and log in detail. Default: one line per error.")]
Device = Annotated[
    str | None, typer.Option(metavar="cpu|cuda|cuda:N", help="Compute device, e.g. cuda:1. Default: as configured.")
]
Bind = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address to listen on for neighbours, e.g. 0.0.0.0:7001; port 0: any free port. Default: from the "
        "stage's hosts entry, else the address that faces the coordinator.",
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|none",
        help="Address that neighbours dial, e.g. 203.0.113.9:7001 behind a router that forwards the port; "
        "none: this machine only dials out. Default: the bound address.",
    ),
]
Restarts = Annotated[
    int, typer.Option(min=0, help="How often this worker is restarted after being killed by a signal or a crash.")
]
Step = Annotated[int | None, typer.Option(min=1, help="Checkpoint after this step. Default: the newest.")]
Best = Annotated[bool, typer.Option("--best", help="Lowest validation loss. Default: the newest.")]


def chosen_step(step: int | None, best: bool) -> "Which":
    """The checkpoint that `--step` or `--best` names."""
    if best and step is not None:
        raise typer.BadParameter("goes without --step", param_hint="--best")
    return "best" if best else step


RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's folder, its name in runs/, or the name of a run that is live here."),
]
RunOrAddress = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's folder, its name in runs/, the name of a run that is live here, or HOST:PORT of a coordinator.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line. Default: a table.")]
JsonObject = Annotated[bool, typer.Option("--json", help="Print one JSON object. Default: tables.")]

log = logging.getLogger("tahq")


def check_worker_options(device: str | None, **addresses: str | None) -> None:
    """Refuse what the worker would refuse only later: a malformed device, or address by its option's name."""
    from tahq.comm.zmq.addresses import parse_address

    if device is not None and re.fullmatch("auto|cpu|cuda(:[0-9]+)?", device) is None:
        raise typer.BadParameter(f"expected auto, cpu, cuda or cuda:N; got {device!r}", param_hint="--device")
    for option, address in addresses.items():
        if address is not None and (option, address) != ("advertise", "none"):
            parse_address(address, f"--{option}")


def supervised(program: str, serve: Callable[[str, bool], int], restarts: int, *, debug: bool) -> int:
    """Run a worker in child processes until its exit status is final; errors are reported by the child."""
    from tahq_launch.start import worker_lifetime

    def child(worker_id: str, is_first: bool) -> int:
        try:
            return serve(worker_id, is_first)
        except Exception as error:
            return report_error(program, error, debug=debug)

    return worker_lifetime.supervise(child, restarts)


def collect_as_usual() -> None:
    """Collect garbage as often as Python does by default, but never look for it among what is imported by now."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # what is never freed, triton's module reports as leaks
    gc.set_threshold(*_USUAL)


def run_app(app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status.

    Returns:
        The command's result; 2 for a wrong command line; an error's own status; 130 after Ctrl-C (typer does
        that); 1 for an unexpected exception.
    """
    log.addHandler(logging.NullHandler())  # else Python prints errors that have no handler
    gc.set_threshold(_SELDOM)
    try:
        status = app(args=list(arguments), prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        message = message_of(UserError(error.format_message().rstrip(".")))  # without overlong words
        hint = "" if "--help" in message else f" (see {program} --help)"
        return _print_error(program, message + hint, error.exit_code)
    except Exception as error:
        return report_error(program, error, debug="--debug" in arguments)
    return status if isinstance(status, int) else 0


def report_error(program: str, error: Exception, *, debug: bool) -> int:
    """Print an error as `run_app` does; returns the exit status."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # only users make such names
        error = UserError(f"{error.strerror}: {brief(str(error.filename))}")
    if isinstance(error, TahqError):
        log.debug("ended by", exc_info=error)
        return _print_error(program, message_of(error), error.exit_status)
    log.critical("internal error", exc_info=error)
    again = "" if debug else " (run again with --debug for the traceback)"
    message = f"internal error: {type(error).__name__}: {message_of(error)}{again}"
    return _print_error(program, message, TahqError.exit_status)


def _print_error(program: str, message: str, status: int) -> int:
    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    print(f"{program}: {line}", file=sys.stderr, flush=True)
    return status


def log_to_stderr(level: int, *, is_log: bool) -> None:
    """Send tahq's log messages to stderr.

    Args:
        level: the lowest level that is shown.
        is_log: stderr is a log file: everything goes there, tracebacks too. Otherwise a person reads it, and errors
            are left out, because `run_app` prints them in one line.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if not is_log:
        handler.addFilter(lambda record: record.levelno < logging.ERROR)
    log.addHandler(handler)
    log.setLevel(level)


def announce(line: str) -> None:
    """Print a line without buffering, also into a pipe."""
    print(line, flush=True)


def progress_of(
    work: str, stream: TextIO | None = None, silence: figures.Silence | None = None
) -> Callable[[float], None]:
    """A function of the share that is done; while the work takes long, it prints ``planning: 34 %, 12 s so far``."""
    stream, silence, begun_s = stream or sys.stderr, silence or figures.Silence(), time.monotonic()

    def progress(share: float) -> None:
        if silence.is_overdue():
            so_far = figures.duration(round(time.monotonic() - begun_s))
            print(f"{work}: {figures.share(share)}, {so_far} so far", file=stream, flush=True)

    return progress


def check_writable(path: Path) -> None:
    """Refuse a path that a result could not be written to, before the work; UserError."""
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"cannot write {path}: expected a file in a writable folder")


def write_text(path: Path, text: str) -> None:
    """Write a result; UserError if that fails."""
    with file_errors("write", path):
        path.write_text(text, encoding="utf-8")


def rendered(table: "Table") -> str:
    """A table whose long cells are wrapped, at most 100 columns wide."""
    from rich.console import Console

    with io.StringIO() as text:
        Console(file=text, width=100).print(table)
        return text.getvalue().rstrip()


def plain_table(titles: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell; numbers to the right, columns named in `left` to the left."""
    columns = [[str(cell) for cell in column] for column in zip(titles, *rows, strict=True)]
    for index, column in enumerate(columns):
        width = max(map(len, column))
        columns[index] = [cell.ljust(width) if index in left else cell.rjust(width) for cell in column]
    return "\n".join(("  " + "  ".join(cells)).rstrip() for cells in zip(*columns, strict=True))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[int] = ()) -> None:
    """Print a table to stdout; see `plain_table`."""
    print(plain_table(titles, rows, left))
