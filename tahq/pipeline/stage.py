"""One stage of a run put together: its slices of the model, its cuts, its engine and its weight update.

A worker process holds one. Nothing here knows about processes: a stage is built from sections of the configuration
and from transports that are already open.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors.torch import save

from tahq.comm.link.frame import Direction
from tahq.comm.topology import Grid, LinkEnds
from tahq.comm.transport import LinkStats, Transport
from tahq.data.batches import BatchSource, StepBatch
from tahq.data.sample_order import SampleOrder
from tahq.errors import CodecError, ConfigError, LocalProtocolError, RemoteProtocolError, ScheduleError
from tahq.memory.agoq.stored_gradients import HoldsGradient
from tahq.memory.compiled_blocks import compile_now
from tahq.memory.config import Gradients, Shard
from tahq.memory.free_memory import peak_bytes
from tahq.memory.galore.qgalore import low_rank_weights
from tahq.memory.shares import UNSHARED, Share, shares_of
from tahq.models.experts.load_balance import router_loss_of
from tahq.models.slice import HEAD_WEIGHT, ModelSlice
from tahq.pipeline.boundary import BOUNDARY_DTYPE, Boundary, CodecEnd, CodecTable, CutIdentity, ErrorSample
from tahq.pipeline.checkpoint.durable_file import TEMPORARY_SUFFIX, write_durably
from tahq.pipeline.codec_lanes import InlineLanes, ThreadedLanes
from tahq.pipeline.config import PipelineConfig, TrainingConfig
from tahq.pipeline.engine import Chunk, StageEngine, StepShape
from tahq.pipeline.gradient_sum import GradientSum, Send, SumCodecs, sum_codec
from tahq.pipeline.gradients import TiedEmbedding
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import Action
from tahq.pipeline.spans import CudaMarks, Stopwatch
from tahq.pipeline.update import StageUpdate
from tahq.pipeline.weight_loans import SharedBlock, WeightLoans
from tahq.quant.config import WireConfig
from tahq.quant.spec import RawSpec
from tahq.units import format_size

MAX_KEPT_BATCHES = 16
"""Batches of non-finite steps that are kept, so that a run that skips many steps does not fill the disk."""

PRODUCTS = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Names of the types of products, which are those of the weights that replicas lend each other."""

DIGEST_EVERY = 10
"""Steps between two comparisons of the replicas' weights."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Everything that determines a stage, apart from its data and its links."""

    stage: int
    run: int
    seed: int
    seq_len: int
    total_steps: int
    training: TrainingConfig
    pipeline: PipelineConfig
    wire: WireConfig
    tie: bool
    may_be_packed: bool = False  # Whether rows may hold several records
    gradients: Gradients = "fp32"  # `memory.gradients`
    shards: Collection[Shard] = ()  # `memory.shard`, where there are replicas
    sum_codecs: Mapping[int, str] = field(default_factory=dict)  # Of shards of gradients, by link between replicas
    num_frozen: int = 0  # Chunks of the model, from the first on, that have no backward

    @property
    def grid(self) -> Grid:
        """All stages and their links."""
        return self.pipeline.grid(tie_link=self.tie)

    @property
    def replica(self) -> int:
        """Number of the pipeline that the stage belongs to."""
        return self.stage // self.pipeline.stages


class Stage:
    """A stage that can compute steps, evaluate, and be saved.

    Args:
        plan: what determines it.
        modules: its slices of the model by chunk, on its device.
        batches: source of samples; first and last stage need one.
        transports: its links by number: link c is the cut between chunk c and c + 1, the last one joins the two copies
            of a tied embedding.
        device, autocast, order, on_action: see `StageEngine`.
        cache_folder: where codecs that remember samples on disk keep them; None: the codec's own default.
        beside: encode and decode in threads beside the compute loop; transports must allow `recv` in another thread.
    """

    def __init__(
        self,
        plan: StagePlan,
        modules: Mapping[int, ModelSlice],
        batches: BatchSource | None,
        transports: Mapping[int, Transport],
        *,
        device: torch.device,
        autocast: torch.dtype | None,
        order: SampleOrder | None = None,
        cache_folder: Path | None = None,
        on_action: Callable[[int, Action], None] | None = None,
        beside: bool = False,
    ) -> None:
        self.plan = plan
        self.stopwatch = Stopwatch(CudaMarks(device) if device.type == "cuda" else None)
        self._module = next(iter(modules.values()))
        self._transports = dict(transports)
        self._device = device
        self._boundaries: dict[int, Boundary] = {}
        self._links = {ends.cut: ends for ends in plan.grid.links_of(plan.stage) if ends.cut is not None}
        parameters = {name: p for module in modules.values() for name, p in module.canonical_parameters().items()}
        low_rank = {name: w for module in modules.values() for name, w in low_rank_weights(module).items()}
        tied = self._tied({**parameters, **low_rank}) if plan.tie else None
        training = plan.training
        sizes = training.num_micro_batches, training.rows, plan.seq_len, self._module.spec.hidden_size
        self._shape = StepShape(*sizes, plan.pipeline.replicas, plan.may_be_packed)
        scale, is_decayed = self._shape.gradient_scale, self._module.is_decayed
        self._shares: dict[str, Share] = {}
        for module in modules.values() if plan.shards else ():
            shapes = {name: parameter.shape for name, parameter in module.canonical_parameters().items()}
            self._shares |= shares_of(module.spec, shapes, plan.pipeline.replicas, plan.shards)
        owned = {name for name, share in self._shares.items() if share.owner == plan.replica} if plan.shards else None
        self.update = StageUpdate(
            *(training, parameters, is_decayed, plan.total_steps, tied, low_rank, scale),
            gradients=plan.gradients,
            seed=plan.seed,
            owned=owned,
        )
        chunks = {number: self._chunk(number, module) for number, module in modules.items()}
        self._codec_ends = [end for chunk in chunks.values() for end in _codec_ends(chunk)]
        if cache_folder is not None:
            for end in self._codec_ends:
                end.codec.keep_in(cache_folder)
        self._schedule = plan.pipeline.first_schedule, plan.pipeline.first_depths
        self._computing: Sequence[int] = range(plan.pipeline.replicas)
        """The replicas that share the batch."""
        actions, first_micro_batch = self._row()
        lanes = ThreadedLanes(device, self.stopwatch) if beside and transports else InlineLanes()
        self._replicas = self._replica_boundaries(autocast)
        self.engine = StageEngine(
            chunks=chunks,
            actions=actions,
            first_micro_batch=first_micro_batch,
            shape=self._shape,
            batches=batches,
            order=order if self._codec_ends else None,
            random=self._module.random,
            device=device,
            autocast=autocast,
            stopwatch=self.stopwatch,
            num_pieces=partial(training.num_pieces, seq_len=plan.seq_len),
            tied=tied,
            sums=self._sums(modules) if self._replicas else None,
            loans=self._loans(modules, lanes.send) if "weights" in plan.shards else None,
            dpo=training.dpo,
            router_loss=router_loss_of(training.router_aux_loss, self._module.spec),
            on_action=on_action,
            on_step=self.update.begin,
            lanes=lanes,
        )

    def prepare(self, working: Callable[[str], None] = lambda activity: None) -> None:
        """Compile or load the kernels of the codecs on this stage's cuts, and blocks, so that no step waits for that.

        `working` is called with what is prepared.

        Raises:
            ConfigError: a codec does not support the model's channels, or its backend not the device.
        """
        if self.plan.training.compile:
            for chunk in self.engine.chunks.values():
                working("compiling blocks")
                compile_now(chunk.module, self._shape.boundary, self.engine.autocast)
        if not self._transports:
            return
        begin_s = time.perf_counter()
        try:
            codecs = CodecTable(self.plan.wire).codecs
            for number, codec in enumerate(codecs, start=1):
                working(f"compiling kernels, codec {number}/{len(codecs)}")
                codec.prepare(self._shape.boundary, BOUNDARY_DTYPE, self._device)
            if self.engine.sums is not None:
                working("compiling kernels of sums over replicas")
                self.engine.sums.prepare(self._device)
        except CodecError as error:
            raise ConfigError(f"stage {self.plan.stage}: wire: {error}") from error
        log.info("codecs ready in %.2f s", time.perf_counter() - begin_s)

    @property
    def codec_state_nbytes(self) -> int:
        """Bytes that the codecs of this stage's cuts remember."""
        return sum(end.codec.state_nbytes for end in self._codec_ends)

    @property
    def peak_nbytes(self) -> int:
        """Most memory that this process has held on the stage's device so far."""
        return peak_bytes(self._device)

    @property
    def keeps_state_on_disk(self) -> bool:
        """Whether codecs keep their state in files because memory has no room for it."""
        return any(end.codec.keeps_state_on_disk for end in self._codec_ends)

    def tensors(self) -> dict[str, torch.Tensor]:
        """This stage's part of a checkpoint, by name; the tensors change with the next step."""
        if self._codec_ends:
            log.info("codecs remember %s of samples", format_size(self.codec_state_nbytes))
        states = (end.tensors() for end in self._codec_ends)
        return self.update.tensors() | {name: tensor for state in states for name, tensor in state.items()}

    def load(self, read: Callable[[str], torch.Tensor], names: set[str]) -> None:
        """Restore this stage, bit for bit, from a checkpoint with these names, whose tensors `read` returns by name."""
        self.update.load(read, names)
        for end in self._codec_ends:
            end.load(names, read, self._shape.boundary[1:])

    def use_codecs(self, step: int, rows: Sequence[Sequence[int]]) -> None:
        """Change the codecs of this stage's cuts from a step on; RemoteProtocolError for a malformed row.

        Rows are [link, direction, index into the codec table]; those of other stages' links are ignored.
        """
        try:
            for link, direction, index in rows:
                if link in self._boundaries:
                    self._boundaries[link].codecs.use(step, Direction(direction), index)
        except (ValueError, LocalProtocolError) as error:
            raise RemoteProtocolError(
                f"the coordinator sent an invalid change of codecs, {list(map(list, rows))}: {error}"
            ) from error

    def use_schedule(self, name: str, depths: Sequence[int]) -> None:
        """Compute the following steps under this schedule, with these depths; "": nothing changes.

        RemoteProtocolError: there is no such schedule of this pipeline.
        """
        if name:
            self._schedule = name, list(depths) or None
            self.engine.follow(*self._row())

    def use_replicas(self, computing: Sequence[int]) -> None:
        """Divide the following steps among these replicas; empty: nothing changes.

        RemoteProtocolError: there are no such replicas.
        """
        if not computing or self.engine.sums is None:
            return
        if not set(computing) <= set(range(self.plan.pipeline.replicas)) or sorted(set(computing)) != list(computing):
            raise RemoteProtocolError(f"the coordinator sent invalid numbers of replicas: {list(computing)}")
        self._computing = computing
        self.engine.follow(*self._row())
        self.engine.sums.use(computing)

    def use_loss_scale(self, scale: float) -> None:
        """Multiply the losses of the following steps by this power of two; 0: nothing changes.

        RemoteProtocolError: it is none.
        """
        if scale == 0:
            return
        if not 0 < scale < math.inf or math.frexp(scale)[0] != 0.5:
            raise RemoteProtocolError(f"the coordinator sent an invalid loss scale: {scale}")
        self.engine.gradient_scale = scale

    def _row(self) -> tuple[Sequence[Action], int]:
        """This stage's row of the schedule in force, and the first of the step's micro-batches that it is for."""
        plan, pipeline, (name, depths) = self.plan, self.plan.pipeline, self._schedule
        share = plan.grid.shares(plan.training.num_micro_batches, self._computing).get(plan.replica)
        if share is None:
            return (), 0
        try:
            chunks, frozen = pipeline.chunks, plan.num_frozen
            chosen = generate(
                name, pipeline.stages, len(share), depths=depths, chunks_per_stage=chunks, num_frozen=frozen
            )
        except ScheduleError as error:
            raise RemoteProtocolError(f"the coordinator sent an invalid schedule: {error}") from error
        return chosen.actions[plan.stage % pipeline.stages], share.start

    def gather_weights(self, step: int) -> None:
        """After the decision about a step: exchange updated weights with replicas, if each updates a share."""
        if self.engine.sums is not None:
            self.engine.sums.gather_weights(step)

    def take_codec_errors(self) -> list[ErrorSample]:
        """Codec errors measured since the last call."""
        return [sample for boundary in self._boundaries.values() for sample in boundary.take_errors()]

    def take_link_stats(self) -> list[LinkStats]:
        """Traffic since the last call, by link and direction."""
        return [stats for transport in self._transports.values() for stats in transport.take_stats()]

    def weights_digest(self, step: int) -> str:
        """A sum over the bits of all weights, for replicas to compare; empty except every few steps."""
        if self.plan.pipeline.replicas == 1 or step % DIGEST_EVERY:
            return ""
        return self.update.weights_digest([name for name, share in self._shares.items() if share.keeps_alone])

    @property
    def is_of_first_replica(self) -> bool:
        """Whether it belongs to the first replica that computes, whose validation loss counts."""
        return self.plan.replica == self._computing[0]

    @property
    def evaluates(self) -> bool:
        """Whether this stage takes part in evaluations: where replicas lend each other weights, all do."""
        return self.is_of_first_replica or self.engine.loans is not None

    def _chunk(self, number: int, module: ModelSlice) -> Chunk:
        ends = {cut: self._links[cut] for cut in (number - 1, number) if cut in self._links}
        for cut, link in ends.items():
            self._boundaries.setdefault(link.link, self._boundary(link, cut))
        incoming, outgoing = (self._boundaries[ends[cut].link] if cut in ends else None for cut in (number - 1, number))
        frozen = self.plan.num_frozen
        residual = module.residual or BOUNDARY_DTYPE
        return Chunk(module, incoming, outgoing, residual, is_frozen=number < frozen, sends_gradient=number > frozen)

    def _boundary(self, ends: LinkEnds, cut: int) -> Boundary:
        identity = CutIdentity(self.plan.run, self.plan.seed, cut, self.plan.replica)
        codecs, follow = CodecTable(self.plan.wire), self.plan.wire.follow
        every = follow.guard.measure_every if follow is not None and follow.guard.max_error is not None else None
        return self._link_boundary(ends, identity, codecs, every)

    def _link_boundary(
        self,
        ends: LinkEnds,
        identity: CutIdentity,
        codecs: CodecTable,
        every: int | None = None,
    ) -> Boundary:
        transport, peer = self._transports[ends.link], ends.other(self.plan.stage)
        return Boundary(transport, identity, codecs, self._device, self.stopwatch, peer, every)

    def _replica_boundaries(self, autocast: torch.dtype | None) -> dict[int, Boundary]:
        plan, wire, grid = self.plan, self.plan.wire, self.plan.grid
        if plan.pipeline.replicas == 1:
            return {}
        links = [ends for ends in grid.links()[grid.first_sum_link :] if ends.lower in grid.replicas_of(plan.stage)]
        specs = {ends.link: plan.sum_codecs[ends.link] for ends in links}
        # all get the same codes of a sum: those for the farthest; of a weight its bits
        of_sums = wire.all_reduce if wire.all_reduce in specs.values() else specs[links[0].link]
        of_sums = str(RawSpec("fp32")) if plan.shards else of_sums
        of_weights = RawSpec("bf16" if plan.training.has_bf16_weights else PRODUCTS[autocast])
        codecs_of = [sum_codec(spec, wire) for spec in (of_sums, str(of_weights))]
        identity, boundaries = CutIdentity(plan.run, plan.seed, grid.num_cuts, plan.replica), {}
        for ends in grid.links_of(plan.stage):
            if ends.link in specs:
                codecs = SumCodecs(sum_codec(specs[ends.link], wire), *codecs_of)
                boundaries[ends.other(plan.stage) // grid.num_stages] = self._link_boundary(ends, identity, codecs)
        return boundaries

    def _sums(self, modules: Mapping[int, ModelSlice]) -> GradientSum:
        plan, first_cut = self.plan, self.plan.grid.num_cuts
        named = {
            number: {name: each for name, each in module.canonical_parameters().items() if each.requires_grad}
            for number, module in modules.items()
        }
        holders = {number: list(each.values()) for number, each in named.items()}
        shares = {number: [self._shares.get(name, UNSHARED) for name in each] for number, each in named.items()}
        return GradientSum(holders, plan.replica, self._replicas, plan.run, first_cut, shares)

    def _loans(self, modules: Mapping[int, ModelSlice], send: Send) -> WeightLoans:
        layers = (layer for module in modules.values() for layer in module.modules())
        blocks = [each for layer in layers if isinstance(each := getattr(layer, "shared", None), SharedBlock)]
        return WeightLoans(blocks, self.plan.replica, self._replicas, self.plan.run, self.plan.grid.num_cuts, send)

    def _tied(self, holders: Mapping[str, HoldsGradient]) -> TiedEmbedding:
        stage, pipeline = self.plan.stage, self.plan.pipeline
        owns_one_copy = (stage == 0) != (stage == pipeline.stages - 1)
        ends = next(ends for ends in self.plan.grid.links() if ends.is_tie) if owns_one_copy else None
        boundary = self._boundary(ends, pipeline.num_chunks - 1) if ends is not None else None
        embedding = holders.get(self._module.spec.layout.embedding_weight)
        return TiedEmbedding(embedding, holders.get(HEAD_WEIGHT), boundary)


def _codec_ends(chunk: Chunk) -> list[CodecEnd]:
    """The ends of codecs that remember samples, on the cuts around a chunk."""
    blocks, ends = chunk.module.parts.blocks, list[CodecEnd]()
    if chunk.incoming is not None:
        ends += chunk.incoming.codec_ends(blocks.start, is_incoming=True)
    if chunk.outgoing is not None:
        ends += chunk.outgoing.codec_ends(blocks.stop, is_incoming=False)
    return ends


def keep_batch(folder: Path, step: int, batch: StepBatch) -> Path:
    """Keep the samples of a step that had NaN or infinity, to find out why; removes the oldest of many.

    ``non_finite/step-00000013.safetensors`` has `tokens` and `labels` (int64 [B, S]), `positions` alike if rows have
    several records, and `sample_ids` (int64 [B]), the micro-batches in order; metadata are the step (from 1) and the
    batch's digest. SnapshotError: it cannot be written.
    """
    name = f"step-{step:08}.safetensors"
    tensors = {"tokens": batch.tokens, "labels": batch.labels, "sample_ids": batch.sample_ids}
    tensors |= {} if batch.positions is None else {"positions": batch.positions}
    content = save(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        {"step": str(step), "digest": batch.digest, "micro_batch": str(batch.micro_batch_size)},
    )

    def write(file: BinaryIO) -> str:
        file.write(content)
        return name

    path = write_durably(folder / (name + TEMPORARY_SUFFIX), write)
    for old in sorted(folder.glob("step-*.safetensors"))[:-MAX_KEPT_BATCHES]:
        with suppress(OSError):  # an old file only takes space
            old.unlink(missing_ok=True)
    return path
