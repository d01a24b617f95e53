"""The commands before a run: `plan`, `measure` and `probe`.

Only words are here: what a command does is imported when it is run, so that `--help` needs no torch.
"""

from pathlib import Path
from typing import Annotated

import typer

from tahq_launch.command_line import ConfigPath, Debug, Overrides, announce


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
    from tahq_launch.plan.command import PlanRequest, plan_cluster
    from tahq_launch.plan.problem import PlanChoices

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
    from tahq_launch.plan.measure import MeasureOptions
    from tahq_launch.plan.measure import measure as measure_hosts

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
    return measure_hosts(options, announce)


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
    from tahq_launch.analysis.probe import probe as run_probe
    from tahq_launch.analysis.probe_setup import ProbeRequest

    changes, wires = tuple(overrides or ()), tuple(wire or ())
    run_probe(ProbeRequest(cluster_yaml, changes, wires, steps, batches, warm_up, weights, resume, device), json_path)
    return 0
