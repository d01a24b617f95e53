"""Workers on other machines, through the system's OpenSSH client; nothing of ours listens there.

The worker runs in the foreground of the connection: its log comes back over it, and when the
connection ends, for whatever reason, its stdin ends and it leaves (`parent_watch.exit_with_stdin`). The first line
on its stdin is its key.
No terminal is asked for: with one, logs would be mangled and a hang-up would depend on the shell.
"""

import shlex
from collections.abc import Mapping, Sequence

from tahq.comm.config import HostConfig
from tahq_launch.local_host import thread_environment
from tahq_launch.run_keys import PLAIN, WorkerSecret
from tahq_launch.stage_process import WorkerCommand

_OPTIONS = (
    *("-o", "BatchMode=yes"),  # never ask: there is nobody to answer
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
)


def ssh_command(
    host: HostConfig,
    stage: int,
    peer: str,
    *,
    threads: int | None = None,
    secret: WorkerSecret = PLAIN,
    debug: bool = False,
) -> WorkerCommand:
    """What starts the worker of a stage on the host that an ssh destination leads to.

    Args:
        host: the machine; `host.ssh` must be set.
        stage: its stage.
        peer: the coordinator's host:port as seen from there.
        threads: compute threads it may use; None: as its libraries choose.
        secret: by which it learns its key.
        debug: have it keep tracebacks and debug messages in its log.

    Raises:
        ValueError: the host has no ssh destination.
    """
    if host.ssh is None:
        raise ValueError(f"stage {stage} on {host.address} has no ssh destination")
    # ssh takes the first value of an option, so the user's go first.
    flags = ("--exit-with-stdin", secret.flag, *(["--debug"] if debug else []))
    argv = ("ssh", *host.ssh_options, *_OPTIONS, "--", host.ssh, _remote_script(host, stage, peer, threads, flags))
    return WorkerCommand(stage, argv, where=host.ssh, env={}, holds_stdin=True, first_input=secret.line)


def _remote_script(host: HostConfig, stage: int, peer: str, threads: int | None, flags: Sequence[str]) -> str:
    worker = [host.python, "-m", "tahq_launch.cli", "worker", "--stage", str(stage), "--peer", peer]
    script = "exec " + shlex.join(["env", *_assignments(host, threads), *worker, *flags])
    folder = (host.workdir or "").removeprefix("~/")  # ssh starts in the login folder
    return f"cd {shlex.quote(folder)} && {script}" if folder else script


def _assignments(host: HostConfig, threads: int | None) -> list[str]:
    limits: Mapping[str, str] = {} if threads is None else thread_environment(threads)
    return [f"{name}={value}" for name, value in {"PYTHONUNBUFFERED": "1", **limits, **host.env}.items()]


def worker_by_hand(stage: int, peer: str, *, curve: bool = True) -> str:
    """The command that a person of this account types on a host that is not reached by ssh."""
    return shlex.join(["tahq-worker", "--stage", str(stage), "--peer", peer, *([] if curve else ["--no-curve"])])
