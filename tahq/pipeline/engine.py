"""The engine of one stage: executes its row of the schedule as frames arrive.

Invariants:
- actions run in schedule order; an action waits for its own frame and for nothing else;
- tensors are encoded and decoded in `codec_lanes.py`, beside the compute loop;
- gradients of micro-batches accumulate in ascending order (the schedule guarantees it);
- from the loss to the last backward, gradients carry a power of two as a factor, on the wire too: `gradient_scale`,
  or under `training.precision: fp16` the loss scale that the coordinator has decided;
- the engine never changes weights: a step ends with gradients, and `update.py` applies the commit;
- a step that is abandoned still sends and takes every frame, void ones, so that no frame of it is left on a link;
- a frozen chunk has forwards only, keeps nothing of them, and gets no gradient;
- with DPO each forward also computes the reference, the same rows without adapters, first; from the first trained chunk
  on its activations follow the others in one tensor of 2·B rows, to which only the first B get a gradient;
- a backward, or the input-gradient half of a split one, frees the activations; its graph is freed beside the next.

Shapes: B rows per micro-batch (samples, or with DPO both answers of each), S tokens, C channels, V words of the
vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch

from tahq.comm.link.frame import Direction, LogicalId, Purpose
from tahq.data.batches import BatchSource, StepBatch
from tahq.data.packing import begins_of, positions_of
from tahq.data.sample_order import SampleOrder
from tahq.memory.agoq.stored_gradients import HoldsGradient, scale_gradients
from tahq.memory.galore.qgalore import low_rank_weights
from tahq.models.adapters.lora import without_adapters
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.experts.load_balance import Balance, RouterLoss
from tahq.models.keyed_dropout import RandomContext
from tahq.models.loss import preference_loss
from tahq.models.slice import ModelSlice, sharing_copies_of
from tahq.pipeline.boundary import BOUNDARY_DTYPE, Boundary
from tahq.pipeline.codec_lanes import CodecLanes, InlineLanes, Receive
from tahq.pipeline.config import DpoConfig
from tahq.pipeline.gradient_sum import GradientSum
from tahq.pipeline.gradients import TiedEmbedding, gradient_scale
from tahq.pipeline.schedule.schedule import Action, ActionKind
from tahq.pipeline.spans import Stopwatch
from tahq.pipeline.weight_loans import WeightLoans


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of the model with the cuts on either side, None at the ends of the model.

    `residual`: type in which a received activation is kept. `is_frozen`: nothing in it or before it is trained, so it
    has no backward. `sends_gradient`: of its input, as something before it is trained.
    """

    module: ModelSlice
    incoming: Boundary | None
    outgoing: Boundary | None
    residual: torch.dtype = BOUNDARY_DTYPE
    is_frozen: bool = False
    sends_gradient: bool = True

    def compute(self, x: torch.Tensor, positions: torch.Tensor | None, *, autocast: torch.dtype | None) -> torch.Tensor:
        """Tokens [B, S] or activations [B, S, C] -> what `loss` takes, or activations where they cross a cut.

        `positions` as of `ModelSlice.forward`, on any device. `autocast`: type of products; None: that of weights.
        """
        positions = None if positions is None else positions.to(x.device, non_blocking=True)
        with _autocast(x, autocast):
            y: torch.Tensor = self.module(x, positions)
        return y

    def loss(
        self, y: torch.Tensor, labels: torch.Tensor, divisor: float = 1.0, *, autocast: torch.dtype | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ModelSlice.loss`."""
        with _autocast(y, autocast):
            return self.module.loss(y, labels, divisor)

    def log_probs(self, y: torch.Tensor, labels: torch.Tensor, *, autocast: torch.dtype | None) -> torch.Tensor:
        """See `ModelSlice.log_probs`."""
        with _autocast(y, autocast):
            return self.module.log_probs(y, labels)

    def logits(self, y: torch.Tensor, places: torch.Tensor, *, autocast: torch.dtype | None) -> torch.Tensor:
        """See `ModelSlice.logits`."""
        with _autocast(y, autocast):
            return self.module.logits(y, places)


def _autocast(x: torch.Tensor, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(x.device.type, dtype)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that all steps have in common."""

    num_micro_batches: int
    """Of all replicas."""
    micro_batch: int
    seq_len: int
    hidden_size: int
    replicas: int = 1
    is_packed: bool = False
    """Whether a bit per token, set where a record begins, travels with activations."""

    @property
    def begins_nbytes(self) -> int:
        """Bytes of these bits, see `begins_of`."""
        return self.micro_batch * -(-self.seq_len // 8) if self.is_packed else 0

    @property
    def boundary(self) -> tuple[int, int, int]:
        """[B, S, C] of what crosses a cut."""
        return (self.micro_batch, self.seq_len, self.hidden_size)

    @property
    def gradient_scale(self) -> float:
        """See `gradients.gradient_scale`; all tokens count, labelled or not, because every stage knows their number."""
        return gradient_scale(self.num_micro_batches * self.micro_batch * self.seq_len)


@dataclass(slots=True)
class StepResult:
    """The outcome of a step: `loss_sum` (nats) and `tokens` on the last stage, `batch_digest` on the first and last."""

    finite: bool = True
    loss_sum: float | None = None
    tokens: int | None = None
    batch_digest: str = ""
    router_loss: float | None = None
    """This stage's part of the load-balancing loss, times its coefficient; None: there is none."""
    rewards: list[float] = field(default_factory=list)
    """Of DPO, on the last stage: pairs, over which the loss is summed, sums of the rewards of their chosen and rejected
    answers, and how often the first was higher."""
    is_abandoned: bool = False
    """Whether there is no outcome: the step was given up."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Loss of a validation set summed over `tokens`, or over pairs, in nats: with the wire's codecs, and with raw ones.

    `num_right`: pairs whose chosen answer has the higher reward, with raw ones; 0: there are none.
    """

    tokens: int
    loss_sum: float
    raw_loss_sum: float
    num_right: float = 0.0


@dataclass(slots=True)
class _Step:
    """The state of the step that is being computed."""

    number: int
    batch: StepBatch | None = None
    sample_ids: list[list[int]] | None = None
    in_flight: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, Balance | None]] = field(default_factory=dict)
    """By (chunk, micro-batch): input, output and load of experts of a forward whose backward has not run."""
    deferred: dict[tuple[int, int], DeferredGradients] = field(default_factory=dict)
    """By (chunk, micro-batch): weight gradients of a split backward that are not computed yet."""
    losses: list[torch.Tensor] = field(default_factory=list)
    rewards: list[torch.Tensor] = field(default_factory=list)
    """Of each micro-batch, as in `StepResult`."""
    router_losses: list[torch.Tensor] = field(default_factory=list)
    spent: torch.Tensor | None = None
    """The output whose backward ran last."""
    is_abandoned: bool = False
    """Whether nothing is computed any more: void frames come and go in the place of tensors."""


@dataclass(kw_only=True)
class StageEngine:
    """Computes the chunks of one stage.

    Args:
        chunks: the stage's pieces of the model, by chunk number.
        actions: this stage's row of the schedule.
        shape: sizes of a step.
        batches: source of token and label tensors; None if the stage needs none.
        random: holds the micro-batch that is being computed, for dropout.
        device: where the chunks are.
        order: the samples of each micro-batch; None if no codec remembers samples.
        autocast: type of products under autocast; None: no autocast.
        stopwatch: shared with the boundaries.
        num_pieces: step -> pieces that its samples are cut into.
        tied: exchanges the gradients of tied embeddings.
        sums: sums gradients over the replicas of the pipeline; None: there is one.
        loans: lends weights among them; None: each has its own.
        dpo: learns from pairs of answers; None: from texts.
        router_loss: balances the load of experts; None: nothing does.
        on_action: called before each action with (step, action); may raise to end the step.
        on_step: called with each step's number before it is computed.
        lanes: where encoding and decoding happen.
    """

    chunks: Mapping[int, Chunk]
    actions: Sequence[Action]
    shape: StepShape
    batches: BatchSource | None
    random: RandomContext
    device: torch.device
    order: SampleOrder | None = None
    autocast: torch.dtype | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    num_pieces: Callable[[int], int] = lambda step: 1
    tied: TiedEmbedding | None = None
    sums: GradientSum | None = None
    loans: WeightLoans | None = None
    dpo: DpoConfig | None = None
    router_loss: RouterLoss | None = None
    on_action: Callable[[int, Action], None] | None = None
    on_step: Callable[[int], None] | None = None
    lanes: CodecLanes = field(default_factory=InlineLanes)
    first_micro_batch: int = 0
    """The first of the step's micro-batches that this replica computes; it numbers its own from 0."""
    abandoned_step: int = -1
    """A step that is given up; any thread may set it."""

    def __post_init__(self) -> None:
        self._step = _Step(0)
        self._ahead: tuple[int, StepBatch] | None = None
        """A step whose samples have been read, and these."""
        self.gradient_scale = self.shape.gradient_scale
        """The factor that gradients carry; it changes between steps only."""
        self.follow(self.actions, self.first_micro_batch)

    def follow(self, actions: Sequence[Action], first_micro_batch: int) -> None:
        """Compute the following steps by this row of a schedule."""
        self.actions, self.first_micro_batch = actions, first_micro_batch
        self.num_micro_batches = 1 + max((action.micro_batch for action in actions), default=-1)
        self._last = {action.chunk: action for action in self.actions}
        if self.sums is not None:
            self.sums.forget()
        self._split = {(action.chunk, action.micro_batch) for action in self.actions if action.kind is ActionKind.I}
        sources = {number for number, chunk in self.chunks.items() if chunk.incoming is None}
        self._held_up = held_up_by_depth(self.actions, sources)

    @property
    def batch(self) -> StepBatch | None:
        """The samples of the last computed step; None on a stage that reads none."""
        return self._step.batch

    def run_step(self, number: int) -> StepResult:
        """Forward and backward of a step's micro-batches; leaves the summed gradients in the weights.

        Raises:
            PeerLostError, RemoteProtocolError, CodecError: from the links.
        """
        if self.on_step is not None:
            self.on_step(number)
        for chunk in self.chunks.values():
            if not chunk.module.training:
                chunk.module.train()
            chunk.module.num_pieces = self.num_pieces(number)
            if chunk.module.graphs is not None:
                chunk.module.graphs.begin()
        with self.stopwatch.measure("data"):
            self.read_ahead(number)
            batch, self._ahead = self._ahead and self._ahead[1], None
            sample_ids = self.order.micro_batches(number) if self.order is not None else None
        step = self._step = _Step(number, batch, sample_ids)
        scale_gradients(self._holders, self.gradient_scale)  # those of earlier steps that were not applied
        if self.sums is not None:
            self.sums.post(number, self.num_micro_batches)
        if self.loans is not None:
            self.loans.begin(number, Purpose.WEIGHTS)
        self.lanes.begin(self._post_receives())
        with sharing_copies_of(chunk.module for chunk in self.chunks.values()):
            for action in self.actions:
                if self.on_action is not None:
                    self.on_action(number, action)
                step.is_abandoned |= number == self.abandoned_step
                is_last = action is self._last[action.chunk]
                sums = self.sums if is_last or action.kind in (ActionKind.B, ActionKind.W) else None
                if sums is not None:
                    sums.open(number, action.chunk, self.lanes.send, is_last=is_last)
                if action.kind is ActionKind.F:
                    self._forward(step, action)
                elif action.kind is ActionKind.W:
                    self._weight_gradients(step, action)
                else:
                    self._backward(step, action)
                if sums is not None:
                    sums.close(is_void=step.is_abandoned)
        step.spent = None
        finite = self.lanes.finish()
        if self.sums is not None and not self.sums.finish(number, is_void=step.is_abandoned):
            step.is_abandoned = True
        scale_gradients(self._holders, 1 / self.gradient_scale)
        if step.is_abandoned:
            return StepResult(is_abandoned=True)
        if self.tied is not None:
            self.tied.exchange(number)
        result = StepResult(finite, batch_digest=batch.digest if batch is not None else "")
        if step.losses:
            result.loss_sum = math.fsum(torch.stack(step.losses).tolist())
            result.tokens = _given(batch).num_tokens
        if step.rewards:
            result.rewards = [math.fsum(column) for column in zip(*torch.stack(step.rewards).tolist(), strict=True)]
        if step.router_losses:
            parts = torch.stack(step.router_losses).tolist()
            result.router_loss = math.fsum(parts) / self.shape.num_micro_batches
        return result

    def read_ahead(self, number: int) -> None:
        """Read a step's samples before it begins, while the coordinator decides about the one before it."""
        if self.batches is not None and (self._ahead is None or self._ahead[0] != number):
            self._ahead = number, self.batches.train(number)

    @cached_property
    def _holders(self) -> list[HoldsGradient]:
        """Everything that a backward accumulates gradients in."""
        found: list[HoldsGradient] = []
        for chunk in self.chunks.values():
            found += [*chunk.module.parameters(), *low_rank_weights(chunk.module).values()]
        return found

    def _forward(self, step: _Step, action: Action) -> None:
        chunk, key = self.chunks[action.chunk], (action.chunk, action.micro_batch)
        number = self.first_micro_batch + action.micro_batch
        if chunk.incoming is None:
            tokens, _ = _given(step.batch).micro_batch(number)
            x, positions = tokens.to(self.device, non_blocking=True), _given(step.batch).micro_batch_positions(number)
            of_reference, numbers = x, None
        else:
            x, of_reference = (part.to(chunk.residual) for part in self._divided(self._take(step)))
            x.requires_grad_(chunk.sends_gradient)
            id = chunk.incoming.name(step.number, Purpose.TRAIN, action.micro_batch, Direction.FORWARD)
            positions, numbers = self._attached(chunk.incoming, id)
        if step.is_abandoned:
            self._send(step, chunk.outgoing, Direction.FORWARD, action.micro_batch, None)
            return
        labels = self._labels(step.batch, number) if chunk.outgoing is None else None
        reference = self._reference(chunk, of_reference, positions, labels, action)
        chunk.module.deferred = step.deferred.setdefault(key, DeferredGradients()) if key in self._split else None
        balance = chunk.module.balance = self._balance(numbers)
        place = divmod(number, self.shape.num_micro_batches // self.shape.replicas)  # where all replicas compute
        self.random.at(step.number, *place, int(Purpose.TRAIN))
        with self.stopwatch.measure("forward", action), torch.set_grad_enabled(not chunk.is_frozen):
            y = chunk.compute(x, positions, autocast=self.autocast)
            if chunk.outgoing is None:
                y = self._loss(step, chunk, y, _given(labels), reference)
        if not chunk.is_frozen:
            step.in_flight[key] = (x, y, balance)
        if balance is not None and (chunk.outgoing is None or not balance.loss.is_pooled):
            step.router_losses.append(balance.value())
        self._send(
            step, chunk.outgoing, Direction.FORWARD, action.micro_batch, _joined(y, reference), balance, positions
        )
        if chunk.is_frozen:  # else micro-batches in flight are the bound on outputs that are not encoded yet
            self.lanes.pace()

    def _balance(self, numbers: torch.Tensor | None) -> Balance | None:
        """The load of experts that a forward adds to: of a pooled loss, to that of the layers before, `numbers`."""
        if self.router_loss is None:
            return None
        scale, tokens = self.gradient_scale / self.shape.num_micro_batches, math.prod(self.shape.boundary[:2])
        balance = self.router_loss.begin(tokens, scale, self.device)
        if numbers is not None and self.router_loss.is_pooled:
            balance.sums = numbers.view_as(balance.sums)
        return balance

    def _attached(self, boundary: Boundary, id: LogicalId) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What came with a tensor: positions, if its rows have several records, and the numbers of experts."""
        attached = boundary.take_attached(id)
        nbytes = self.shape.begins_nbytes if id.direction is Direction.FORWARD and len(attached) else 0
        positions = positions_of(attached[:nbytes], self.shape.boundary[:2]) if nbytes else None
        return positions, attached[nbytes:].clone().view(BOUNDARY_DTYPE).to(self.device)

    def _take(self, step: _Step) -> torch.Tensor:
        """What comes next; empty, and the step is abandoned, if it does not come."""
        x = self.lanes.take()
        if x is None:
            step.is_abandoned = True
            return torch.empty(0)
        return x

    def _divided(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model continues with of what has come, and its reference: the same where nothing is trained yet."""
        if self.dpo is None or len(x) <= self.shape.micro_batch:
            return x, x
        own, of_reference = (part.clone() for part in x.chunk(2))  # so that each is freed by itself
        return own, of_reference

    def _reference(
        self,
        chunk: Chunk,
        x: torch.Tensor,
        positions: torch.Tensor | None,
        labels: torch.Tensor | None,
        action: Action | None = None,
    ) -> torch.Tensor | None:
        """A chunk's output without adapters, or with `labels` the log-probabilities of rows [B]; None: not needed."""
        if self.dpo is None or chunk.is_frozen:
            return None
        chunk.module.balance = None
        with torch.no_grad(), without_adapters(), self.stopwatch.measure("forward", action):
            y = chunk.compute(x, positions, autocast=self.autocast)
            return y if labels is None else chunk.log_probs(y, labels, autocast=self.autocast)

    def _labels(self, batch: StepBatch | None, number: int) -> torch.Tensor:
        return _given(batch).micro_batch(number)[1].to(self.device, non_blocking=True)

    def _preferences(
        self, chunk: Chunk, y: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `preference_loss`."""
        assert self.dpo is not None, "there is a reference"
        log_probs = chunk.log_probs(y, labels, autocast=self.autocast)
        return preference_loss(log_probs, reference, labels, self.dpo.beta, self.dpo.label_smoothing)

    def _loss(
        self, step: _Step, chunk: Chunk, y: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor | None
    ) -> torch.Tensor:
        """A micro-batch's part of the step's mean loss, times the gradient scale."""
        batch = _given(step.batch)
        if reference is not None:
            loss, rewards = self._preferences(chunk, y, labels, reference)
            step.losses.append(loss.detach())
            step.rewards.append(rewards)
            return loss / (max(batch.num_pairs, 1) / self.gradient_scale)
        divisor = max(batch.num_tokens, 1) / self.gradient_scale
        loss, summed = chunk.loss(y, labels, divisor, autocast=self.autocast)
        step.losses.append(summed)
        return loss

    def _backward(self, step: _Step, action: Action) -> None:
        chunk = self.chunks[action.chunk]
        gradient = self._take(step) if chunk.outgoing is not None else None
        upstream = chunk.incoming if chunk.sends_gradient else None
        if step.is_abandoned:
            self._send(step, upstream, Direction.BACKWARD, action.micro_batch, None)
            return
        x, y, balance = step.in_flight.pop((action.chunk, action.micro_batch))
        if balance is not None and balance.loss.is_pooled:
            balance.totals = balance.sums[0]
            if chunk.outgoing is not None:
                name = chunk.outgoing.name(step.number, Purpose.TRAIN, action.micro_batch, Direction.BACKWARD)
                _, balance.totals = self._attached(chunk.outgoing, name)
        if step.spent is not None:  # its graph is freed in another thread while this backward runs without the GIL
            self.lanes.drop(step.spent)
            step.spent = None
        with self.stopwatch.measure("backward" if action.kind is ActionKind.B else "input_gradient", action):
            y.backward(None if gradient is None else gradient.to(y.dtype))  # type: ignore[no-untyped-call]
        if upstream is not None:
            if x.grad is None:
                raise AssertionError("backward left no gradient on the received activation")
            self._send(step, upstream, Direction.BACKWARD, action.micro_batch, x.grad, balance)
        step.spent = y

    def _weight_gradients(self, step: _Step, action: Action) -> None:
        if not step.is_abandoned:
            with self.stopwatch.measure("weight_gradient", action):
                step.deferred.pop((action.chunk, action.micro_batch)).run()

    def _send(
        self,
        step: _Step,
        boundary: Boundary | None,
        direction: Direction,
        micro_batch: int,
        tensor: torch.Tensor | None,
        balance: Balance | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Send a tensor over a cut, in fp32, or (None) that there is none; nothing at the ends of the model."""
        if boundary is None:
            return
        tensor = None if tensor is None else tensor.to(BOUNDARY_DTYPE)
        id = boundary.name(step.number, Purpose.TRAIN, micro_batch, direction)
        if tensor is not None:
            self._attach_positions(boundary, id, positions)
        if balance is not None and balance.loss.is_pooled:
            numbers = balance.sums if direction is Direction.FORWARD else balance.totals
            assert numbers is not None, "the backward has begun"
            boundary.attach(id, numbers)
        self.lanes.send(boundary, id, tensor, step.sample_ids[micro_batch] if step.sample_ids is not None else None)

    def _attach_positions(self, boundary: Boundary, id: LogicalId, positions: torch.Tensor | None) -> None:
        if self.shape.is_packed and id.direction is Direction.FORWARD:
            boundary.attach(id, begins_of(positions, self.shape.boundary[:2]))

    def _post_receives(self) -> list[Receive]:
        """Post the receives of the whole step, in the order in which its actions take them."""
        step, receives = self._step, []
        for action in self.actions:
            chunk, is_forward = self.chunks[action.chunk], action.kind is ActionKind.F
            boundary = chunk.incoming if is_forward else chunk.outgoing
            if boundary is None or action.kind is ActionKind.W:
                continue
            direction = Direction.FORWARD if is_forward else Direction.BACKWARD
            id = boundary.name(step.number, Purpose.TRAIN, action.micro_batch, direction)
            nbytes = 0 if self.router_loss is None else BOUNDARY_DTYPE.itemsize * self.router_loss.num_sent[direction]
            nbytes += self.shape.begins_nbytes if is_forward else 0
            shape = self._received_shape(chunk) if is_forward else self.shape.boundary
            boundary.post(id, shape, attached_nbytes=nbytes)
            sample_ids = step.sample_ids[action.micro_batch] if step.sample_ids is not None else None
            waiting = "wait:memory" if action in self._held_up else boundary.waiting
            receives.append(Receive(boundary, id, sample_ids, waiting))
        return receives

    def _received_shape(self, chunk: Chunk) -> tuple[int, int, int]:
        """Of the activations that a chunk receives, its reference's included."""
        rows, length, channels = self.shape.boundary
        num_forwards = 1 if self.dpo is None or not chunk.sends_gradient else 2
        return num_forwards * rows, length, channels

    # -- evaluation ------------------------------------------------------------------------------

    def evaluate(
        self, step: int, num_batches: int, num_sets: int = 1, working: Callable[[str], None] = lambda activity: None
    ) -> list[EvaluationResult]:
        """Losses of the current weights on each validation set, with the wire's codecs and with raw ones.

        Only the last stage has them.

        Args:
            step: the step that the weights are after.
            num_batches: of each validation set.
            num_sets: validation sets.
            working: called with the micro-batch that is computed.
        """
        coded = self._validate(Purpose.EVAL, step, num_batches, num_sets, working)
        raw = self._validate(Purpose.EVAL_RAW, step, num_batches, num_sets, working)
        if all(chunk.outgoing is not None for chunk in self.chunks.values()):
            return []
        pairs = zip(coded, raw, strict=True)
        return [EvaluationResult(count, loss, *of_raw) for (count, loss, _), (_, *of_raw) in pairs]

    @torch.no_grad()
    def _validate(
        self, purpose: Purpose, step: int, num_batches: int, num_sets: int, working: Callable[[str], None]
    ) -> list[tuple[int, float, float]]:
        """Tokens, or pairs, their summed loss, and how many pairs are right, of each validation set, as far as this
        stage knows them."""
        count, num_all = self.shape.num_micro_batches, num_sets * num_batches
        if self.loans is not None:
            self.loans.begin(step, purpose)
        for chunk in self.chunks.values():
            chunk.module.eval()
            chunk.module.balance = None
            chunk.module.num_pieces = 1
            if chunk.incoming is not None:
                for index in range(num_all * count):
                    id = chunk.incoming.name(step, purpose, index, Direction.FORWARD)
                    chunk.incoming.post(id, self._received_shape(chunk), attached_nbytes=self.shape.begins_nbytes)
        sums = [(0, 0.0, 0.0)] * num_sets
        activity = "evaluating" if purpose is Purpose.EVAL else "evaluating without codecs"
        for number in range(num_all):
            own, place = divmod(number, num_batches)
            batch = self.batches.validation(place, own) if self.batches is not None else None
            count_so_far, loss_sum, num_right = sums[own]
            for index in range(number * count, (number + 1) * count):
                working(f"{activity}, micro-batch {index + 1}/{num_all * count}")
                loss, right = self._validate_micro_batch(purpose, step, index, batch)
                loss_sum, num_right = loss_sum + loss, num_right + right
            more = 0 if batch is None else batch.num_tokens if self.dpo is None else batch.num_pairs
            sums[own] = (count_so_far + more, loss_sum, num_right)
        return sums

    def _validate_micro_batch(
        self, purpose: Purpose, step: int, index: int, batch: StepBatch | None
    ) -> tuple[float, float]:
        """The loss on the last stage, and how many pairs are right; 0 elsewhere."""
        micro_batch, found = index % self.shape.num_micro_batches, (0.0, 0.0)
        for _, chunk in sorted(self.chunks.items()):
            if chunk.incoming is None:
                x = of_reference = _given(batch).micro_batch(micro_batch)[0].to(self.device)
                positions = _given(batch).micro_batch_positions(micro_batch)
            else:
                id = chunk.incoming.name(step, purpose, index, Direction.FORWARD)
                x, of_reference = self._divided(chunk.incoming.receive(id))
                positions, _ = self._attached(chunk.incoming, id)
            labels = self._labels(batch, micro_batch) if chunk.outgoing is None else None
            reference = self._reference(chunk, of_reference, positions, labels)
            y = chunk.compute(x, positions, autocast=self.autocast)
            if chunk.outgoing is not None:
                id = chunk.outgoing.name(step, purpose, index, Direction.FORWARD)
                self._attach_positions(chunk.outgoing, id, positions)
                chunk.outgoing.send(id, _joined(y, reference).to(BOUNDARY_DTYPE))
            elif reference is not None:
                loss, rewards = self._preferences(chunk, y, _given(labels), reference)
                found = float(loss), float(rewards[-1])
            else:
                found = float(chunk.loss(y, _given(labels), autocast=self.autocast)[1]), 0.0
        return found


T = TypeVar("T")


def _given(part: T | None) -> T:
    if part is None:
        raise AssertionError("first and last stage need a batch source")
    return part


def _joined(y: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
    """An output with its reference's, for the next stage."""
    return y.detach() if reference is None or reference.ndim < 2 else torch.cat((y.detach(), reference))


def held_up_by_depth(actions: Sequence[Action], sources: set[int]) -> set[Action]:
    """Backwards that wait because of the in-flight depth, not for lack of other work.

    They come before the last forward of a chunk that has its tokens here: without the bound on micro-batches in flight,
    that forward could be computed while the gradient is awaited.
    """
    forwards = [index for index, a in enumerate(actions) if a.kind is ActionKind.F and a.chunk in sources]
    last = max(forwards, default=0)
    return {action for action in actions[:last] if action.kind in (ActionKind.B, ActionKind.I)}
