"""The commands of tahq: `tahq`, and `tahq-launch`, `tahq-worker` and `tahq-netem`, which are three of them.

Only words are here: what a command does is imported when it is run, so that `--help` needs no torch.
"""

import sys
from typing import Annotated

import typer

from tahq import __version__
from tahq_launch.codec_commands import codec_app
from tahq_launch.command_line import run_app
from tahq_launch.plan_commands import measure, plan, probe
from tahq_launch.run_commands import coordinator, export, keygen, launch, trace, worker
from tahq_netem.cli import netem_app


def _umbrella() -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(_version)
    for command in (launch, worker, coordinator, keygen, measure, plan, export, trace, probe):
        app.command(command.__name__)(command)
    app.add_typer(codec_app(), name="codec")
    app.add_typer(netem_app(), name="netem")
    return app


def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Train language models over slow networks, one stage of layers a machine."""
    if version:
        print(f"tahq {__version__}")
        raise typer.Exit


def main() -> int:
    """The program `tahq`."""
    return run_app(_umbrella(), "tahq", sys.argv[1:] or ["--help"])


def launch_main() -> int:
    """The program `tahq-launch`: `tahq launch` under a name of its own."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(launch)
    return run_app(app, "tahq-launch", sys.argv[1:])


def netem_main() -> int:
    """The program `tahq-netem`: `tahq netem` under a name of its own."""
    return run_app(netem_app(), "tahq-netem", sys.argv[1:] or ["--help"])


def worker_main() -> int:
    """The program `tahq-worker`: `tahq worker` under a name of its own."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(worker)
    return run_app(app, "tahq-worker", sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
