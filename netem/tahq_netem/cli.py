"""The commands of `tahq-netem`, which are also those of `tahq netem`; each imports what it needs when it is run."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from tahq.units import parse_duration

_argument = partial(typer.Argument, show_default=False)
_file_option = partial(typer.Option, metavar="FILE", show_default=False)
_PROFILE_HELP = "A kind of connection, e.g. cable (tahq-netem profiles lists them), or a YAML file that describes one."
Profile = Annotated[str, _argument(metavar="PROFILE", help=_PROFILE_HELP)]
Hosts = Annotated[int, typer.Option("--hosts", min=2, max=250, metavar="N", help="Hosts of the network.")]
Backend = Annotated[
    Literal["auto", "kernel", "tun"],
    typer.Option("--backend", help="What shapes the links; auto: kernel where it has netem, else tun."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks. Default: one line per error.")]


def probe(debug: Debug = False) -> int:
    """Show which networks this machine can imitate, and what is missing for the others.

    Tries each part of the kernel on a throwaway link.

    Example: tahq-netem probe
    """
    from tahq_netem.backends import choice

    print(*choice.probe().lines(), sep="\n")
    return 0


def profiles(debug: Debug = False) -> int:
    """List the named kinds of connections, with their figures and the sources of those.

    The list is YAML; a file with one such entry, without its name, is a profile of your own.

    Example: tahq-netem profiles
    """
    from tahq_netem.network.description import profiles_text

    print(profiles_text(), end="")
    return 0


def run(
    profile: Profile,
    command: Annotated[
        list[str],
        _argument(
            metavar="COMMAND",
            help="Command to run, after --, e.g. -- curl http://{host1}:8000; {host1} stands for that host's address.",
        ),
    ],
    hosts: Hosts = 2,
    backend: Backend = "auto",
    on: Annotated[
        str, typer.Option("--on", metavar="HOST|all", help="Where COMMAND runs; all: on every host at once.")
    ] = "host0",
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST=COMMAND",
            show_default=False,
            help="A program to run beside COMMAND, such as a server; may be given several times. COMMAND is started "
            "when it listens (TCP or UDP), or after ten seconds. It is ended after COMMAND. Default: none.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        _file_option(
            "--calibrate",
            help="Measure the network first, write the figures to FILE, and start nothing if one is off. "
            "Default: not measured.",
        ),
    ] = None,
    faults: Annotated[
        Path | None,
        _file_option(help="YAML list of faults, e.g. - {at: 5s, link: host1, what: down, for: 2s}. Default: none."),
    ] = None,
    debug: Debug = False,
) -> int:
    """Run a program on a host with a slow connection to other hosts.

    The hosts are called host0, host1 and so on; they reach each other and nothing else. COMMAND finds its host's
    name in TAHQ_HOST and all names with their addresses in TAHQ_HOSTS (host0=10.77.0.1,host1=10.77.0.2).

    Example: tahq-netem run cable --also 'host1=python3 -m http.server' -- curl http://{host1}:8000

    Exit status: that of COMMAND; 2 if the network cannot be built.
    """
    from tahq_netem.run_command import RunRequest, run_command

    beside = tuple(also or ())
    return run_command(RunRequest(profile, tuple(command), hosts, backend, on, beside, calibration, faults))


def clean(debug: Debug = False) -> int:
    """Remove what killed runs left behind; networks in use stay.

    Building a network does the same.

    Example: tahq-netem clean
    """
    from tahq_netem.backends.namespace_group import sweep_leftovers

    removed = sweep_leftovers()
    print(f"removed {', '.join(removed)}" if removed else "nothing was left behind")
    return 0


def calibrate(
    profile: Profile,
    hosts: Hosts = 2,
    backend: Backend = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Shorter flows, and only figures that are judged. Default: all figures.")
    ] = False,
    prints_json: Annotated[bool, typer.Option("--json", help="Print one JSON object. Default: a table.")] = False,
    output: Annotated[Path | None, _file_option(help="Also write that JSON object to FILE. Default: none.")] = None,
    debug: Debug = False,
) -> int:
    """Build a network, measure it, and check that it is as described.

    Example: tahq-netem calibrate cable --hosts 2

    Exit status: 0 if every figure is within its bounds, 2 if one is off.
    """
    from tahq_netem.backends.choice import build_network
    from tahq_netem.measure import calibration
    from tahq_netem.network.description import profile as load

    with build_network(load(profile, hosts), backend=backend, option="--backend") as network:
        if not prints_json:
            print(f"{profile}: {hosts} hosts, made by {network.backend}, TCP is {network.congestion_control}")
        measured = calibration.calibrate(network, quick=quick)
    print(json.dumps(measured.as_dict(), allow_nan=False) if prints_json else "\n".join(measured.lines()))
    if output is not None:
        measured.write(output)
    measured.check()
    return 0


def sweep(
    sweep_yaml: Annotated[Path, _argument(metavar="SWEEP.YAML", help="The points to measure.")],
    results: Annotated[
        Path | None,
        _file_option(
            help="JSON lines, one per point; points that are in it are not measured again. Default: NAME.jsonl beside "
            "SWEEP.YAML.",
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            show_default=False,
            help="Start no point that is expected to end later than this, e.g. 30min. Default: no limit.",
        ),
    ] = None,
    debug: Debug = False,
) -> int:
    """Measure a product of networks, codecs, schedules and runtimes.

    Called again, it continues where it was interrupted.

    Example: tahq-netem sweep netem/results/four_stages.yaml --limit 30min

    Exit status: 0 if every point has a result, 1 if one failed, 2 for a mistake in the input, 3 if points are left.
    """
    try:
        limit_s = None if limit is None else parse_duration(limit)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--limit") from None
    from tahq_netem.sweep.runner import run_sweep_file

    outcome = run_sweep_file(sweep_yaml, results, limit_s)
    if outcome.num_failed:
        return 1
    return 3 if outcome.num_left else 0


def plot(
    results: Annotated[list[Path], _argument(metavar="RESULTS.JSONL", help="Results of sweeps.")],
    out: Annotated[
        Path, _file_option("--output", "--out", help="The table; plots are beside it. Default: sweep.md.")
    ] = Path("sweep.md"),
    debug: Debug = False,
) -> int:
    """Make a Markdown table and plots of sweeps' results.

    Plots need matplotlib: pip install 'tahq[plots]'.

    Example: tahq-netem plot netem/results/four_stages.jsonl --output netem/results/four_stages.md
    """
    from tahq_netem.sweep.report import plot_results

    for path in plot_results(results, out):
        print(path)
    return 0


COMMANDS = (probe, profiles, run, clean, calibrate, sweep, plot)
"""In the order in which help lists them."""


HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


def add_command(app: typer.Typer, name: str, command: Callable[..., int]) -> None:
    """Add a command, listed with the whole first sentence of its help rather than with a part that fits one line."""
    first = (command.__doc__ or "").strip().partition("\n\n")[0]
    app.command(name, short_help=" ".join(first.split()))(command)


def _netem(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def netem_app() -> typer.Typer:
    """`tahq-netem`; each command returns its exit status."""
    app = typer.Typer(
        rich_markup_mode=None,
        invoke_without_command=True,
        callback=_netem,
        help="Slow networks on this machine.",
        context_settings=HELP_OPTIONS,
    )
    for command in COMMANDS:
        add_command(app, command.__name__, command)
    return app


if __name__ == "__main__":  # where there is no tahq_launch to turn errors into lines, as in the guest of netem/vm
    sys.exit(netem_app()(sys.argv[1:] or ["--help"], prog_name="tahq-netem", standalone_mode=False))
