"""One rank of torch's own pipeline, stock or with packed stages: the program of a user of the drop-in.

    python -m dropin_rank PLAN RANK     started by bench_dropin.py, through tahq_netem's session of gloo runtimes

The plan is that of `tahq_netem.runtimes`; its configuration has all stages, of which rank r of P has r, r + P, ….
Where both codecs are raw fp32, nothing of tahq.integrations is called.
"""

import itertools
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_from_json
from tahq.data.batches import StepBatch
from tahq.integrations.torch_pipelining import compress
from tahq.models.loss import summed_cross_entropy
from tahq_netem.programs import leave_with_stdin
from tahq_netem.runtimes.gloo import Boundaries, StepLog, batches_of, join_group, optimizer_of, steps_file
from tahq_netem.sweep.stage_times import build_stage

SCHEDULES: Mapping[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}
STOCK = "raw:dtype=fp32"
DEVICE = torch.device("cpu")


class Loss:
    """A micro-batch's part of the mean loss over the step's tokens."""

    num_tokens = 1

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return summed_cross_entropy(logits, labels) / self.num_tokens


def build(config: ClusterConfig, rank: int, num_ranks: int) -> list[pipelining.PipelineStage]:
    """This rank's stages, compressed if the wire says so."""
    total = config.pipeline.stages
    stages = []
    for number in range(rank, total, num_ranks):
        module = Boundaries(build_stage(config, number, DEVICE), config, DEVICE, is_last=number == total - 1)
        stages.append(pipelining.PipelineStage(module.train(), number, total, DEVICE))
    activations, gradients = str(config.wire.activations), str(config.wire.gradients)
    if (activations, gradients) != (STOCK, STOCK):
        compress(stages, activations=activations, gradients=gradients, seed=config.run.seed)
    return stages


def take_step(
    schedule: Any, stages: list[pipelining.PipelineStage], batch: StepBatch | None, loss: Loss
) -> float | None:
    """Forward and backward; returns the step's loss on the last stage."""
    inputs: tuple[torch.Tensor, ...] = ()
    target: dict[str, Any] = {}
    losses: list[torch.Tensor] = []
    if batch is not None:
        loss.num_tokens = max(batch.num_tokens, 1)
        inputs = (batch.tokens,) if stages[0].is_first else ()
        target = {"target": batch.labels, "losses": losses} if stages[-1].is_last else {}
    schedule.step(*inputs, **target, return_outputs=False)
    return math.fsum(float(value) for value in losses) if losses else None


def main() -> None:
    """Train until stdin ends."""
    leave_with_stdin()
    plan, rank = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2])
    config, num_ranks = config_from_json(plan["config"]), len(plan["addresses"])
    torch.set_num_threads(config.run.threads or 1)
    join_group(plan["addresses"], plan["port"], rank)
    stages = build(config, rank, num_ranks)
    loss = Loss()
    is_list = plan["schedule"] == "interleaved"
    count = config.training.num_micro_batches
    schedule = SCHEDULES[plan["schedule"]](stages if is_list else stages[0], count, loss_fn=loss, scale_grads=False)
    batches = batches_of(config) if stages[0].is_first or stages[-1].is_last else None
    optimizer = optimizer_of(config, nn.ModuleList([stage.submod for stage in stages]))
    log = StepLog(Path(steps_file(rank)))
    for step in itertools.count():
        value = take_step(schedule, stages, batches.train(step) if batches is not None else None, loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.write(step, value)


if __name__ == "__main__":
    main()
