"""The commands of tahq: `tahq`, and `tahq-launch`, `tahq-worker` and `tahq-netem`, which are three of them.

Only words are here: what a command does is imported when it is run, so that `--help` needs no torch.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tahq import __version__
from tahq.units import parse_size
from tahq_launch.codec_commands import codec_app
from tahq_launch.reporting import log_to_stderr, report_error, run_app
from tahq_netem.cli import netem_app

# -- options that several commands share ---------------------------------------------------------

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


def launch(
    cluster_yaml: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print layers, memory, bytes on each link and the schedule; start nothing.",
        ),
    ] = False,
    resume: Resume = False,
    debug: Debug = False,
) -> int:
    """Train what CLUSTER.YAML describes, from start to end.

    Starts a worker for each stage here or over ssh, leads them, and leaves runs/NAME behind.

    Example: tahq-launch launch/examples/demo.yaml --set run.name=first --set training.steps=20

    Exit status: 0 done, 1 our fault, 2 a mistake in the input, 3 a worker was lost (resume the run), 4 out of
    memory, 5 halted on NaN or infinity, 130 and 143 stopped by Ctrl-C or SIGTERM after a snapshot.
    """
    from tahq_launch.prepared_run import StartRequest

    if dry_run:
        return _dry_run(cluster_yaml, overrides or [])
    from tahq_launch.launcher import launch as launch_run

    return launch_run(StartRequest(cluster_yaml, tuple(overrides or ()), resume, debug), _announce)


def _dry_run(cluster_yaml: Path, overrides: Sequence[str]) -> int:
    from tahq.config_file import load_config
    from tahq_launch.dry_run import dry_run
    from tahq_launch.resolution import resolve_for_run

    print(dry_run(resolve_for_run(load_config(cluster_yaml, overrides))))
    return 0


def worker(
    peer: Annotated[
        str, typer.Option(metavar="HOST:PORT", show_default=False, help="The coordinator, e.g. 192.0.2.1:5555.")
    ],
    stage: Annotated[
        int | None, typer.Option(min=0, show_default=False, help="Stage to serve, from 0. Default: any that is free.")
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default=False,
            help="Where neighbours are listened to, e.g. 0.0.0.0:7001; port 0: any free one. "
            "Default: as the hosts entry says, else the address that faces the coordinator.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|none",
            show_default=False,
            help="What neighbours dial, e.g. 203.0.113.9:7001 behind a router that forwards the port; "
            "none: this machine only dials out. Default: as bound.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda|cuda:N", show_default=False, help="Where to compute, e.g. cuda:1. Default: as configured."
        ),
    ] = None,
    takeover: Annotated[
        bool,
        typer.Option(
            "--takeover",
            help="Take the stage from whoever holds it: you know that it is gone, or must go. What it has not finished "
            "is computed again.",
        ),
    ] = False,
    spare: Annotated[
        bool,
        typer.Option("--spare", help="Wait, and take the stage of a host that is lost. Default: take a free stage."),
    ] = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="How often to start again by itself after being killed, by a signal or a crash.")
    ] = 10,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="This worker's secret key, e.g. ~/gpu1.secret. Default: this account's, made if there is none.",
        ),
    ] = None,
    coordinator_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            show_default=False,
            help="The coordinator's public key, which it prints. Default: that it has the same key as this worker.",
        ),
    ] = None,
    no_curve: Annotated[
        bool, typer.Option("--no-curve", help="For a run with security.curve: off. Default: with CURVE only.")
    ] = False,
    debug: Debug = False,
    die_with_launcher: Annotated[bool, typer.Option("--die-with-launcher", hidden=True)] = False,
    exit_with_stdin: Annotated[bool, typer.Option("--exit-with-stdin", hidden=True)] = False,
    keys_from_stdin: Annotated[bool, typer.Option("--keys-from-stdin", hidden=True)] = False,
) -> int:
    """Serve one stage of a run, on this machine.

    The configuration comes from the coordinator. A worker that is killed starts again by itself, and the run goes on;
    one whose coordinator is killed waits for it.

    Example: tahq-worker --stage 1 --peer 192.0.2.1:5555
    """
    from tahq_launch import parent_watch, run_keys

    if no_curve and (key is not None or coordinator_key is not None):
        raise typer.BadParameter("it goes with neither --key nor --coordinator-key", param_hint="--no-curve")
    if no_curve:
        credentials = None
    elif keys_from_stdin:
        credentials = run_keys.keys_from_stdin()
    else:
        credentials = run_keys.keys_by_hand(key, coordinator_key)
    if die_with_launcher:
        parent_watch.die_with_launcher()
    if exit_with_stdin:
        parent_watch.exit_with_stdin()
    launched = die_with_launcher or exit_with_stdin
    if spare and (stage is not None or takeover):
        raise typer.BadParameter("a spare takes whichever stage needs it; leave out --stage and --takeover")
    if takeover and stage is None:
        raise typer.BadParameter("--takeover needs --stage, the one to take")
    log_to_stderr(logging.DEBUG if debug else logging.INFO, is_log=launched)

    def serve(worker_id: str, is_first: bool) -> int:
        from tahq.worker import run_worker  # not before the fork: it starts threads
        from tahq.worker_place import WorkerOptions

        wanted = -1 if stage is None else stage
        place = (wanted, peer, bind, advertise, device, worker_id, takeover and is_first)
        return run_worker(WorkerOptions(*place, credentials, spare))

    if launched:
        return serve("", True)
    from tahq.comm.addresses import parse_address

    parse_address(peer, "coordinator")  # once, and not in child after child

    def served(worker_id: str, is_first: bool) -> int:
        try:
            return serve(worker_id, is_first)
        except Exception as error:
            return report_error("tahq-worker", error, debug=debug)

    from tahq_launch.worker_supervisor import supervise

    return supervise(served, restarts)


def coordinator(
    cluster_yaml: ConfigPath,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default=False,
            help="Where to listen for workers, e.g. 0.0.0.0:5555; port 0: any free one. Default: run.bind.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default=False,
            help="What workers dial, if another, e.g. 203.0.113.9:5555. Default: run.advertise, else as bound.",
        ),
    ] = None,
    overrides: Overrides = None,
    resume: Resume = False,
    debug: Debug = False,
) -> int:
    """Lead a run whose workers are started by hand.

    Prints the tahq-worker command of every stage.

    Example: tahq coordinator cluster.yaml --bind 127.0.0.1:5555
    """
    from tahq_launch.launcher import serve
    from tahq_launch.prepared_run import StartRequest

    request = StartRequest(
        cluster_yaml, tuple(overrides or ()), resume, debug, bind, advertise, program="tahq coordinator"
    )
    return serve(request, _announce)


def keygen(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="File of the secret key, e.g. gpu1.secret. Default: ~/.config/tahq/key.secret.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Make none: print the public key of the one there is.")] = False,
    debug: Debug = False,
) -> int:
    """Make a key, and print its public half.

    The secret half goes to a file of mode 600. The public half is for security.allow, or for --coordinator-key.

    Example: tahq keygen
    """
    from tahq_launch.keygen import keygen as make_key

    print(make_key(out, show=show).public)
    return 0


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


def probe(
    cluster_yaml: ConfigPath,
    wire: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'FORWARD / BACKWARD'",
            show_default=False,
            help="A pair of codecs to try, e.g. --wire 'tah:group=32 / fixed:bits=8'. May be repeated. "
            "Default: the run's, and tah with tiles of 64 and 32, backward raw and with the run's.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training that are probed.")] = 4,
    batches: Annotated[
        int, typer.Option(min=1, help="Global batches at each of them; their mean stands for the expectation.")
    ] = 4,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps of training before, without codecs.")] = 0,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", show_default=False, help="Hugging Face folder. Default: as the run starts."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda|cuda:N", show_default=False, help="Default: as configured.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write all figures there too.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Weights of the run's newest snapshot. Default: as the run starts.")
    ] = False,
    debug: Debug = False,
) -> int:
    """Say before a long run what its codecs do to its gradients.

    Trains a few steps without codecs, in this process, and compares each gradient with what the codecs make of it.

    Example: tahq probe launch/examples/demo.yaml --warm-up 20 --wire 'tah / fixed:bits=6'
    """
    from tahq_launch.probe_command import probe as run_probe
    from tahq_launch.probe_setup import ProbeRequest

    changes, wires = tuple(overrides or ()), tuple(wire or ())
    run_probe(ProbeRequest(cluster_yaml, changes, wires, steps, batches, warm_up, weights, resume, device), json_path)
    return 0


def plan(
    cluster_yaml: ConfigPath,
    numbers: Annotated[
        Path | None,
        typer.Option(
            metavar="MEASURED.YAML",
            show_default=False,
            help="Numbers of the hosts and of the paths between them, as tahq measure writes them. "
            "Default: estimated from CLUSTER.YAML.",
        ),
    ] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC|ladder",
            show_default=False,
            help="A codec that may be chosen, link by link, the most faithful first, e.g. --codecs wf:bits=5 "
            "--codecs wf:bits=3; ladder: those of docs/planner.md. May be repeated. Default: as wire says.",
        ),
    ] = None,
    schedules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="A schedule that may be chosen, e.g. --schedules zero-bubble. May be repeated. "
            "Default: all but interleaved.",
        ),
    ] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Stages. Default: as many as are best.")
    ] = None,
    max_replicas: Annotated[
        int, typer.Option(min=1, help="Most pipelines side by side, each on hosts of its own.")
    ] = 1,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Write a cluster.yaml with the plan put in."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write all figures there too.")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Draw the simulated step.")] = False,
    overrides: Overrides = None,
    debug: Debug = False,
) -> int:
    """Say which hosts, in which order, with how many layers each, train fastest, and why.

    Predicts tokens a second by simulation; starts nothing and contacts nobody.

    Example: tahq plan cluster.yaml --numbers measured.yaml --write planned.yaml
    """
    from tahq_launch.plan_command import PlanRequest, plan_cluster
    from tahq_launch.plan_problem import PlanChoices

    choices = PlanChoices(tuple(codecs or ()), tuple(schedules or ()), stages, max_replicas)
    plan_cluster(PlanRequest(cluster_yaml, numbers, tuple(overrides or ()), choices, write, json_path, grid))
    return 0


def measure(
    cluster_yaml: ConfigPath,
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where the figures go, for `tahq plan`.")] = Path(
        "measured.yaml"
    ),
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="SAMPLES",
            show_default=False,
            help="A size to time, e.g. --micro-batch 4. May be repeated. Default: the run's, half of it and twice.",
        ),
    ] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            show_default=False,
            help="A codec to time, e.g. --codecs eden:bits=3. May be repeated. Default: those of wire.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long each stream is looked at, at least; 30 at most.")
    ] = 1.0,
    connections: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="Try each way over so many connections too, e.g. --connections 4. May be repeated. Default: one.",
        ),
    ] = None,
    parallel: Annotated[
        bool,
        typer.Option("--parallel", help="Pairs without a common host at the same time. Default: one pair at a time."),
    ] = False,
    access: Annotated[
        bool, typer.Option(help="Measure each host's uplink and downlink, with all others at once.")
    ] = True,
    overrides: Overrides = None,
    debug: Debug = False,
) -> int:
    """Have the hosts of CLUSTER.YAML measure themselves and each other.

    Times the parts of the model and the codecs, and what every way between two hosts carries. Starts workers as
    tahq-launch does, but touches no run.

    Example: tahq measure launch/examples/demo.yaml --output measured.yaml

    Exit status: as tahq-launch; 3 if a host could not reach another. What was measured is written all the same.
    """
    from tahq_launch.measure import MeasureOptions
    from tahq_launch.measure import measure as measure_hosts

    options = MeasureOptions(
        config_path=cluster_yaml,
        output=output,
        overrides=tuple(overrides or ()),
        micro_batches=tuple(micro_batch or ()),
        codecs=tuple(codecs or ()),
        seconds=seconds,
        parallel=parallel,
        access=access,
        connections=tuple(connections or ()),
        debug=debug,
    )
    return measure_hosts(options, _announce)


# -- programs ------------------------------------------------------------------------------------


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


def _announce(line: str) -> None:
    print(line, flush=True)


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
