"""One stage of a run put together: its slice of the model, its cuts, its engine and its weights' update.

This is what a worker process holds, and nothing in it knows about processes: a stage is built from
sections of the configuration and from transports that somebody else has opened.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tahq.comm.transport import LinkStats, Transport
from tahq.data.batches import BatchSource
from tahq.models.slice import HEAD_WEIGHT, ModelSlice
from tahq.pipeline.boundary import Boundary, CodecTable, CutIdentity, Stopwatch
from tahq.pipeline.config import PipelineConfig, TrainingConfig
from tahq.pipeline.engine import Chunk, StageEngine, StepShape
from tahq.pipeline.schedule import Action, generate
from tahq.pipeline.tie import TiedEmbedding
from tahq.pipeline.update import StageUpdate
from tahq.pipeline.validator import validate
from tahq.quant.config import WireConfig


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Everything that a stage is determined by, apart from its data and its links."""

    stage: int
    run: int
    seed: int
    seq_len: int
    total_steps: int
    training: TrainingConfig
    pipeline: PipelineConfig
    wire: WireConfig
    tie: bool

    @property
    def is_first(self) -> bool:
        """Whether the embedding, and so the tokens, are here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the head, and so the labels, are here."""
        return self.stage == self.pipeline.stages - 1

    @property
    def tie_link(self) -> int:
        """Number of the link that joins the two copies of a tied embedding."""
        return self.pipeline.stages - 1


class Stage:
    """A stage that can take steps, evaluate and be saved.

    Args:
        plan: what it is.
        module: its slice of the model, on its device.
        batches: for first and last stage.
        transports: its links by number: link i is the cut between stage i and i + 1.
        device: where the module lives.
        bf16: compute under bf16 autocast.
        on_action: called before each action (step, action); raises to leave.
    """

    def __init__(
        self,
        plan: StagePlan,
        module: ModelSlice,
        batches: BatchSource | None,
        transports: Mapping[int, Transport],
        *,
        device: torch.device,
        bf16: bool,
        on_action: Callable[[int, Action], None] | None = None,
    ) -> None:
        self.plan = plan
        self.module = module
        self._transports = dict(transports)
        self._codecs = CodecTable(plan.wire.activations, plan.wire.gradients)
        self._stopwatch = Stopwatch()
        self._device = device
        parameters = module.canonical_parameters()
        tied = self._tied(parameters) if plan.tie else None
        self.update = StageUpdate(plan.training, parameters, module.is_decayed, plan.total_steps, tied)
        schedule = generate(plan.pipeline.schedule, plan.pipeline.stages, plan.training.num_micro_batches)
        validate(schedule)
        self.engine = StageEngine(
            chunks={plan.stage: self._chunk()},
            actions=schedule.actions[plan.stage],
            shape=StepShape(
                plan.training.num_micro_batches, plan.training.micro_batch, plan.seq_len, module.spec.hidden_size
            ),
            batches=batches,
            random=module.random,
            device=device,
            bf16=bf16,
            stopwatch=self._stopwatch,
            tied=tied,
            on_action=on_action,
        )

    def take_link_stats(self) -> list[LinkStats]:
        """What this stage sent since the last call, by link and direction."""
        return [stats for transport in self._transports.values() for stats in transport.take_stats()]

    def _chunk(self) -> Chunk:
        incoming = None if self.plan.is_first else self._boundary(self.plan.stage - 1)
        outgoing = None if self.plan.is_last else self._boundary(self.plan.stage)
        return Chunk(self.module, incoming, outgoing)

    def _boundary(self, link: int) -> Boundary:
        identity = CutIdentity(self.plan.run, self.plan.seed, link)
        return Boundary(self._transports[link], identity, self._codecs, self._device, self._stopwatch)

    def _tied(self, parameters: Mapping[str, torch.nn.Parameter]) -> TiedEmbedding:
        both_here = self.plan.is_first and self.plan.is_last
        owns_one = self.plan.is_first or self.plan.is_last
        boundary = self._boundary(self.plan.tie_link) if owns_one and not both_here else None
        embedding = parameters.get(self.module.spec.layout.embedding_weight)
        return TiedEmbedding(embedding, parameters.get(HEAD_WEIGHT), boundary)
