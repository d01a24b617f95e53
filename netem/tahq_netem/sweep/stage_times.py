"""The stages of a sweep, the same under every runtime: slices of the model, or slices that sleep as long.

`calibrated` times the slices in a separate process with as many threads as a worker has, and has the workers sleep for
that time. Slices are timed before any worker runs and one after another, since two that share a core slow each other.
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_from_json, config_json
from tahq.config.stage_estimate import autocast_dtype
from tahq.errors import TahqError
from tahq.models.keyed_dropout import RandomContext
from tahq.models.slice import ModelSlice, sharing_copies_of
from tahq.worker.assembly import chunk_module, resolved_spec
from tahq_netem.programs import module_argv, module_environment

REPEATS = 7
"""Timings of a stage, after two that do not count; the median counts."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of a micro-batch's forward and backward, by stage."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


def build_stage(config: ClusterConfig, stage: int, device: torch.device) -> ModelSlice:
    """A stage's module with its weights, whose output are all logits; `config` has the vocabulary's size."""
    spec = resolved_spec(config, config.model.vocab_size)
    module = chunk_module(config, spec, stage, device=device, random=RandomContext(config.run.seed))
    module.loss_chunks = 1
    return module


def calibrate(config: ClusterConfig) -> StageTimes:
    """Time every stage on this machine, one after another."""
    done = subprocess.run(
        module_argv("tahq_netem.sweep.stage_times"),
        env=module_environment(),
        input=config_json(config),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last_words = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TahqError(f"the stages could not be timed: {last_words}")
    forward_s, backward_s = zip(*json.loads(done.stdout), strict=True)
    return StageTimes(forward_s, backward_s)


def time_stage(config: ClusterConfig, stage: int, repeats: int = REPEATS) -> tuple[float, float]:
    """Median seconds of a stage's forward and backward, without the loss."""
    torch.set_num_threads(config.run.threads or 1)
    device = torch.device("cuda" if config.run.device == "auto" and torch.cuda.is_available() else config.run.device)
    module = build_stage(config, stage, device)
    with sharing_copies_of([module]):
        timings = [_time_once(config, module, device) for _ in range(repeats + 2)][2:]
    return statistics.median(f for f, _ in timings), statistics.median(b for _, b in timings)


def _time_once(config: ClusterConfig, module: ModelSlice, device: torch.device) -> tuple[float, float]:
    shape = (config.training.micro_batch, config.data.seq_len)
    if module.parts.embedding:
        x = torch.zeros(shape, dtype=torch.int64, device=device)
    else:
        x = torch.randn(*shape, module.spec.hidden_size, device=device, requires_grad=True)
    begin_s = _now(device)
    dtype = autocast_dtype(config, device)
    with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        y = module(x)
    forward_end_s = _now(device)
    y.backward(torch.full_like(y, 1e-3))
    return forward_end_s - begin_s, _now(device) - forward_end_s


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":  # time every stage of the configuration on stdin; write [forward, backward] of each
    cluster = config_from_json(sys.stdin.read())
    print(json.dumps([time_stage(cluster, number) for number in range(cluster.pipeline.stages)]))
