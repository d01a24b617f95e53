"""A bare asynchronous loop over gloo, as a control: overlap of compute and transfer, and nothing else.

All receives of a step are posted before it begins, sends are awaited only at its end, and actions are computed in
schedule order as their tensors arrive. There is no session, resend, commit or codec, so the difference from this loop
is the cost of tahq's machinery. `GlooSession` starts it with PLAN RANK.
"""

import itertools
import sys

import torch
from torch import distributed

from tahq.data.batches import StepBatch
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import Action, ActionKind
from tahq_netem.runtimes.gloo import StagePart, join

DEEP = "1f1b-deep"
Pending = tuple[distributed.Work, torch.Tensor]


def actions_of(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    """A stage's row: one of tahq's schedules, or 1F1B with 2(P − r) − 1 micro-batches in flight."""
    if schedule != DEEP:
        return generate(schedule, num_stages, num_micro_batches).actions[stage]
    warm_up = min(num_micro_batches, 2 * (num_stages - stage) - 1)
    forwards = [Action(stage, ActionKind.F, index) for index in range(num_micro_batches)]
    backwards = [Action(stage, ActionKind.B, index) for index in range(num_micro_batches)]
    alternating = itertools.zip_longest(backwards, forwards[warm_up:])
    return (*forwards[:warm_up], *(action for pair in alternating for action in pair if action is not None))


class BareLoop:
    """One stage's loop."""

    def __init__(self, part: StagePart) -> None:
        self.part = part
        self._count = part.config.training.num_micro_batches
        self._actions = actions_of(part.schedule, part.rank, part.config.pipeline.stages, self._count)
        self._activations: list[Pending] = []
        self._gradients: list[Pending] = []
        self._sends: list[Pending] = []
        self._in_flight: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run_step(self, step: int) -> list[torch.Tensor]:
        """Forward and backward of a step; returns the micro-batches' losses on the last stage."""
        batch = self.part.batches.train(step) if self.part.batches is not None else None
        losses: list[torch.Tensor] = []
        part, count = self.part, range(self._count)
        self._activations = [] if part.is_first else [self._receive(part.rank - 1, 2 * i) for i in count]
        self._gradients = [] if part.is_last else [self._receive(part.rank + 1, 2 * i + 1) for i in count]
        for action in self._actions:
            if action.kind is ActionKind.F:
                self._forward(action.micro_batch, batch, losses)
            else:
                self._backward(action.micro_batch)
        for work, _ in self._sends:  # the tensors are held until then
            work.wait()
        self._sends.clear()
        return losses

    def _receive(self, peer: int, tag: int) -> Pending:
        tensor = torch.empty(self.part.boundary)
        return _checked(distributed.irecv(tensor, peer, tag=tag)), tensor

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        tensor = tensor.detach().contiguous()
        self._sends.append((_checked(distributed.isend(tensor, peer, tag=tag)), tensor))

    def _forward(self, index: int, batch: StepBatch | None, losses: list[torch.Tensor]) -> None:
        x = self._input(index, batch)
        y: torch.Tensor = self.part.module(x)
        if self.part.is_last:
            assert batch is not None
            y = self.part.loss(y, batch.micro_batch(index)[1], batch.num_tokens)
            losses.append(y.detach())
        else:
            self._send(y, self.part.rank + 1, 2 * index)
        self._in_flight[index] = x, y

    def _input(self, index: int, batch: StepBatch | None) -> torch.Tensor:
        if self.part.is_first and batch is not None:
            return batch.micro_batch(index)[0]
        work, x = self._activations[index]
        work.wait()
        return x.requires_grad_()

    def _backward(self, index: int) -> None:
        x, y = self._in_flight.pop(index)
        gradient = None
        if not self.part.is_last:
            work, gradient = self._gradients[index]
            work.wait()
        y.backward(gradient)  # type: ignore[no-untyped-call]
        if not self.part.is_first:
            assert x.grad is not None
            self._send(x.grad, self.part.rank - 1, 2 * index + 1)


def _checked(work: distributed.Work | None) -> distributed.Work:
    assert work is not None, "gloo gives a handle for every transfer"
    return work


if __name__ == "__main__":
    stage_part = join(sys.argv)
    stage_part.train(BareLoop(stage_part).run_step)
