"""One stage of a run put together: its slice of the model, its cuts, its engine and its weights' update.

This is what a worker process holds, and nothing in it knows about processes: a stage is built from
sections of the configuration and from transports that somebody else has opened.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tahq.comm.link.frame import Direction
from tahq.comm.transport import LinkStats, Transport
from tahq.data.batches import BatchSource
from tahq.data.sample_order import SampleOrder
from tahq.errors import CodecError, ConfigError, LocalProtocolError, RemoteProtocolError
from tahq.memory.galore.low_rank_weight import LowRankWeight
from tahq.memory.galore.qgalore import low_rank_weights
from tahq.models.slice import HEAD_WEIGHT, ModelSlice
from tahq.pipeline.boundary import BOUNDARY_DTYPE, Boundary, CodecTable, CutIdentity, ErrorSample
from tahq.pipeline.checkpoint.codec_state import CodecEnd, codec_ends
from tahq.pipeline.chunk import Chunk, StepShape
from tahq.pipeline.codec_lanes import ThreadedLanes
from tahq.pipeline.config import PipelineConfig, TrainingConfig
from tahq.pipeline.engine import StageEngine
from tahq.pipeline.schedule.schedule import Action
from tahq.pipeline.spans import Stopwatch, marks_of
from tahq.pipeline.tie import TiedEmbedding
from tahq.pipeline.update.gradients import HoldsGradient
from tahq.pipeline.update.update import StageUpdate
from tahq.quant.config import WireConfig
from tahq.units import format_size

log = logging.getLogger(__name__)


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
        return self.pipeline.num_chunks - 1

    def peer(self, link: int) -> int:
        """The stage at the other end of one of this stage's links, that of tied embeddings included."""
        ends = {link % self.pipeline.stages, (link + 1) % self.pipeline.stages}
        return next(iter(ends - {self.stage}))


class Stage:
    """A stage that can take steps, evaluate and be saved.

    Args:
        plan: what it is.
        modules: its slices of the model by chunk, on its device.
        batches: for first and last stage.
        transports: its links by number: link c is the cut between chunk c and c + 1.
        device: where the module lives.
        bf16: compute under bf16 autocast.
        order: which samples a step is made of; needed where a codec remembers samples.
        cache_folder: where codecs that remember samples on disk keep them; None: where they think best.
        on_action: called before each action (step, action); raises to leave.
        beside: encode and decode in threads beside the compute loop; the transports must allow another thread's recv.
    """

    def __init__(
        self,
        plan: StagePlan,
        modules: Mapping[int, ModelSlice],
        batches: BatchSource | None,
        transports: Mapping[int, Transport],
        *,
        device: torch.device,
        bf16: bool,
        order: SampleOrder | None = None,
        cache_folder: Path | None = None,
        on_action: Callable[[int, Action], None] | None = None,
        beside: bool = False,
    ) -> None:
        self.plan = plan
        self._module = next(iter(modules.values()))
        self._transports = dict(transports)
        self.stopwatch = Stopwatch(marks_of(device))
        self._device = device
        self._boundaries: dict[int, Boundary] = {}
        parameters: dict[str, torch.nn.Parameter] = {}
        low_rank: dict[str, LowRankWeight] = {}
        for module in modules.values():
            parameters |= module.canonical_parameters()
            low_rank |= low_rank_weights(module)
        tied = self._tied({**parameters, **low_rank}) if plan.tie else None
        schedule = plan.pipeline.actions(plan.training.num_micro_batches)
        self._shape = StepShape(
            plan.training.num_micro_batches, plan.training.micro_batch, plan.seq_len, self._module.spec.hidden_size
        )
        self.update = StageUpdate(
            plan.training, parameters, self._module.is_decayed, plan.total_steps, tied, low_rank, self._shape
        )
        chunks = {number: self._chunk(number, module) for number, module in modules.items()}
        self._codec_ends = [end for chunk in chunks.values() for end in _codec_ends(chunk)]
        if cache_folder is not None:
            for end in self._codec_ends:
                end.codec.keep_in(cache_folder)
        self.engine = StageEngine(
            chunks=chunks,
            actions=schedule.actions[plan.stage],
            shape=self._shape,
            batches=batches,
            order=order if self._codec_ends else None,
            random=self._module.random,
            device=device,
            bf16=bf16,
            stopwatch=self.stopwatch,
            tied=tied,
            on_action=on_action,
            on_step=self.update.begin,
            lanes=ThreadedLanes(device, self.stopwatch) if beside and transports else None,
        )

    def prepare(self) -> None:
        """Compile or load the kernels of the codecs on this stage's cuts, so that no step has to wait for it.

        Raises:
            ConfigError: a codec does not go with the model's channels, or the backend not with the device.
        """
        if not self._transports:
            return
        begin_s = time.perf_counter()
        try:
            self._new_codecs().prepare(self._shape.boundary, BOUNDARY_DTYPE, self._device)
        except CodecError as error:
            raise ConfigError(f"stage {self.plan.stage}: wire: {error}") from error
        log.info("codecs ready in %.2f s", time.perf_counter() - begin_s)

    @property
    def codec_state_nbytes(self) -> int:
        """What the codecs of this stage's cuts remember."""
        return sum(end.codec.state_nbytes for end in self._codec_ends)

    @property
    def keeps_state_on_disk(self) -> bool:
        """Whether codecs keep what they remember in files, because memory has no room for it."""
        return any(end.codec.keeps_state_on_disk for end in self._codec_ends)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a snapshot keeps of this stage, by its names there; they change with the next step."""
        if self._codec_ends:
            log.info("codecs remember %s of the samples seen", format_size(self.codec_state_nbytes))
        states = (end.tensors() for end in self._codec_ends)
        return self.update.tensors() | {name: tensor for state in states for name, tensor in state.items()}

    def load(self, read: Callable[[str], torch.Tensor], names: set[str]) -> None:
        """Take what a snapshot has of this stage, bit for bit.

        Args:
            read: a tensor by its name in the snapshot.
            names: all names in the snapshot.
        """
        self.update.load(read, names)
        for end in self._codec_ends:
            end.load(names, read, self._shape.boundary[1:])

    def use_codecs(self, step: int, rows: Sequence[Sequence[int]]) -> None:
        """Pack what crosses this stage's cuts otherwise from this step on.

        Args:
            step: the first with these codecs.
            rows: [link, direction, index into the plan's table]; those of other stages' links are passed over.

        Raises:
            RemoteProtocolError: a row that makes no sense.
        """
        try:
            for link, direction, index in rows:
                if link in self._boundaries:
                    self._boundaries[link].use(step, Direction(direction), index)
        except (ValueError, LocalProtocolError) as error:
            raise RemoteProtocolError(
                f"the coordinator changes codecs to {list(map(list, rows))}, which makes no sense: {error}"
            ) from error

    def take_codec_errors(self) -> list[ErrorSample]:
        """What was measured of the codecs' errors since the last call."""
        return [sample for boundary in self._boundaries.values() for sample in boundary.take_errors()]

    def take_link_stats(self) -> list[LinkStats]:
        """What this stage sent since the last call, by link and direction."""
        return [stats for transport in self._transports.values() for stats in transport.take_stats()]

    def _chunk(self, number: int, module: ModelSlice) -> Chunk:
        incoming = None if number == 0 else self._cut(number - 1)
        outgoing = None if number == self.plan.pipeline.num_chunks - 1 else self._cut(number)
        return Chunk(module, incoming, outgoing)

    def _cut(self, link: int) -> Boundary:
        boundary = self._boundaries[link] = self._boundary(link)
        return boundary

    def _boundary(self, link: int) -> Boundary:
        identity, codecs = CutIdentity(self.plan.run, self.plan.seed, link), self._new_codecs()
        peer, follow = self.plan.peer(link), self.plan.wire.follow
        every = follow.guard.measure_every if follow is not None and follow.guard.max_error is not None else None
        return Boundary(self._transports[link], identity, codecs, self._device, self.stopwatch, peer, every)

    def _new_codecs(self) -> CodecTable:
        wire = self.plan.wire
        rungs = wire.rungs()
        return CodecTable(
            wire.activations,
            wire.gradients,
            rungs={Direction.FORWARD: rungs["activations"], Direction.BACKWARD: rungs["gradients"]},
            backend=wire.backend,
            threads=wire.threads,
        )

    def _tied(self, holders: Mapping[str, HoldsGradient]) -> TiedEmbedding:
        both_here = self.plan.is_first and self.plan.is_last
        owns_one = self.plan.is_first or self.plan.is_last
        boundary = self._boundary(self.plan.tie_link) if owns_one and not both_here else None
        embedding = holders.get(self._module.spec.layout.embedding_weight)
        return TiedEmbedding(embedding, holders.get(HEAD_WEIGHT), boundary)


def _codec_ends(chunk: Chunk) -> list[CodecEnd]:
    blocks = chunk.module.parts.blocks
    incoming = codec_ends(chunk.incoming, blocks.start, is_incoming=True) if chunk.incoming is not None else []
    outgoing = codec_ends(chunk.outgoing, blocks.stop, is_incoming=False) if chunk.outgoing is not None else []
    return [*incoming, *outgoing]
