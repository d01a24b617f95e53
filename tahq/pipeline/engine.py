"""The engine of one stage: executes the actions of its schedule as frames arrive.

Invariants:
- actions run in schedule order; an action waits for its frame and for nothing else;
- what it sends is encoded by a lane beside it (`codec_lanes.py`), and what it receives was decoded there;
- gradients of micro-batches are accumulated in ascending order (the schedule guarantees it);
- gradients are multiplied by `StepShape.gradient_scale` on the wire and off it until the last backward has run;
- weights are touched by nobody here: a step ends with gradients, `update.py` applies the commit;
- a backward, or the input gradient of a split one, frees what was kept for it; the empty graph goes beside the next.

Shapes: B samples a micro-batch, S tokens, C channels, V words.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from tahq.comm.link.frame import Direction, Purpose
from tahq.data.batches import BatchSource, StepBatch
from tahq.data.sample_order import SampleOrder
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.keyed_dropout import RandomContext
from tahq.models.slice import sharing_copies_of
from tahq.pipeline.boundary import BOUNDARY_DTYPE, Boundary
from tahq.pipeline.chunk import Chunk, StepShape
from tahq.pipeline.codec_lanes import CodecLanes, InlineLanes, Receive
from tahq.pipeline.loss import summed_cross_entropy
from tahq.pipeline.schedule.schedule import Action, ActionKind
from tahq.pipeline.spans import Stopwatch
from tahq.pipeline.tie import TiedEmbedding
from tahq.pipeline.update.gradients import scale_gradients
from tahq.pipeline.validation_pass import EvaluationResult, ValidationPass


@dataclass(slots=True)
class StepResult:
    """What a stage knows after its part of a step.

    `loss_sum` (nats) and `tokens` are known by the last stage, `batch_digest` by first and last. `peak_in_flight` is
    the most (chunk, micro-batch) pairs whose activations were held at once.
    """

    finite: bool = True
    loss_sum: float | None = None
    tokens: int | None = None
    batch_digest: str = ""
    peak_in_flight: int = 0
    timing: dict[str, float] = field(default_factory=dict)


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
        on_step: called with each step's number before it is computed.
        lanes: where encoding and decoding are done; None: in the compute loop.
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
        on_step: Callable[[int], None] | None = None,
        lanes: CodecLanes | None = None,
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
        self._on_step = on_step
        self._lanes = lanes or InlineLanes(self._stopwatch)
        self._in_flight: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._step = 0
        self._batch: StepBatch | None = None
        self._sample_ids: list[list[int]] | None = None
        self._finite = True
        self._peak_in_flight = 0
        self._losses: list[torch.Tensor] = []
        self._spent: torch.Tensor | None = None
        self._deferred: dict[tuple[int, int], DeferredGradients] = {}
        self._split = {(action.chunk, action.micro_batch) for action in actions if action.kind is ActionKind.I}
        self._held_up = held_up_by_depth(
            actions, {number for number, chunk in chunks.items() if chunk.incoming is None}
        )
        self._validation = ValidationPass(chunks, shape, batches, device, bf16=bf16)

    def run_step(self, step: int) -> StepResult:
        """Forward and backward of every micro-batch of a step; leaves summed gradients behind.

        Raises:
            PeerLostError, RemoteProtocolError, CodecError: from the links.
        """
        self._begin(step)
        self._scale_gradients(self._shape.gradient_scale)  # of steps before, which nobody has taken
        self._post_receives()
        self._lanes.begin(map(self._receive, filter(self._is_receiving, self._actions)))
        with sharing_copies_of(chunk.module for chunk in self._chunks.values()):
            for action in self._actions:
                if self._on_action is not None:
                    self._on_action(step, action)
                self._execute(action)
        self._spent = None
        self._finite = self._lanes.finish()
        self._scale_gradients(1 / self._shape.gradient_scale)
        if self._tied is not None:
            self._tied.exchange(step)
        return self._result()

    @property
    def batch(self) -> StepBatch | None:
        """The samples of the step computed last; None on a stage that reads none."""
        return self._batch

    def evaluate(self, step: int, num_batches: int) -> EvaluationResult | None:
        """Validation loss of the present weights, with the wire's codec and without.

        Returns:
            The sums on the last stage, None elsewhere.
        """
        return self._validation.run(step, num_batches)

    # -- one step --------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        self._step = step
        if self._on_step is not None:
            self._on_step(step)
        self._finite = True
        self._losses = []
        self._in_flight.clear()
        self._deferred.clear()
        self._spent = None
        self._peak_in_flight = 0
        with self._stopwatch.measure("data"):
            self._batch = self._batches.train(step) if self._batches is not None else None
            self._sample_ids = self._order.micro_batches(step) if self._order is not None else None
        for chunk in self._chunks.values():
            chunk.module.train()

    def _scale_gradients(self, factor: float) -> None:
        for chunk in self._chunks.values():
            scale_gradients(chunk.gradient_holders(), factor)

    def _post_receives(self) -> None:
        every = range(self._shape.num_micro_batches)
        for chunk in self._chunks.values():
            if chunk.incoming is not None:
                chunk.incoming.post(self._step, Purpose.TRAIN, Direction.FORWARD, every, self._shape.boundary)
            if chunk.outgoing is not None:
                chunk.outgoing.post(self._step, Purpose.TRAIN, Direction.BACKWARD, every, self._shape.boundary)

    def _execute(self, action: Action) -> None:
        if action.kind is ActionKind.F:
            self._forward(action)
        elif action.kind is ActionKind.W:
            self._weight_gradients(action)
        else:
            self._backward(action)

    def _forward(self, action: Action) -> None:
        number, micro_batch = action.chunk, action.micro_batch
        chunk = self._chunks[number]
        x = self._input(chunk, micro_batch)
        chunk.module.deferred = self._deferral(number, micro_batch)
        self._random.at(self._step, 0, micro_batch, int(Purpose.TRAIN))
        with self._stopwatch.measure("forward", action):
            y = chunk.compute(x, bf16=self._bf16)
            if chunk.outgoing is None:
                y = self._loss(y, micro_batch)
        self._in_flight[number, micro_batch] = (x, y)
        held = self._in_flight.keys() | self._deferred.keys()
        self._peak_in_flight = max(self._peak_in_flight, len(held))
        if chunk.outgoing is not None:
            self._send(chunk.outgoing, Direction.FORWARD, micro_batch, y.detach())

    def _backward(self, action: Action) -> None:
        number, micro_batch = action.chunk, action.micro_batch
        chunk = self._chunks[number]
        x, y = self._in_flight.pop((number, micro_batch))
        gradient = self._lanes.take() if chunk.outgoing is not None else None
        self._drop_spent()
        with self._stopwatch.measure("backward" if action.kind is ActionKind.B else "input_gradient", action):
            y.backward(gradient)  # type: ignore[no-untyped-call]
        if chunk.incoming is not None:
            if x.grad is None:
                raise AssertionError("backward left no gradient on the received activation")
            self._send(chunk.incoming, Direction.BACKWARD, micro_batch, x.grad)
        self._spent = y

    def _drop_spent(self) -> None:
        """Have the graph of the backward before taken apart while the next one runs, for which Python is not needed."""
        if self._spent is not None:
            self._lanes.drop(self._spent)
            self._spent = None

    def _deferral(self, number: int, micro_batch: int) -> DeferredGradients | None:
        """Where a forward leaves what a split backward computes last; None for a whole one."""
        if (number, micro_batch) not in self._split:
            return None
        return self._deferred.setdefault((number, micro_batch), DeferredGradients())

    def _weight_gradients(self, action: Action) -> None:
        with self._stopwatch.measure("weight_gradient", action):
            self._deferred.pop((action.chunk, action.micro_batch)).run()

    def _input(self, chunk: Chunk, micro_batch: int) -> torch.Tensor:
        if chunk.incoming is None:
            tokens, _ = self._train_batch().micro_batch(micro_batch)
            return tokens.to(self._device, non_blocking=True)
        return self._lanes.take().requires_grad_()

    def _loss(self, logits: torch.Tensor, micro_batch: int) -> torch.Tensor:
        batch = self._train_batch()
        _, labels = batch.micro_batch(micro_batch)
        loss = summed_cross_entropy(logits, labels.to(self._device, non_blocking=True))
        self._losses.append(loss.detach())
        return loss / (max(batch.num_tokens, 1) / self._shape.gradient_scale)

    def _send(self, boundary: Boundary, direction: Direction, micro_batch: int, tensor: torch.Tensor) -> None:
        ids = self._ids_of(micro_batch)
        name = (self._step, Purpose.TRAIN, direction, micro_batch)
        self._lanes.send(tensor, lambda: boundary.send(*name, tensor, ids))

    def _is_receiving(self, action: Action) -> bool:
        return self._source(action) is not None

    def _source(self, action: Action) -> Boundary | None:
        """The cut that an action waits at for a frame."""
        if action.kind is ActionKind.W:
            return None
        chunk = self._chunks[action.chunk]
        return chunk.incoming if action.kind is ActionKind.F else chunk.outgoing

    def _receive(self, action: Action) -> Receive:
        boundary, ids = self._source(action), self._ids_of(action.micro_batch)
        if boundary is None:
            raise AssertionError(f"{action} receives nothing")
        direction = Direction.FORWARD if action.kind is ActionKind.F else Direction.BACKWARD
        return Receive(
            partial(boundary.await_frame, self._step, Purpose.TRAIN, direction, action.micro_batch),
            lambda frame: boundary.unpack(frame, self._shape.boundary, BOUNDARY_DTYPE, ids),
            "wait:memory" if action in self._held_up else boundary.waiting,
            boundary.name(self._step, Purpose.TRAIN, action.micro_batch, direction),
        )

    def _ids_of(self, micro_batch: int) -> list[int] | None:
        return self._sample_ids[micro_batch] if self._sample_ids is not None else None

    def _result(self) -> StepResult:
        result = StepResult(self._finite, peak_in_flight=self._peak_in_flight, timing=self._stopwatch.take())
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


def held_up_by_depth(actions: Sequence[Action], sources: set[int]) -> set[Action]:
    """Backwards before the last forward of a chunk that has its tokens here: without the bound on micro-batches in
    flight, that forward could be computed while the gradient is waited for.
    """
    forwards = [index for index, a in enumerate(actions) if a.kind is ActionKind.F and a.chunk in sources]
    last = max(forwards, default=-1)
    return {action for action in actions[:last] if action.kind in (ActionKind.B, ActionKind.I)} if last >= 0 else set()
