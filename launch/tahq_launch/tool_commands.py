"""The command lines of `plan`, `measure`, `probe`, `doctor`, and `codec list`, `inspect` and `compare`.

Each function imports its implementation when it is called, so that `--help` needs no torch.
"""

from pathlib import Path
from typing import Annotated

import typer

from tahq.errors import UserError, brief
from tahq_launch.command_line import ConfigPath, Debug, Device, Json, JsonObject, Overrides

Shape = Annotated[
    str | None, typer.Option(metavar="N,…", help="Shape of the encoded tensor, e.g. 2,1024,1600. Default: none.")
]


def plan(
    cluster_yaml: ConfigPath,
    numbers: Annotated[
        Path | None,
        typer.Option(metavar="MEASURED.YAML", help="Speeds of hosts and paths, from tahq measure. Default: estimated."),
    ] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option(
            "--codec",
            "--codecs",
            metavar="SPEC|ladder",
            help="A codec that the planner may choose per link, the most accurate first, e.g. --codec wf:bits=5 "
            "--codec wf:bits=3; ladder: the list in docs/dev/planner.md. May be repeated. Default: those of wire.",
        ),
    ] = None,
    schedules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A schedule that the planner may choose, e.g. --schedules zero-bubble. May be repeated. "
            "Default: all but interleaved.",
        ),
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Number of stages. Default: the fastest number.")] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Largest number of pipeline replicas, each on its own hosts. Default: 1; with adapters 16."
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--output", "--write", metavar="FILE", help="Write a cluster.yaml that follows the plan. Default: none."
        ),
    ] = None,
    prints_json: JsonObject = False,
    grid: Annotated[bool, typer.Option("--grid", help="Draw the simulated step.")] = False,
    overrides: Overrides = None,
    debug: Debug = False,
) -> int:
    """Find the fastest assignment of layers to hosts, and explain it.

    Predicts tokens per second by simulation; starts nothing and contacts no host.

    Example: tahq plan cluster.yaml --numbers measured.yaml --output planned.yaml
    """
    from tahq_launch.plan.command import plan_cluster
    from tahq_launch.plan.problem import PlanChoices

    choices = PlanChoices(tuple(codecs or ()), tuple(schedules or ()), stages, max_replicas)
    plan_cluster(cluster_yaml, overrides or (), numbers, choices, write=write, prints_json=prints_json, draws_step=grid)
    return 0


def measure(
    cluster_yaml: ConfigPath,
    output: Annotated[Path, typer.Option(metavar="FILE", help="File to write, for `tahq plan --numbers`.")] = Path(
        "measured.yaml"
    ),
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="SAMPLES", help="Size to time. May be repeated. Default: 0.5, 1 and 2 times the run's."
        ),
    ] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option(
            "--codec",
            "--codecs",
            metavar="SPEC",
            help="Codec to time, e.g. eden:bits=3. May be repeated. Default: those of wire.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Shortest time to observe each stream; at most 30.")
    ] = 1.0,
    connections: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Also measure each path over N TCP connections. May be repeated. Default: one."),
    ] = None,
    parallel: Annotated[
        bool, typer.Option("--parallel", help="Measure separate pairs at the same time. Default: one pair at a time.")
    ] = False,
    access: Annotated[
        bool, typer.Option(help="Measure each host's uplink and downlink with all other hosts at once.")
    ] = True,
    overrides: Overrides = None,
    debug: Debug = False,
) -> int:
    """Measure the compute speed of the hosts of CLUSTER.YAML, and the network between them.

    Times the parts of the model, the codecs, and the path between every two hosts. Starts workers as tahq-launch does,
    but changes no run folder.

    Example: tahq measure launch/examples/demo.yaml --output measured.yaml

    Exit status: as tahq-launch; 3 if a host could not reach another (the other measurements are still written).
    """
    from tahq.plan.measure.measurement import MeasureRequest
    from tahq_launch.plan.measure import measure_hosts
    from tahq_launch.start.prepared_run import StartRequest

    sizes, specs, numbers = tuple(micro_batch or ()), tuple(codecs or ()), tuple(connections or ())
    request = MeasureRequest(sizes, specs, seconds, parallel, access, numbers)
    start = StartRequest(cluster_yaml, tuple(overrides or ()), debug=debug, program="tahq measure")
    return measure_hosts(start, request, output)


def probe(
    cluster_yaml: ConfigPath,
    wire: Annotated[
        list[str] | None,
        typer.Option(
            "--codec",
            "--wire",
            metavar="'FORWARD / BACKWARD'",
            help="Codec pair to try, e.g. --codec 'tah:group=32 / fixed:bits=8'. May be repeated. "
            "Default: the run's, and tah with tiles of 64 and 32, backward raw and with the run's.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to probe.")] = 4,
    batches: Annotated[
        int, typer.Option(min=1, help="Global batches per probed step; their mean estimates the expectation.")
    ] = 4,
    warm_up: Annotated[int, typer.Option(min=0, help="Training steps before the probe, without codecs.")] = 0,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Hugging Face folder with weights. Default: the run's initial weights."),
    ] = None,
    device: Device = None,
    prints_json: JsonObject = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write that JSON object to FILE. Default: none.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Use the weights of the run's newest checkpoint. Default: its initial weights."),
    ] = False,
    debug: Debug = False,
) -> int:
    """Measure the error that a run's codecs cause in its gradients.

    Trains a few steps without codecs, in this process, and compares each gradient with the gradient under the codecs.

    Example: tahq probe launch/examples/demo.yaml --warm-up 20 --codec 'tah / fixed:bits=6'
    """
    from tahq_launch.analysis.probe import run_probe
    from tahq_launch.analysis.probe_setup import ProbeRequest

    changes, wires = tuple(overrides or ()), tuple(wire or ())
    request = ProbeRequest(cluster_yaml, changes, wires, steps, batches, warm_up, weights, resume, device)
    run_probe(request, prints_json=prints_json, output=output)
    return 0


def doctor(
    cluster_yaml: Annotated[
        Path | None,
        typer.Argument(metavar="[CLUSTER.YAML]", help="A run whose hosts are checked. Default: only this machine."),
    ] = None,
    overrides: Overrides = None,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Install this version of tahq on hosts, create work folders, copy keys; then check again. "
            "Default: only check.",
        ),
    ] = False,
    copy: Annotated[
        bool, typer.Option("--copy", help="With --fix: also copy a missing model and missing data. Default: neither.")
    ] = False,
    prints_json: JsonObject = False,
    debug: Debug = False,
) -> int:
    """Check this machine, or all hosts of a run at once: software, GPU, disk, memory, clock, ports and links.

    Names every fault with the command that remedies it. Links between neighbours carry data for a second or two.

    Example: tahq doctor cluster.yaml --fix

    Exit status: 0 nothing keeps a run from starting, 2 something does. Warnings do not count.
    """
    if copy and not fix:
        raise typer.BadParameter("goes with --fix", param_hint="--copy")
    from tahq_launch.doctor.command import doctor as check

    return check(cluster_yaml, tuple(overrides or ()), fixes=fix, copies=copy, prints_json=prints_json)


def list_codecs(
    shape: Annotated[
        str, typer.Option(metavar="N,…", help="Tensor shape for which bits per element are computed.")
    ] = "2,1024,1600",
    json_lines: Json = False,
    debug: Debug = False,
) -> int:
    """List the codecs with their parameters, defaults and bits per element.

    Example: tahq codec list --shape 4,512,768
    """
    from tahq_launch.analysis.codec_inspection import print_codecs

    print_codecs(_shape(shape), json_lines=json_lines)
    return 0


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A stream as codec.encode returns it, e.g. x.tah.")],
    spec: Annotated[
        str | None,
        typer.Option(
            "--codec",
            "--spec",
            metavar="SPEC",
            help="Codec that wrote it, e.g. tah:group=32. Default: guessed from the header.",
        ),
    ] = None,
    shape: Shape = None,
    hex_nbytes: Annotated[
        int, typer.Option("--hex", min=0, metavar="N", help="Also print the first N bytes, annotated.")
    ] = 0,
    key: Annotated[int, typer.Option(min=0, metavar="K", help="Key it was encoded with; needed to decode eden.")] = 0,
    debug: Debug = False,
) -> int:
    """Show the header, sections and statistics of an encoded stream, and decode it to check it.

    A stream does not record its codec and shape: without --codec and --shape only the header is shown.

    Example: tahq codec inspect boundary.tah --codec tah --shape 2,1024,1600 --hex 64
    """
    from tahq_launch.analysis.codec_inspection import print_stream

    print_stream(file, spec, None if shape is None else _shape(shape), hex_nbytes, key)
    return 0


def compare(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Tensors [..., C]: .safetensors or .npy.")],
    tensors: Annotated[
        list[str] | None,
        typer.Option("--tensor", metavar="NAME", help="Tensor to use; may be repeated. Default: all suitable tensors."),
    ] = None,
    specs: Annotated[
        list[str] | None,
        typer.Option(
            "--codec",
            "--spec",
            metavar="SPEC",
            help="Codec to try, e.g. fixed:bits=6; may be repeated. Default: a selection.",
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=2, metavar="N", help="Number of keys to try with a randomised codec.")] = 16,
    backend: Annotated[
        str, typer.Option(metavar="auto|reference|cpu|triton", help="Implementation, e.g. reference.")
    ] = "auto",
    device: Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="Device to encode on, e.g. cuda:1.")] = "cpu",
    plot: Annotated[
        Path | None,
        typer.Option(metavar="OUT.PNG", help="Also plot error against bits (.png, .pdf, .svg). Default: none."),
    ] = None,
    json_lines: Json = False,
    debug: Debug = False,
) -> int:
    """Measure size, error and speed of codecs on your tensors.

    Bytes, bits per element, relative error and its Gaussian bound, largest error, cosine, bias, the worst token's
    relative error, and millions of elements per second (one thread on the CPU).

    Example: tahq codec compare boundary.safetensors --codec tah --codec fixed:bits=6 --plot frontier.png
    """
    from tahq_launch.analysis.codec_comparison import ComparisonRequest, run_comparison

    names = tuple(tensors or ())
    run_comparison(ComparisonRequest(file, names, tuple(specs or ()), draws, backend, device, plot, json_lines))
    return 0


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise UserError(
            f"--shape must be whole numbers with commas between them, as in 2,1024,1600; got {brief(repr(text))}"
        ) from None
