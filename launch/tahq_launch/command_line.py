"""Options that several commands share, and how a command ends: one line on stderr and an exit status.

- What the user can correct is one line, ``tahq-launch: cluster.yaml:3: …``, without a traceback.
- A traceback is shown with ``--debug``, and is always in the log of a run that has one.
- The exit status is the error class's (`tahq.errors`); any other exception is status 1.
"""

import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tahq.errors import TahqError, message_of

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CLUSTER.YAML", help="Configuration of the run, e.g. launch/examples/demo.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key of the file, e.g. --set training.steps=200 --set links.rate=50mbit. May be repeated.",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run of this name from its newest checkpoint. Default: a new run.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and log in detail. Default: one line per error.")]

log = logging.getLogger("tahq")


def run_app(app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status.

    Args:
        app: the commands.
        program: its name in messages and help.
        arguments: the command line without the program's name.

    Returns:
        What the command returned; 2 for a wrong command line; an error's own status; 130 after Ctrl-C (typer does
        that); 1 for an unexpected exception.
    """
    log.addHandler(logging.NullHandler())  # else Python prints errors that have no handler
    try:
        status = app(args=list(arguments), prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        hint = "" if "--help" in error.format_message() else f" (see {program} --help)"
        return _say(program, error.format_message().rstrip(".") + hint, error.exit_code)
    except Exception as error:
        return report_error(program, error, debug="--debug" in arguments)
    return status if isinstance(status, int) else 0


def report_error(program: str, error: Exception, *, debug: bool) -> int:
    """Print an error as `run_app` does; returns the exit status."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, TahqError):
        log.debug("ended by", exc_info=error)
        return _say(program, message_of(error), error.exit_status)
    log.critical("internal error", exc_info=error)
    again = "" if debug else " (run again with --debug for the traceback)"
    return _say(program, f"internal error: {type(error).__name__}: {message_of(error)}{again}", TahqError.exit_status)


def _say(program: str, message: str, status: int) -> int:
    print(f"{program}: {one_line(message)}", file=sys.stderr, flush=True)
    return status


def one_line(message: str) -> str:
    """A message with its line breaks folded."""
    return " ".join(part.strip() for part in message.splitlines() if part.strip())


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
    """Print a line at once, also into a pipe."""
    print(line, flush=True)
