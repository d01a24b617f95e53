"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[
    Path,
    typer.Argument(metavar="CLUSTER.YAML", show_default=False, help="What to run, e.g. launch/examples/demo.yaml."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        show_default=False,
        help="Change one key of the file, e.g. --set training.steps=200 --set links.rate=50mbit. May be repeated.",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run of this name from its newest snapshot. Default: a new run.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks, log in detail. Default: one line an error.")]
