"""A bare asynchronous loop over gloo, as a control: overlap of compute and transfer, and nothing else.

All receives of a step are posted before it begins, sends are awaited only at its end, and actions are computed in
schedule order as their tensors arrive. There is no session, resend, commit or codec, so the difference from this loop
is the cost of tahq's machinery.

Run by the sweep:  python -m tahq_netem.runtimes.bare_async PLAN RANK
"""

import itertools
import sys
from dataclasses import dataclass, field

import torch
from torch import distributed

from tahq.data.batches import StepBatch
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import Action, ActionKind
from tahq_netem.runtimes.gloo_session import GlooSession
from tahq_netem.runtimes.gloo_stage import StagePart, join
from tahq_netem.runtimes.session import Session, SessionRequest

DEEP = "1f1b-deep"
Pending = tuple[distributed.Work, torch.Tensor]


def start_bare(request: SessionRequest) -> Session:
    """Start one process per stage (on the sweep's side)."""
    return GlooSession(request, "tahq_netem.runtimes.bare_async")


def actions_of(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    """A stage's row: one of tahq's schedules, or 1F1B with 2(P − r) − 1 micro-batches in flight."""
    if schedule != DEEP:
        return generate(schedule, num_stages, num_micro_batches).actions[stage]
    warm_up = min(num_micro_batches, 2 * (num_stages - stage) - 1)
    forwards = [Action(stage, ActionKind.F, index) for index in range(num_micro_batches)]
    backwards = [Action(stage, ActionKind.B, index) for index in range(num_micro_batches)]
    alternating = itertools.zip_longest(backwards, forwards[warm_up:])
    return (*forwards[:warm_up], *(action for pair in alternating for action in pair if action is not None))


@dataclass
class BareLoop:
    """One stage's loop."""

    part: StagePart
    _activations: list[Pending] = field(default_factory=list)
    _gradients: list[Pending] = field(default_factory=list)
    _sends: list[Pending] = field(default_factory=list)
    _in_flight: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.part.config
        count = config.training.num_micro_batches
        self._actions = actions_of(self.part.schedule, self.part.rank, config.pipeline.stages, count)

    def run_step(self, step: int) -> list[torch.Tensor]:
        """Forward and backward of a step; returns the micro-batches' losses on the last stage."""
        batch = self.part.batches.train(step) if self.part.batches is not None else None
        losses: list[torch.Tensor] = []
        self._post_receives()
        for action in self._actions:
            if action.kind is ActionKind.F:
                self._forward(action.micro_batch, batch, losses)
            else:
                self._backward(action.micro_batch)
        for work, _ in self._sends:  # the tensors are held until then
            work.wait()
        self._sends.clear()
        return losses

    def _post_receives(self) -> None:
        count, part = self.part.config.training.num_micro_batches, self.part
        self._activations = [] if part.is_first else [self._receive(part.rank - 1, 2 * i) for i in range(count)]
        self._gradients = [] if part.is_last else [self._receive(part.rank + 1, 2 * i + 1) for i in range(count)]

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
            if batch is None:
                raise AssertionError("the last stage has a batch")
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
            if x.grad is None:
                raise AssertionError("backward left no gradient on the received activation")
            self._send(x.grad, self.part.rank - 1, 2 * index + 1)


def _checked(work: distributed.Work | None) -> distributed.Work:
    if work is None:
        raise AssertionError("gloo gives a handle for every transfer")
    return work


def main() -> None:
    """Train until the end of stdin."""
    part = join(sys.argv)
    loop = BareLoop(part)
    for step in itertools.count():
        part.finish_step(step, loop.run_step(step))


if __name__ == "__main__":
    main()
