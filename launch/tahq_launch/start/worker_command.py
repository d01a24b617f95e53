"""The commands that start workers: on this machine, over ssh, and by hand."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from tahq.comm.config import MachineConfig
from tahq.comm.zmq.addresses import WILDCARDS, format_address, parse_address
from tahq.config.cluster import ClusterConfig
from tahq.models.families import FAMILIES
from tahq.quant import AUTO, CodecSpec
from tahq_launch.start.run_keys import PLAIN, WorkerSecret

_ALWAYS = ("tahq.worker.main", "transformers.modeling_utils")
_NUMBA = "tahq.quant.cpu.kernel:load_numba"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_SSH_OPTIONS = (
    *("-o", "BatchMode=yes"),  # never ask for a password
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
)


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """The command that starts a worker.

    Attributes:
        argv: the program and its arguments; with `forked_threads`, the arguments of `tahq` alone.
        env: added to this process's environment.
        forked_threads: if set, the worker is a fork of a process that has everything imported, with this many torch
            threads.
        namespace: the network namespace of a forked worker; None: the launcher's.
        holds_stdin: whether its stdin is a pipe that stays open until the worker is asked to exit; else it is closed.
        first_input: the first bytes of its stdin, in both cases.
    """

    stage: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    forked_threads: int | None = None
    namespace: str | None = None
    holds_stdin: bool = False
    first_input: bytes = field(default=b"", repr=False)


def local_command(
    stage: int, peer: str, threads: int, *, secret: WorkerSecret = PLAIN, debug: bool = False
) -> WorkerCommand:
    """The command for a worker on this machine; `peer` is the coordinator's host:port."""
    flags = ("--die-with-launcher", secret.flag, *(["--debug"] if debug else []))
    argv = ("worker", "--stage", str(stage), "--peer", peer, *flags)
    env = dict.fromkeys(_THREAD_VARIABLES, str(threads))
    return WorkerCommand(stage, argv, env, forked_threads=threads, first_input=secret.line)


def local_peer(bind: str, address: str) -> str:
    """Address that local workers dial: loopback if the coordinator binds all addresses, else the bound address."""
    host, _ = parse_address(bind, "run.bind")
    _, port = parse_address(address, "coordinator")
    return format_address("127.0.0.1" if host in WILDCARDS else host, port)


def modules_of_workers(config: ClusterConfig) -> list[str]:
    """Modules that this run's local workers import, or functions (``module:function``); empty if it has none."""
    if not config.local_stages:
        return []
    family = config.model.family
    codecs = {CodecSpec.parse(spec).name for rungs in config.wire.rungs().values() for spec in rungs}
    uses_numba = config.pipeline.stages > 1 and config.wire.backend in (AUTO, "cpu") and codecs != {"raw"}
    return [
        *_ALWAYS,
        *([FAMILIES[family].modeling_module] if family else []),
        *([_NUMBA] if uses_numba else []),
        *(["tahq_netem.backends.namespaces"] if config.hosts == "namespaces" else []),
    ]


def ssh_command(
    host: MachineConfig,
    stage: int,
    peer: str,
    *,
    threads: int | None = None,
    secret: WorkerSecret = PLAIN,
    debug: bool = False,
) -> WorkerCommand:
    """The command for a worker on another machine, through the system's OpenSSH client.

    The worker runs in the foreground of the connection: its log comes back over it, and when the connection ends, so
    does its stdin, and it exits (`worker_lifetime.exit_with_stdin`). No terminal is requested: it would mangle logs and
    make hang-ups depend on the shell. `host.ssh` must be set; without `threads` the worker's libraries choose.
    """
    limits = {} if threads is None else dict.fromkeys(_THREAD_VARIABLES, str(threads))
    flags = ("--exit-with-stdin", secret.flag, *(["--debug"] if debug else []))
    argv = ssh_argv(host, ("worker", "--stage", str(stage), "--peer", peer, *flags), limits)
    return WorkerCommand(stage, argv, {}, holds_stdin=True, first_input=secret.line)


def ssh_argv(
    host: MachineConfig, command: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """ssh with its arguments for a command of `tahq` on a host, in its working folder and with these variables."""
    env = [f"{name}={value}" for name, value in {"PYTHONUNBUFFERED": "1", **variables, **host.env}.items()]
    return ssh_in_folder(host, "exec " + shlex.join(["env", *env, host.python, "-m", "tahq_launch.cli", *command]))


def ssh_in_folder(host: MachineConfig, script: str) -> tuple[str, ...]:
    """ssh with its arguments for a script of the login shell on a host, in its working folder."""
    folder = (host.workdir or "").removeprefix("~/")  # ssh starts in the login folder
    if folder:
        script = f"cd {shlex.quote(folder)} && {script}"
    return ssh_script(host, script)


def ssh_script(host: MachineConfig, script: str) -> tuple[str, ...]:
    """ssh with its arguments for a script of the login shell on a host, in the login folder."""
    # ssh takes the first value of an option, so the user's go first.
    return ("ssh", *host.ssh_options, *_SSH_OPTIONS, "--", str(host.ssh), script)


def worker_by_hand(stage: int, peer: str, *, curve: bool = True) -> str:
    """The command to type on a host that is not reached by ssh, with the coordinator's account key."""
    return shlex.join(["tahq-worker", "--stage", str(stage), "--peer", peer, *([] if curve else ["--no-curve"])])
