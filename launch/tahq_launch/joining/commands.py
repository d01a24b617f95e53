"""The command lines of `invite`, `join` and `allow`.

Each function imports its implementation when it is called, so that `--help` needs no torch.
"""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from tahq.errors import UserError
from tahq_launch.command_line import (
    Advertise,
    Bind,
    Debug,
    Device,
    Overrides,
    Restarts,
    announce,
    check_worker_options,
    log_to_stderr,
    supervised,
)


def invite(
    target: Annotated[
        Path, typer.Argument(metavar="CLUSTER.YAML|RUN", help="The configuration, or a run's folder, e.g. runs/demo.")
    ],
    count: Annotated[int, typer.Option(min=1, max=256, help="Number of invites, each for one machine.")] = 1,
    expires: Annotated[str, typer.Option(metavar="TIME", help="How long they can be used, e.g. 90min.")] = "24h",
    overrides: Overrides = None,
    debug: Debug = False,
) -> int:
    """Make invites with which other people's machines join a run, before it starts or while it goes on.

    Example: tahq invite cluster.yaml --count 3
    """
    from tahq.config.file import invited_hosts, placed_errors
    from tahq.units import parse_duration
    from tahq_launch.joining.gathered_machines import configured_for_invites, print_invites
    from tahq_launch.joining.invitation import make_invites
    from tahq_launch.start.run_folder import RunFolder, members_of

    try:
        lifetime_s = parse_duration(expires)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--expires") from None
    path, changes = RunFolder(target).config if target.is_dir() else target, tuple(overrides or ())
    with placed_errors(path, changes):
        config = configured_for_invites(path, changes)
        if not (target.is_dir() or invited_hosts(path, changes)):
            raise UserError(
                "hosts: expected {invited: 3}, with the number of machines to wait for; or invite to a live RUN"
            )
        print_invites(make_invites(config, members_of(target), count, lifetime_s), lifetime_s)
    return 0


def join(
    invitation: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITE",
            help="The word that `tahq invite` printed; -: read it from stdin. Default: come back to where this "
            "account joined last, by its key.",
        ),
    ] = None,
    bind: Bind = None,
    advertise: Advertise = None,
    device: Device = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="This machine's secret key, made if missing. Default: this account's key."),
    ] = None,
    restarts: Restarts = 10,
    debug: Debug = False,
) -> int:
    """Join a run with this machine, by an invite.

    The coordinator decides which stage it gets, if any; with none it waits, and takes the stage of a lost machine.

    Example: tahq join tahq-AV8cDm…
    """
    from tahq.comm.keys import Credentials, default_key_path, read_or_make_key_file
    from tahq_launch.joining.invitation import last_joined, parse_invitation

    check_worker_options(device, bind=bind, advertise=advertise)
    given = None
    if invitation is not None:
        given = parse_invitation(sys.stdin.readline() if invitation == "-" else invitation)
    peer, coordinator = (given.address, given.coordinator) if given is not None else last_joined()
    credentials = Credentials(read_or_make_key_file(key or default_key_path()), coordinator)
    log_to_stderr(logging.DEBUG if debug else logging.INFO, is_log=False)
    logging.getLogger("tahq").info("dialling %s …", peer)

    def serve(worker_id: str, is_first: bool) -> int:
        from tahq.worker.control import WorkerOptions
        from tahq_launch.joining import member  # not before the fork: it starts threads

        options = WorkerOptions(
            stage=-1,
            peer=peer,
            bind=bind,
            advertise=advertise,
            device=device,
            worker_id=worker_id,
            takeover=is_first,
            credentials=credentials,
            stands_by=True,
            replaces_host=True,
            stage_by_key=True,
        )
        return member.serve(options, given)

    return supervised("tahq join", serve, restarts, debug=debug)


def allow(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A worker's public key, as `tahq keygen --show` prints it.")
    ],
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="The run's folder, e.g. runs/demo. Default: the only live run under runs."),
    ] = None,
    debug: Debug = False,
) -> int:
    """Admit one more key to a live run, without a restart of its coordinator.

    Example: tahq allow 5f1c0e… --run runs/demo
    """
    from tahq.comm.keys import parse_public_key
    from tahq_launch.runs.found import RUNS, writer_of
    from tahq_launch.start.run_folder import members_of

    try:
        public = parse_public_key(key)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="KEY") from None
    if run is None:
        found = [lock.parent for lock in sorted(RUNS.glob("*/.lock")) if writer_of(lock.parent) is not None]
        if len(found) != 1:
            names = ", ".join(map(str, found))
            raise UserError(
                f"--run: {f'several runs are live: {names}' if found else 'no run under runs is live'}; name one"
            )
        (run,) = found
    elif not run.is_dir():
        raise UserError(f"--run: no such folder: {run}")
    is_new = members_of(run).allow(public)
    announce(f"{run}: {public} {'may join from now on' if is_new else 'was admitted already'}")
    return 0
