"""The engine of one stage: executes the actions of its schedule as frames arrive.

Invariants:
- actions run in schedule order; an action waits for its frame and for nothing else;
- gradients of micro-batches are accumulated in ascending order (the schedule guarantees it);
- gradients are multiplied by `StepShape.gradient_scale` on the wire and off it until the last backward has run;
- weights are touched by nobody here: a step ends with gradients, `update.py` applies the commit;
- a micro-batch's graph is freed when its backward has run.

Shapes: B samples a micro-batch, S tokens, C channels, V words.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tahq.comm.frame import Direction, Purpose
from tahq.data.batches import BatchSource, StepBatch
from tahq.data.sample_order import SampleOrder
from tahq.errors import ScheduleError
from tahq.models.keyed_dropout import RandomContext
from tahq.models.slice import ModelSlice
from tahq.pipeline.boundary import BOUNDARY_DTYPE, Boundary, Stopwatch
from tahq.pipeline.gradients import scale_gradients
from tahq.pipeline.loss import gradient_scale, summed_cross_entropy
from tahq.pipeline.schedule import Action, ActionKind
from tahq.pipeline.tie import TiedEmbedding


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of the model with the cuts on either side; None at the ends of the model."""

    module: ModelSlice
    incoming: Boundary | None
    outgoing: Boundary | None


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that every step has in common."""

    num_micro_batches: int
    micro_batch: int
    seq_len: int
    hidden_size: int

    @property
    def boundary(self) -> tuple[int, int, int]:
        """[B, S, C] of what crosses a cut."""
        return (self.micro_batch, self.seq_len, self.hidden_size)

    @property
    def gradient_scale(self) -> float:
        """See `loss.gradient_scale`; here by the tokens that go in, labelled or not."""
        return gradient_scale(self.num_micro_batches * self.micro_batch * self.seq_len)


@dataclass(slots=True)
class StepResult:
    """What a stage knows after its part of a step.

    `loss_sum` (nats) and `tokens` are known by the last stage, `batch_digest` by first and last.
    """

    finite: bool = True
    loss_sum: float | None = None
    tokens: int | None = None
    batch_digest: str = ""
    timing: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Validation loss summed over `tokens`, in nats; known by the last stage."""

    tokens: int
    loss_sum: float
    raw_loss_sum: float


class StageEngine:
    """Runs the chunks of one stage.

    Args:
        chunks: the stage's pieces of the model, by chunk number.
        actions: this stage's row of the schedule.
        shape: sizes of a step.
        batches: where token and label tensors come from; None for a stage that needs none.
        order: which samples a micro-batch is made of; None where no codec remembers samples.
        random: told which micro-batch is being computed, for dropout.
        device: where the chunks live.
        bf16: compute under bf16 autocast.
        stopwatch: shared with the boundaries.
        tied: exchanges the gradients of tied embeddings, if they are kept in step.
        on_action: called before each action (step, action); raises to leave.
    """

    def __init__(
        self,
        *,
        chunks: dict[int, Chunk],
        actions: Sequence[Action],
        shape: StepShape,
        batches: BatchSource | None,
        order: SampleOrder | None = None,
        random: RandomContext,
        device: torch.device,
        bf16: bool = False,
        stopwatch: Stopwatch | None = None,
        tied: TiedEmbedding | None = None,
        on_action: Callable[[int, Action], None] | None = None,
    ) -> None:
        self._chunks = chunks
        self._actions = actions
        self._shape = shape
        self._batches = batches
        self._order = order
        self._random = random
        self._device = device
        self._bf16 = bf16
        self._stopwatch = stopwatch or Stopwatch()
        self._tied = tied
        self._on_action = on_action
        self._in_flight: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._step = 0
        self._batch: StepBatch | None = None
        self._sample_ids: list[list[int]] | None = None
        self._finite = True
        self._losses: list[torch.Tensor] = []
        self._held_out: tuple[int, StepBatch] | None = None

    def run_step(self, step: int) -> StepResult:
        """Forward and backward of every micro-batch of a step; leaves summed gradients behind.

        Raises:
            PeerLostError, RemoteProtocolError, CodecError: from the links.
        """
        self._begin(step)
        self._scale_gradients(self._shape.gradient_scale)  # of steps before, which nobody has taken
        self._post_receives()
        for action in self._actions:
            if self._on_action is not None:
                self._on_action(step, action)
            self._execute(action)
        self._scale_gradients(1 / self._shape.gradient_scale)
        if self._tied is not None:
            with self._stopwatch.measure("tie"):
                self._tied.exchange(step)
        return self._result()

    def evaluate(self, step: int, num_batches: int) -> EvaluationResult | None:
        """Validation loss of the present weights, with the wire's codec and without.

        Returns:
            The sums on the last stage, None elsewhere.
        """
        sums = {
            purpose: self._evaluate_with(purpose, step, num_batches) for purpose in (Purpose.EVAL, Purpose.EVAL_RAW)
        }
        if self._last_chunk() is None:
            return None
        tokens = sum(self._validation(index).num_tokens for index in range(num_batches))
        return EvaluationResult(tokens, sums[Purpose.EVAL], sums[Purpose.EVAL_RAW])

    # -- one step --------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        self._step = step
        self._finite = True
        self._losses = []
        self._in_flight.clear()
        with self._stopwatch.measure("data"):
            self._batch = self._batches.train(step) if self._batches is not None else None
            self._sample_ids = self._order.micro_batches(step) if self._order is not None else None
        for chunk in self._chunks.values():
            chunk.module.train()

    def _scale_gradients(self, factor: float) -> None:
        for chunk in self._chunks.values():
            scale_gradients(chunk.module.parameters(), factor)

    def _post_receives(self) -> None:
        every = range(self._shape.num_micro_batches)
        for chunk in self._chunks.values():
            if chunk.incoming is not None:
                chunk.incoming.post(self._step, Purpose.TRAIN, Direction.FORWARD, every, self._shape.boundary)
            if chunk.outgoing is not None:
                chunk.outgoing.post(self._step, Purpose.TRAIN, Direction.BACKWARD, every, self._shape.boundary)

    def _execute(self, action: Action) -> None:
        if action.kind is ActionKind.F:
            self._forward(action.chunk, action.micro_batch)
        elif action.kind is ActionKind.B:
            self._backward(action.chunk, action.micro_batch)
        else:
            raise ScheduleError(f"action {action}: this engine computes F and B, not {action.kind.name}")

    def _forward(self, number: int, micro_batch: int) -> None:
        chunk = self._chunks[number]
        x = self._input(chunk, micro_batch)
        if chunk.incoming is not None:
            x.requires_grad_()
        self._random.at(self._step, 0, micro_batch, int(Purpose.TRAIN))
        with self._stopwatch.measure("forward"):
            y = self._compute(chunk, x)
            if chunk.outgoing is None:
                y = self._loss(y, micro_batch)
        self._in_flight[number, micro_batch] = (x, y)
        if chunk.outgoing is not None:
            self._send(chunk.outgoing, Direction.FORWARD, micro_batch, y.detach())

    def _backward(self, number: int, micro_batch: int) -> None:
        chunk = self._chunks[number]
        x, y = self._in_flight.pop((number, micro_batch))
        gradient = None
        if chunk.outgoing is not None:
            gradient = self._receive(chunk.outgoing, Direction.BACKWARD, micro_batch, y.dtype)
        with self._stopwatch.measure("backward"):
            y.backward(gradient)  # type: ignore[no-untyped-call]
        if chunk.incoming is not None:
            if x.grad is None:
                raise AssertionError("backward left no gradient on the received activation")
            self._send(chunk.incoming, Direction.BACKWARD, micro_batch, x.grad)

    def _input(self, chunk: Chunk, micro_batch: int) -> torch.Tensor:
        if chunk.incoming is None:
            tokens, _ = self._train_batch().micro_batch(micro_batch)
            return tokens.to(self._device, non_blocking=True)
        return self._receive(chunk.incoming, Direction.FORWARD, micro_batch, BOUNDARY_DTYPE)

    def _loss(self, logits: torch.Tensor, micro_batch: int) -> torch.Tensor:
        batch = self._train_batch()
        _, labels = batch.micro_batch(micro_batch)
        loss = summed_cross_entropy(logits, labels.to(self._device, non_blocking=True))
        self._losses.append(loss.detach())
        return loss / (max(batch.num_tokens, 1) / self._shape.gradient_scale)

    def _send(self, boundary: Boundary, direction: Direction, micro_batch: int, tensor: torch.Tensor) -> None:
        ids = self._ids_of(micro_batch)
        self._finite &= boundary.send(self._step, Purpose.TRAIN, direction, micro_batch, tensor, ids)

    def _receive(self, boundary: Boundary, direction: Direction, micro_batch: int, dtype: torch.dtype) -> torch.Tensor:
        shape, ids = self._shape.boundary, self._ids_of(micro_batch)
        return boundary.receive(self._step, Purpose.TRAIN, direction, micro_batch, shape, dtype, ids)

    def _ids_of(self, micro_batch: int) -> list[int] | None:
        return self._sample_ids[micro_batch] if self._sample_ids is not None else None

    def _compute(self, chunk: Chunk, x: torch.Tensor) -> torch.Tensor:
        if self._bf16:
            with torch.autocast(self._device.type, torch.bfloat16):
                y = chunk.module(x)
        else:
            y = chunk.module(x)
        if not isinstance(y, torch.Tensor):
            raise AssertionError(f"a model slice returned {type(y).__name__}")
        return y if chunk.outgoing is None else y.float()

    def _result(self) -> StepResult:
        result = StepResult(finite=self._finite, timing=self._stopwatch.take())
        if self._batch is not None:
            result.batch_digest = self._batch.digest
        if self._losses:
            result.loss_sum = math.fsum(torch.stack(self._losses).tolist())
            result.tokens = self._train_batch().num_tokens
        return result

    def _train_batch(self) -> StepBatch:
        if self._batch is None:
            raise AssertionError("first and last stage need a batch source")
        return self._batch

    # -- validation ------------------------------------------------------------------------------

    @torch.no_grad()
    def _evaluate_with(self, purpose: Purpose, step: int, num_batches: int) -> float:
        every = range(num_batches * self._shape.num_micro_batches)
        for chunk in self._chunks.values():
            chunk.module.eval()
            if chunk.incoming is not None:
                chunk.incoming.post(step, purpose, Direction.FORWARD, every, self._shape.boundary)
        losses = [self._evaluate_micro_batch(purpose, step, index) for index in every]
        return sum(losses)

    def _evaluate_micro_batch(self, purpose: Purpose, step: int, index: int) -> float:
        batch_index, micro_batch = divmod(index, self._shape.num_micro_batches)
        loss = 0.0
        for number in sorted(self._chunks):
            chunk = self._chunks[number]
            if chunk.incoming is None:
                x = self._validation(batch_index).micro_batch(micro_batch)[0].to(self._device)
            else:
                x = chunk.incoming.receive(step, purpose, Direction.FORWARD, index, self._shape.boundary)
            y = self._compute(chunk, x)
            if chunk.outgoing is not None:
                chunk.outgoing.send(step, purpose, Direction.FORWARD, index, y)
            else:
                labels = self._validation(batch_index).micro_batch(micro_batch)[1].to(self._device)
                loss = float(summed_cross_entropy(y, labels))
        return loss

    def _validation(self, index: int) -> StepBatch:
        """A batch of the validation split; the last one asked for is kept."""
        if self._batches is None:
            raise AssertionError("first and last stage need a batch source")
        if self._held_out is None or self._held_out[0] != index:
            self._held_out = (index, self._batches.validation(index))
        return self._held_out[1]

    def _last_chunk(self) -> Chunk | None:
        return next((chunk for chunk in self._chunks.values() if chunk.outgoing is None), None)
