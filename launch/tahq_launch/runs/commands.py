"""The command lines of `ps`, `status`, `logs`, `stop`, `pull` and `eval`."""

from pathlib import Path
from typing import Annotated

import typer

from tahq_launch.command_line import Best, Debug, Device, Json, RunName, RunOrAddress, Step, chosen_step

Key = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="At HOST:PORT: the coordinator's secret key. Default: this account's."),
]


def ps(
    is_all: Annotated[
        bool, typer.Option("--all", "-a", help="Show also runs in runs/ that are over. Default: live ones.")
    ] = False,
    json_lines: Json = False,
    debug: Debug = False,
) -> int:
    """List the runs of this machine: step, tokens/s, state, and since when.

    A run is listed on the machine of its launcher or coordinator.

    Example: tahq ps --all
    """
    from tahq_launch.runs.status import print_runs

    print_runs(is_all=is_all, json_lines=json_lines)
    return 0


def status(run: RunOrAddress, key: Key = None, json_lines: Json = False, debug: Debug = False) -> int:
    """Show how a run stands: stages, links, last checkpoint, and the bottleneck.

    Example: tahq status demo
    """
    from tahq_launch.dashboard.run_feed import RunFeed, check_run
    from tahq_launch.runs.found import find_run
    from tahq_launch.runs.status import print_status

    if ":" in run:
        from tahq_launch.runs.at_address import is_address, remote_run

        if is_address(run):
            with remote_run(run, key) as remote:
                remote.refresh()
                print_status(RunFeed(remote.folder, is_written=lambda: True), run, as_json=json_lines)
            return 0
    folder = find_run(run)
    check_run(folder)
    print_status(RunFeed(folder), str(folder), as_json=json_lines)
    return 0


def logs(
    run: RunOrAddress,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends. Default: those there are.")
    ] = False,
    stage: Annotated[
        int | None, typer.Option(min=0, help="Print this stage's log alone, e.g. 1. Default: all, and the launcher's.")
    ] = None,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="Print only so many of the last lines. Default: all.")
    ] = None,
    key: Key = None,
    debug: Debug = False,
) -> int:
    """Print the logs of a run's launcher and stages, in the order of their times.

    Example: tahq logs demo -f --stage 1
    """
    from tahq_launch.runs.found import find_run, writer_of
    from tahq_launch.runs.logs import print_logs

    if ":" in run:
        from tahq_launch.runs.at_address import is_address, remote_run

        if is_address(run):
            with remote_run(run, key) as remote:
                print_logs(
                    remote.folder,
                    stage=stage,
                    lines=lines,
                    is_live=lambda: follow and not remote.is_over,
                    refresh=lambda: remote.refresh(logs=True),
                )
            return 0
    folder = find_run(run)
    print_logs(
        folder,
        stage=stage,
        lines=lines,
        is_live=lambda: follow and writer_of(folder) is not None,
        refresh=lambda: None,
    )
    return 0


def stop(
    run: RunOrAddress,
    now: Annotated[
        bool, typer.Option("--now", help="Stop at once. Default: finish the step and write a checkpoint.")
    ] = False,
    key: Key = None,
    debug: Debug = False,
) -> int:
    """Stop a run as Ctrl-C does, and wait for its end; it can be resumed.

    Example: tahq stop demo
    """
    from tahq_launch.runs.found import find_run
    from tahq_launch.runs.stop import stop_run

    if ":" in run:
        from tahq_launch.runs.at_address import is_address, stop_at

        if is_address(run):
            stop_at(run, key, now=now)
            return 0
    stop_run(find_run(run), now=now)
    return 0


def pull(
    run: RunName,
    step: Step = None,
    best: Best = False,
    debug: Debug = False,
) -> int:
    """Fetch the files of a run's checkpoint from its hosts: over ssh, or from the workers of a live run.

    Files that are here already are only verified. If it is interrupted, call it again: it continues.

    Example: tahq pull demo
    """
    from tahq_launch.runs.found import find_run
    from tahq_launch.runs.pull import pull as fetch

    for line in fetch(find_run(run), chosen_step(step, best)):
        print(line)
    return 0


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="RUN|FOLDER", help="A run's folder or a model's, e.g. runs/demo.")],
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Text to evaluate on. May be repeated. Default: the run's held-out data."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="For FOLDER: this run's held-out data, e.g. runs/demo. Default: none."),
    ] = None,
    step: Step = None,
    best: Best = False,
    batches: Annotated[
        int | None,
        typer.Option(min=1, help="Global batches of held-out data. Default: the run's training.eval_batches."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="TASK,…", help="Tasks of lm-eval instead, e.g. hellaswag,arc_easy. Default: none."),
    ] = None,
    task_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also knows the tasks in this folder's YAML. Default: none.")
    ] = None,
    device: Device = None,
    json_lines: Json = False,
    debug: Debug = False,
) -> int:
    """Measure a model's loss and perplexity on held-out data, or its results in tasks of lm-eval.

    The loss of a run is that of its own validations without codecs, `validation.loss_raw` in metrics.jsonl.

    Example: tahq eval runs/demo --text book.txt
    """
    from tahq_launch.evaluate import EvalRequest, print_evaluation
    from tahq_launch.runs.found import find_run

    names = tuple(name for name in (tasks or "").split(",") if name)
    data = None if data is None else find_run(data)
    which = chosen_step(step, best)
    request = EvalRequest(find_run(model), tuple(text or ()), data, which, batches, names, task_folder, device)
    print_evaluation(request, as_json=json_lines)
    return 0
