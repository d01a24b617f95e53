"""The programs `tahq`, `tahq-launch`, `tahq-worker` and `tahq-netem`; the last three are commands of the first.

Implementations are imported when a command runs, so that `--help` needs no torch.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tahq.errors import UserError
from tahq.units import parse_size
from tahq_launch.command_line import (
    Advertise,
    Best,
    Bind,
    ConfigPath,
    Debug,
    Device,
    Overrides,
    Restarts,
    Resume,
    Step,
    Version,
    announce,
    check_worker_options,
    chosen_step,
    collect_as_usual,
    log_to_stderr,
    progress_of,
    run_app,
    supervised,
)
from tahq_launch.init import init
from tahq_launch.joining.commands import allow, invite, join
from tahq_launch.runs.commands import evaluate, logs, ps, pull, status, stop
from tahq_launch.tool_commands import compare, doctor, inspect, list_codecs, measure, plan, probe
from tahq_netem.cli import HELP_OPTIONS, add_command, netem_app

log = logging.getLogger("tahq")

RunFolderPath = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, e.g. runs/demo.")]


def launch(
    cluster_yaml: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print layers, memory, bytes per link and the schedule; start nothing.")
    ] = False,
    resume: Resume = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Serve a page that shows the run, and print its address. Default: none.")
    ] = False,
    debug: Debug = False,
    version: Version = False,
) -> int:
    """Train the model that CLUSTER.YAML describes.

    Starts one worker per stage, on this machine or over ssh, coordinates them, and writes runs/NAME.

    Example: tahq-launch launch/examples/demo.yaml --set run.name=first --set training.steps=20

    Exit status: 0 done, 1 internal error, 2 mistake in the input, 3 worker lost (resume the run), 4 out of memory,
    5 halted on NaN or infinity, 130 and 143 stopped by Ctrl-C or SIGTERM after writing a checkpoint.
    """
    from tahq.config.file import load_config, placed_errors

    with placed_errors(cluster_yaml, overrides or ()):
        from tahq_launch.dashboard.process import check_installed
        from tahq_launch.joining.gathered_machines import with_joined
        from tahq_launch.plan.first_plan import planned_start, run_planned
        from tahq_launch.start.preflight import reachable_start, refuse
        from tahq_launch.start.prepared_run import StartRequest, with_run_name

        if dashboard:
            check_installed()
        asked = StartRequest(cluster_yaml, tuple(overrides or ()), resume, debug, dashboard=dashboard)
        start, faults = reachable_start(asked)
        if not dry_run:
            refuse(faults)
            start = replace(start, overrides=with_run_name(cluster_yaml, start.overrides, resume=resume))
            return run_planned(with_joined(start))
        from tahq_launch.plan.dry_run import dry_run as describe
        from tahq_launch.start.local_checks import check_local
        from tahq_launch.start.resolution import resolve_for_run

        start = planned_start(start, measures=False)
        config = resolve_for_run(start.planned or load_config(cluster_yaml, start.all_overrides))
        check_local(config)
        print(describe(config, progress_of("estimating memory"), start.figures))
        refuse(faults)
        return 0


def worker(
    peer: Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator, e.g. 192.0.2.1:5555.")],
    stage: Annotated[int | None, typer.Option(min=0, help="Stage to serve, from 0. Default: any free stage.")] = None,
    bind: Bind = None,
    advertise: Advertise = None,
    device: Device = None,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Take the stage from its worker, e.g. on a replacement machine.")
    ] = False,
    spare: Annotated[
        bool, typer.Option("--spare", help="Wait, and take the stage of a lost host. Default: take a free stage.")
    ] = False,
    restarts: Restarts = 10,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="This worker's secret key, e.g. ~/gpu1.secret. Default: this account's key."),
    ] = None,
    coordinator_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The coordinator's public key. Default: this worker's own public key."),
    ] = None,
    no_curve: Annotated[
        bool, typer.Option("--no-curve", help="For a run with security.curve: off. Default: CURVE is required.")
    ] = False,
    debug: Debug = False,
    die_with_launcher: Annotated[bool, typer.Option("--die-with-launcher", hidden=True)] = False,
    exit_with_stdin: Annotated[bool, typer.Option("--exit-with-stdin", hidden=True)] = False,
    keys_from_stdin: Annotated[bool, typer.Option("--keys-from-stdin", hidden=True)] = False,
    version: Version = False,
) -> int:
    """Serve one stage of a run on this machine.

    The configuration comes from the coordinator. A worker that is killed restarts by itself and the run continues; a
    worker whose coordinator is killed waits for it.

    Example: tahq-worker --stage 1 --peer 192.0.2.1:5555
    """
    from tahq_launch.start import run_keys, worker_lifetime

    if no_curve and (key is not None or coordinator_key is not None):
        raise typer.BadParameter("cannot be combined with --key or --coordinator-key", param_hint="--no-curve")
    if spare and (stage is not None or takeover):
        raise typer.BadParameter("a spare takes any stage that needs a worker; leave out --stage and --takeover")
    if takeover and stage is None:
        raise typer.BadParameter("--takeover needs --stage, the stage to take")
    check_worker_options(device, peer=peer, bind=bind, advertise=advertise)
    credentials = None
    if not no_curve:
        by_hand = run_keys.keys_by_hand
        credentials = run_keys.keys_from_stdin() if keys_from_stdin else by_hand(key, coordinator_key)

    def serve(worker_id: str, is_first: bool) -> int:
        from tahq.worker.control import WorkerOptions
        from tahq.worker.main import run_worker  # not before the fork: it starts threads

        options = WorkerOptions(
            stage=-1 if stage is None else stage,
            peer=peer,
            bind=bind,
            advertise=advertise,
            device=device,
            worker_id=worker_id,
            takeover=takeover and is_first,
            credentials=credentials,
            spare=spare,
            replaces_host=takeover,
        )
        collect_as_usual()
        return run_worker(options)

    launched = die_with_launcher or exit_with_stdin
    log_to_stderr(logging.DEBUG if debug else logging.INFO, is_log=launched)
    if die_with_launcher:
        worker_lifetime.die_with_launcher()
    if exit_with_stdin:
        worker_lifetime.exit_with_stdin()
    if launched:
        return serve("", True)
    log.info("dialling %s …", peer)  # before the child, which imports torch first
    return supervised("tahq-worker", serve, restarts, debug=debug)


def coordinator(
    cluster_yaml: ConfigPath,
    bind: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address to listen on, e.g. 0.0.0.0:5555. Default: run.bind."),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address that workers dial. Default: run.advertise, else --bind."),
    ] = None,
    overrides: Overrides = None,
    resume: Resume = False,
    debug: Debug = False,
) -> int:
    """Coordinate a run whose workers are started by hand.

    Prints the tahq-worker command of every stage.

    Example: tahq coordinator cluster.yaml --bind 127.0.0.1:5555
    """
    from tahq.config.file import placed_errors
    from tahq_launch.joining.gathered_machines import with_joined
    from tahq_launch.plan.first_plan import run_planned
    from tahq_launch.start.prepared_run import StartRequest, with_run_name

    changes, program = tuple(overrides or ()), "tahq coordinator"
    request = StartRequest(cluster_yaml, changes, resume, debug, bind, advertise, program, starts_workers=False)
    with placed_errors(cluster_yaml, request.all_overrides):
        return run_planned(with_joined(replace(request, overrides=with_run_name(cluster_yaml, changes, resume=resume))))


def keygen(
    out: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "--out",
            metavar="FILE",
            help="File to write, e.g. gpu1.secret. Default: ~/.config/tahq/key.secret.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the public key of the existing file instead.")] = False,
    debug: Debug = False,
) -> int:
    """Make a key pair and print its public half.

    The secret half goes to a file of mode 600. The public half is for security.allow, or for --coordinator-key.

    Example: tahq keygen
    """
    from tahq_launch.start.run_keys import keygen as make_key

    print(make_key(out, show=show).public)
    return 0


def export(
    run: RunFolderPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create, e.g. demo-hf.")],
    step: Step = None,
    best: Best = False,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file, e.g. 2GB.")] = "4GB",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the run's adapters alone, as a folder that peft loads.")
    ] = False,
    debug: Debug = False,
) -> int:
    """Write a run's model as a Hugging Face folder: config.json, safetensors and the tokenizer.

    Adapters are merged into the weights, unless --adapter is given.

    Example: tahq export runs/demo demo-hf
    """
    try:
        max_shard_nbytes = parse_size(shard_size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shard-size") from None
    from tahq_launch.export import export_run
    from tahq_launch.runs.found import find_run

    chosen = chosen_step(step, best)
    for line in export_run(find_run(run), out, step=chosen, max_shard_nbytes=max_shard_nbytes, is_adapter=adapter):
        print(line)
    return 0


def generate(
    model: Annotated[Path, typer.Argument(metavar="RUN|FOLDER", help="A run's folder or a model's, e.g. runs/demo.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue, e.g. 'def main('.")],
    tokens: Annotated[int, typer.Option(min=1, help="Most new tokens.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of the sampling, e.g. 0.8. Default: always the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    best: Best = False,
    device: Device = None,
    debug: Debug = False,
) -> int:
    """Continue a text with a run's newest checkpoint, or with any model that transformers loads from a folder.

    Example: tahq generate runs/demo 'def main('
    """
    from tahq_launch.loaded_model import default_device, generate_text
    from tahq_launch.runs.found import find_run

    where = device or default_device()
    step, source = chosen_step(None, best), find_run(model)
    generate_text(source, prompt, num_tokens=tokens, temperature=temperature, seed=seed, device=where, step=step)
    return 0


def trace(
    run: RunFolderPath,
    step: Annotated[
        int | None, typer.Option(min=1, help="Show this step. Default: medians of the last 20 steps.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Also write the traced steps (run.trace_steps) for ui.perfetto.dev."),
    ] = None,
    debug: Debug = False,
) -> int:
    """Show how a run's steps spend their time, which resource limits them, and which change would help most.

    Example: tahq trace runs/demo --step 10 --output demo.json
    """
    from tahq_launch.analysis.trace import print_trace

    print_trace(run, step, output)
    return 0


def check_host() -> int:
    """Answer the launcher's questions about this host, on stdin and stdout; for tahq-launch, over ssh."""
    from tahq_launch.start.host_check import check_host as check

    return check()


def dashboard(
    run: RunFolderPath,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1 to listen on, e.g. 8080. Default: any free one.")
    ] = 0,
    debug: Debug = False,
) -> int:
    """Serve a page that shows a run, live or finished, until Ctrl-C; prints its address.

    Example: tahq dashboard runs/demo
    """
    from tahq_launch.dashboard.process import Listener, check_installed
    from tahq_launch.dashboard.run_feed import check_run

    check_run(run)
    check_installed()
    from tahq_launch.dashboard.server import serve

    try:
        listener = Listener.open(port)
    except OSError as error:
        raise UserError(f"cannot listen on 127.0.0.1:{port}: {error.strerror}; choose another --port") from error
    for line in listener.lines():
        announce(line)
    serve(run, listener)
    return 0


def _tahq(version: Version = False) -> None:
    """Train language models over slow networks, with one stage of layers per machine."""


def _codec(context: typer.Context) -> None:
    """List codecs, inspect their streams, and compare them on tensors."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def _group(callback: Callable[..., None], **commands: Callable[..., int]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, context_settings=HELP_OPTIONS)
    app.callback(invoke_without_command=True)(callback)
    for name, command in commands.items():
        add_command(app, name, command)
    return app


def tahq_app() -> typer.Typer:
    """The program `tahq` with its commands."""
    commands: tuple[Callable[..., int], ...] = (
        launch,
        init,
        doctor,
        worker,
        coordinator,
        invite,
        join,
        allow,
        keygen,
        measure,
        plan,
        ps,
        status,
        logs,
        stop,
        pull,
        export,
        generate,
        trace,
        probe,
        dashboard,
    )
    app = _group(_tahq, **{command.__name__: command for command in commands})
    add_command(app, "eval", evaluate)
    app.command("check-host", hidden=True)(check_host)
    codec = _group(_codec, list=list_codecs, inspect=inspect, compare=compare)
    app.add_typer(codec, name="codec", short_help=_codec.__doc__)
    app.add_typer(netem_app(), name="netem")
    return app


def main() -> int:
    """The program `tahq`."""
    return run_app(tahq_app(), "tahq", sys.argv[1:] or ["--help"])


def _one_command(command: Callable[..., int], program: str) -> int:
    app = typer.Typer(rich_markup_mode=None)
    app.command(context_settings=HELP_OPTIONS)(command)
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
