"""Workers on this machine: one process a stage, its cores shared among them."""

import os
import sys
from collections.abc import Mapping

from tahq_launch.stage_process import WorkerCommand

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def local_command(stage: int, peer: str, threads: int, *, debug: bool = False) -> WorkerCommand:
    """What starts the worker of a stage here.

    Args:
        stage: its stage.
        peer: the coordinator's host:port.
        threads: compute threads it may use.
        debug: have it keep tracebacks and debug messages in its log.
    """
    argv = (sys.executable, "-m", "tahq_launch.cli", "worker", "--stage", str(stage), "--peer", peer)
    flags = ("--die-with-parent", str(os.getpid()), *(("--debug",) if debug else ()))
    return WorkerCommand(stage, argv + flags, where="this machine", env=thread_environment(threads))


def thread_environment(threads: int) -> Mapping[str, str]:
    """Environment that keeps the numerical libraries to so many threads."""
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


def threads_of_each(num_workers: int, wanted: int | None) -> int:
    """Compute threads a worker: what is wanted, else the usable cores divided by the workers, at least one."""
    return wanted or max(1, len(os.sched_getaffinity(0)) // num_workers)
