"""The programs `tahq`, `tahq-launch`, `tahq-worker` and `tahq-netem`; the last three are commands of the first.

Implementations are imported when a command runs, so that `--help` needs no torch.
"""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from tahq import __version__
from tahq_launch.command_line import run_app
from tahq_launch.run_commands import coordinator, export, keygen, launch, trace, worker
from tahq_launch.tool_commands import compare, inspect, list_codecs, measure, plan, probe
from tahq_netem.cli import netem_app


def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Train language models over slow networks, with one stage of layers per machine."""
    if version:
        print(f"tahq {__version__}")
        raise typer.Exit


def _codec(context: typer.Context) -> None:
    """List codecs, inspect their streams, and compare them on tensors."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def _group(callback: Callable[..., None], **commands: Callable[..., int]) -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(callback)
    for name, command in commands.items():
        app.command(name)(command)
    return app


def main() -> int:
    """The program `tahq`."""
    commands = (launch, worker, coordinator, keygen, measure, plan, export, trace, probe)
    app = _group(_version, **{command.__name__: command for command in commands})
    app.add_typer(_group(_codec, list=list_codecs, inspect=inspect, compare=compare), name="codec")
    app.add_typer(netem_app(), name="netem")
    return run_app(app, "tahq", sys.argv[1:] or ["--help"])


def _one_command(command: Callable[..., int], program: str) -> int:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command)
    return run_app(app, program, sys.argv[1:])


def launch_main() -> int:
    """The program `tahq-launch`: the same as `tahq launch`."""
    return _one_command(launch, "tahq-launch")


def worker_main() -> int:
    """The program `tahq-worker`: the same as `tahq worker`."""
    return _one_command(worker, "tahq-worker")


def netem_main() -> int:
    """The program `tahq-netem`: the same as `tahq netem`."""
    return run_app(netem_app(), "tahq-netem", sys.argv[1:] or ["--help"])


if __name__ == "__main__":
    sys.exit(main())
