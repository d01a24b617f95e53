"""The commands that start workers: on this machine, over ssh, and by hand."""

import os
import shlex
from collections.abc import Mapping, Sequence

from tahq.comm.config import MachineConfig
from tahq.config.cluster import ClusterConfig
from tahq.models.families import FAMILIES
from tahq.quant import AUTO, CodecSpec
from tahq_launch.start.run_keys import PLAIN, WorkerSecret
from tahq_launch.start.stage_process import WorkerCommand

_ALWAYS = ("tahq.worker.main", "transformers.modeling_utils")
# Brings with it most of what numba imports with its first kernel.
_NUMBA = "numba.np.arraymath"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def local_command(
    stage: int, peer: str, threads: int, *, secret: WorkerSecret = PLAIN, debug: bool = False
) -> WorkerCommand:
    """The command for a worker on this machine.

    Args:
        stage: its stage.
        peer: the coordinator's host:port.
        threads: compute threads it may use.
        secret: how it receives its key.
        debug: log tracebacks and debug messages.
    """
    flags = ("--die-with-launcher", secret.flag, *(("--debug",) if debug else ()))
    argv = ("worker", "--stage", str(stage), "--peer", peer, *flags)
    env = thread_environment(threads)
    told = secret.line
    return WorkerCommand(stage, argv, where="this machine", env=env, forked_threads=threads, first_input=told)


def modules_of_workers(config: ClusterConfig) -> list[str]:
    """Modules that this run's local workers import; empty if it has none."""
    if not isinstance(config.hosts, str):
        return []
    return [*_ALWAYS, *_modeling_modules(config), *_compiler_modules(config), *_namespace_modules(config)]


def _modeling_modules(config: ClusterConfig) -> list[str]:
    family = config.model.family
    return [FAMILIES[family].modeling_module] if family else []


def _compiler_modules(config: ClusterConfig) -> list[str]:
    codecs = {CodecSpec.parse(spec).name for rungs in config.wire.rungs().values() for spec in rungs}
    uses_numba = config.pipeline.stages > 1 and config.wire.backend in (AUTO, "cpu") and codecs != {"raw"}
    return [_NUMBA] if uses_numba else []


def _namespace_modules(config: ClusterConfig) -> list[str]:
    return ["tahq_netem.backends.namespaces"] if config.hosts == "namespaces" else []


def thread_environment(threads: int) -> Mapping[str, str]:
    """Environment that limits the numerical libraries to this many threads."""
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


def threads_of_each(num_workers: int, wanted: int | None) -> int:
    """Compute threads per worker: as configured, else the usable cores divided by the workers, at least one."""
    return wanted or max(1, len(os.sched_getaffinity(0)) // num_workers)


_OPTIONS = (
    *("-o", "BatchMode=yes"),  # never ask for a password
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
)


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
    make hang-ups depend on the shell.

    Args:
        host: the machine; `host.ssh` must be set.
        stage: its stage.
        peer: the coordinator's host:port as seen from there.
        threads: compute threads it may use; None: as its libraries choose.
        secret: how it receives its key.
        debug: log tracebacks and debug messages.

    Raises:
        ValueError: the host has no ssh destination.
    """
    if host.ssh is None:
        raise ValueError(f"stage {stage} on {host.address} has no ssh destination")
    # ssh takes the first value of an option, so the user's go first.
    flags = ("--exit-with-stdin", secret.flag, *(["--debug"] if debug else []))
    argv = ("ssh", *host.ssh_options, *_OPTIONS, "--", host.ssh, _remote_script(host, stage, peer, threads, flags))
    return WorkerCommand(stage, argv, where=host.ssh, env={}, holds_stdin=True, first_input=secret.line)


def _remote_script(host: MachineConfig, stage: int, peer: str, threads: int | None, flags: Sequence[str]) -> str:
    worker = [host.python, "-m", "tahq_launch.cli", "worker", "--stage", str(stage), "--peer", peer]
    script = "exec " + shlex.join(["env", *_assignments(host, threads), *worker, *flags])
    folder = (host.workdir or "").removeprefix("~/")  # ssh starts in the login folder
    return f"cd {shlex.quote(folder)} && {script}" if folder else script


def _assignments(host: MachineConfig, threads: int | None) -> list[str]:
    limits: Mapping[str, str] = {} if threads is None else thread_environment(threads)
    return [f"{name}={value}" for name, value in {"PYTHONUNBUFFERED": "1", **limits, **host.env}.items()]


def worker_by_hand(stage: int, peer: str, *, curve: bool = True) -> str:
    """The command to type on a host that is not reached by ssh, under the same account."""
    return shlex.join(["tahq-worker", "--stage", str(stage), "--peer", peer, *([] if curve else ["--no-curve"])])
