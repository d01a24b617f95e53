"""The commands after a run: `export` and `trace`.

Only words are here: what a command does is imported when it is run, so that `--help` needs no torch.
"""

from pathlib import Path
from typing import Annotated

import typer

from tahq.units import parse_size
from tahq_launch.options import Debug


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="The run's folder, e.g. runs/demo.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="Folder to make, e.g. demo-hf.")],
    step: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Snapshot after so many steps. Default: the newest.")
    ] = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file, e.g. 2GB.")] = "4GB",
    debug: Debug = False,
) -> int:
    """Write a run's model as a Hugging Face folder.

    It holds config.json, safetensors and the tokenizer.

    Example: tahq export runs/demo demo-hf
    """
    try:
        max_shard_nbytes = parse_size(shard_size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shard-size") from None
    from tahq_launch.export import export_run

    done = export_run(run, out, step=step, max_shard_nbytes=max_shard_nbytes)
    print(f"{done.out}: the model of {run} after step {done.step}, {done.num_parameters:,} parameters")
    if done.note:
        print(f"note: {done.note}")
    return 0


def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="The run's folder, e.g. runs/demo.")],
    step: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Of this step. Default: medians of the last 20.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            show_default=False,
            help="Write the steps of run.trace_steps (or --step) as one picture for ui.perfetto.dev. Default: none.",
        ),
    ] = None,
    debug: Debug = False,
) -> int:
    """Say what a run's steps are spent on, and what limits them.

    Example: tahq trace runs/demo --step 10 --output demo.json
    """
    from tahq_launch.trace_command import trace as show_trace

    show_trace(run, step, output)
    return 0
