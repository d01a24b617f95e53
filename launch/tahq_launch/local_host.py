"""Workers on this machine: one process a stage, its cores shared among them."""

import os
from collections.abc import Mapping

from tahq.config.cluster import ClusterConfig
from tahq.models.families import FAMILIES
from tahq.quant import AUTO, CodecSpec
from tahq_launch.run_keys import PLAIN, WorkerSecret
from tahq_launch.stage_process import WorkerCommand

_ALWAYS = ("tahq.worker.main", "transformers.modeling_utils")
# Brings with it most of what numba imports with its first kernel.
_NUMBA = "numba.np.arraymath"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def local_command(
    stage: int, peer: str, threads: int, *, secret: WorkerSecret = PLAIN, debug: bool = False
) -> WorkerCommand:
    """What starts the worker of a stage here.

    Args:
        stage: its stage.
        peer: the coordinator's host:port.
        threads: compute threads it may use.
        secret: by which it learns its key.
        debug: have it keep tracebacks and debug messages in its log.
    """
    flags = ("--die-with-launcher", secret.flag, *(("--debug",) if debug else ()))
    argv = ("worker", "--stage", str(stage), "--peer", peer, *flags)
    env = thread_environment(threads)
    told = secret.line
    return WorkerCommand(stage, argv, where="this machine", env=env, forked_threads=threads, first_input=told)


def modules_of_workers(config: ClusterConfig) -> list[str]:
    """What this run's local workers import; empty if it has none."""
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
    return ["tahq_netem.namespaces"] if config.hosts == "namespaces" else []


def thread_environment(threads: int) -> Mapping[str, str]:
    """Environment that keeps the numerical libraries to so many threads."""
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


def threads_of_each(num_workers: int, wanted: int | None) -> int:
    """Compute threads a worker: what is wanted, else the usable cores divided by the workers, at least one."""
    return wanted or max(1, len(os.sched_getaffinity(0)) // num_workers)
