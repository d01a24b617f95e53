"""torch.distributed.pipelining over gloo, used as its documentation says: the usual alternative to tahq.

`1f1b-runtime` is 1F1B in `_PipelineScheduleRuntime`, which runs torch's other schedules and waits for sends only at the
end of a step. It has no public interface for custom schedules; a torch with another private one is refused. Nothing is
compressed. Unlike in tahq, no gradient norm is computed over the stages. `GlooSession` starts it with PLAN RANK.
"""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from tahq.errors import TahqError
from tahq.pipeline.schedule.generators import generate
from tahq_netem.runtimes.gloo import StagePart, join


def _one_f_one_b_in_the_runtime(stage: pipelining.PipelineStage, count: int, **options: Any) -> Any:
    """1F1B as a list of actions, to which torch adds sends and receives."""
    try:
        runtime: Any = schedules._PipelineScheduleRuntime([stage], count, **options)  # type: ignore[no-untyped-call]
        rows = enumerate(generate("1f1b", stage.num_stages, count).actions)
        actions = {rank: [schedules._Action.from_str(str(action)) for action in row] for rank, row in rows}
        runtime._prepare_schedule_with_comms(actions)
    except (AttributeError, TypeError) as error:
        raise TahqError(
            f"torch {torch.__version__} has no runtime for schedules that is known here: {error}"
        ) from error
    return runtime


SCHEDULES: Mapping[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "1f1b-runtime": _one_f_one_b_in_the_runtime,
}


class TorchPipeline:
    """One stage under torch's schedule."""

    def __init__(self, part: StagePart) -> None:
        self._part = part
        config = part.config
        self._num_tokens = 1
        stage = pipelining.PipelineStage(part.module, part.rank, config.pipeline.stages, torch.device("cpu"))
        # A stage without a loss function would take it that there is no backward pass. The loss is divided by the
        # step's tokens, so gradients are not to be divided by the micro-batches.
        count = config.training.num_micro_batches
        self._schedule = SCHEDULES[part.schedule](stage, count, loss_fn=self._loss, scale_grads=False)
        takes = inspect.signature(self._schedule.step).parameters
        self._options = {"return_outputs": False} if "return_outputs" in takes else {}

    def run_step(self, step: int) -> list[torch.Tensor]:
        """Forward and backward of a step; returns the micro-batches' losses on the last stage."""
        losses: list[torch.Tensor] = []
        part = self._part
        if part.batches is None:
            self._schedule.step(**self._options)
            return losses
        batch = part.batches.train(step)
        self._num_tokens = batch.num_tokens
        if part.is_first:
            self._schedule.step(batch.tokens, **self._options)
        else:
            self._schedule.step(target=batch.labels, losses=losses, **self._options)
        return losses

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._part.loss(logits, labels, self._num_tokens)


if __name__ == "__main__":
    stage_part = join(sys.argv)
    stage_part.train(TorchPipeline(stage_part).run_step)
