"""The parts of a stage, built from the configuration: model slice, data, and, once there are links, the stage.

Built in two parts, because HELLO reports hashes and sizes before links are known: `Assembly.build` needs the
configuration only, `connect` needs the plan and the transports.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from tahq import __version__
from tahq.comm.control.messages import Assign, Plan, Snapshotted
from tahq.comm.transport import Transport
from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import stage_estimate
from tahq.data.batches import BatchSource
from tahq.data.dataset import Dataset, load_dataset
from tahq.data.sample_order import BEGINNING, Cursor, SampleOrder
from tahq.data.tokenizer import Tokenizer, load_tokenizer
from tahq.errors import ConfigError, SnapshotError
from tahq.memory.coat.fp8_flow import use_fp8_flow
from tahq.memory.galore.qgalore import build_low_rank_parts, build_low_rank_slice, low_rank_weights
from tahq.models.costs import counted_costs
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import BlockRange, divide
from tahq.models.sleeping_slice import build_sleeping_slice
from tahq.models.slice import ModelSlice, Parts, build_parts, build_slice, fill_weights
from tahq.pipeline.checkpoint.copies import own_file
from tahq.pipeline.checkpoint.durable_file import check_room, wait_for_room
from tahq.pipeline.checkpoint.manifest import StageMeta, arithmetic_differences, arithmetic_of, snapshot_folder
from tahq.pipeline.checkpoint.snapshot import prune
from tahq.pipeline.checkpoint.stage_file import SnapshotReader, write_stage
from tahq.pipeline.checkpoint.writer import SnapshotWriter
from tahq.pipeline.schedule.schedule import Action
from tahq.pipeline.stage import Stage, StagePlan, keep_batch
from tahq.pipeline.update.optimizer import low_rank_settings

_log = logging.getLogger(__name__)


def block_ranges(config: ClusterConfig, spec: ModelSpec) -> tuple[BlockRange, ...]:
    """The blocks of every chunk; a resolved configuration lists them, another is divided by counted cost."""
    return divide(counted_costs(spec, config.data.seq_len), config.pipeline.num_chunks, config.pipeline.layers)


def chunk_module(
    config: ClusterConfig,
    spec: ModelSpec,
    chunk: int,
    *,
    device: torch.device,
    random: RandomContext,
    weights: bool = True,
) -> ModelSlice:
    """The module of one chunk: a slice of the model, or under `model.sleep` a slice that only takes time.

    Args:
        config: resolved.
        spec: its model.
        chunk: which; a stage's number is that of its only chunk, but for interleaved schedules.
        device: where it lives.
        random: what keyed dropout reads.
        weights: False leaves them uninitialised, for a snapshot to fill.
    """
    blocks = block_ranges(config, spec)[chunk]
    if config.model.sleep is not None:
        naps = config.model.sleep.of(chunk % config.pipeline.stages)
        forward_s, backward_s = (seconds / config.pipeline.chunks for seconds in naps)
        return build_sleeping_slice(spec, blocks, forward_s, backward_s, device=device, random=random)
    settings = low_rank_settings(config.training, config.run.seed)
    if settings is None:
        module = build_slice(spec, blocks, seed=config.run.seed, device=device, random=random, weights=weights)
    else:
        module = build_low_rank_slice(
            spec, blocks, settings, seed=config.run.seed, device=device, random=random, weights=weights
        )
    keep_as_configured(config, module)
    return module


def random_parts(config: ClusterConfig, spec: ModelSpec, parts: Parts, device: torch.device) -> ModelSlice:
    """Any parts of the model as a stage computes them, for timing; their weights are random."""
    spec, random = dataclasses.replace(spec, folder=None), RandomContext(config.run.seed)
    settings = low_rank_settings(config.training, config.run.seed)
    if settings is None:
        module = build_parts(spec, parts, device=device, random=random)
        fill_weights(spec, module.canonical_parameters(), config.run.seed)
    else:
        module = build_low_rank_parts(spec, parts, settings, seed=config.run.seed, device=device, random=random)
    keep_as_configured(config, module)
    return module


def keep_as_configured(config: ClusterConfig, module: ModelSlice) -> None:
    """Have a slice keep of its activations what `training.activation_checkpointing` and `memory.activations` say.

    Raises:
        ModelError: the model's blocks are none that `memory.activations` has code for.
    """
    module.checkpoint_blocks = config.training.activation_checkpointing == "block"
    if config.memory.activations == "coat":
        use_fp8_flow(module, config.memory.coat)


def resolved_spec(config: ClusterConfig, tokenizer_vocab_size: int | None) -> ModelSpec:
    """The model of a resolved configuration; its vocabulary does not depend on the tokenizer being here.

    Args:
        config: resolved: `model.vocab_size` is set unless a folder gives it.
        tokenizer_vocab_size: to be checked against the model's; None where no tokenizer is needed.
    """
    vocabulary = tokenizer_vocab_size or config.model.vocab_size or 1
    return load_spec(config.model, vocab_size=vocabulary, seq_len=config.data.seq_len)


def compute_device(config: ClusterConfig, stage: int, override: str | None) -> torch.device:
    """Where a stage computes: the command line, its host's entry, `run.device`; `auto` takes CUDA if there is any.

    Raises:
        ConfigError: a device that this machine does not have.
    """
    host = config.hosts[stage] if isinstance(config.hosts, list) else None
    name = override or (host.device if host is not None and host.device != "auto" else config.run.device)
    if name == "auto":
        name = f"cuda:{stage % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"stage {stage}: device {name!r} cannot be used here: {reason}") from error


@dataclass(frozen=True, slots=True)
class StageData:
    """Tokenizer and samples; first and last stage have them."""

    tokenizer: Tokenizer
    dataset: Dataset

    @classmethod
    def load(cls, config: ClusterConfig) -> "StageData":
        """Read what `data:` names."""
        tokenizer = load_tokenizer(config.data)
        return cls(tokenizer, load_dataset(config.data, tokenizer))


class Assembly:
    """One stage's parts, before they are joined to others."""

    def __init__(
        self,
        assign: Assign,
        config: ClusterConfig,
        device: torch.device,
        modules: Mapping[int, ModelSlice],
        data: StageData | None,
        reader: SnapshotReader | None,
    ) -> None:
        self.config = config
        self.device = device
        self._assign = assign
        self._modules = modules
        self._data = data
        self._reader = reader
        self._batches = self._batch_source()
        self._arithmetic = arithmetic_of(device, config.wire.backend)
        self.last_checkpoint: int | None = None
        """Steps behind the run's last checkpoint, which waits for room on a full disk; None: it is not due yet."""
        self.complete_snapshot = assign.start_step
        """Steps behind the newest snapshot that all stages have written, as the coordinator has said."""

    @classmethod
    def build(
        cls, assign: Assign, config: ClusterConfig, device: str | None, working: Callable[[str], None]
    ) -> "Assembly":
        """Read or draw this stage's weights, and read the data if the stage needs it.

        Args:
            assign: stage, and the snapshot to continue from.
            config: what `assign` carries, parsed.
            device: the command line's choice, if any.
            working: told what is being done, for the heartbeats.

        Raises:
            UserError: whatever in the configuration does not fit this machine.
        """
        stage, where = assign.stage, compute_device(config, assign.stage, device)
        if config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        needs_data = stage in (0, config.pipeline.stages - 1)
        working("reading data")
        data = StageData.load(config) if needs_data else None
        working("building the model")
        spec = resolved_spec(config, data.tokenizer.vocab_size if data is not None else None)
        _check_room(config, spec, stage)
        reader = _open_snapshot(assign, config)
        random = RandomContext(config.run.seed)
        modules = {
            chunk: chunk_module(config, spec, chunk, device=where, random=random, weights=reader is None)
            for chunk in range(stage, config.pipeline.num_chunks, config.pipeline.stages)
        }
        return cls(assign, config, where, modules, data, reader)

    @property
    def tokenizer_hash(self) -> str:
        """Empty where no data is needed."""
        return self._data.tokenizer.fingerprint if self._data is not None else ""

    @property
    def data_hash(self) -> str:
        """Empty where no data is needed."""
        return self._data.dataset.fingerprint if self._data is not None else ""

    @property
    def num_train_samples(self) -> int:
        """Samples an epoch; 0 where no data is needed."""
        return self._data.dataset.num_train_samples if self._data is not None else 0

    @property
    def next_sample(self) -> int:
        """Number of the training sample that the first step begins with; 0 where no data is needed."""
        return self._batches.cursor(self._assign.start_step).sample if self._batches is not None else 0

    @property
    def arithmetic_changes(self) -> list[str]:
        """How what computes here differs from what computed the snapshot; empty: not at all, or there is none.

        Raises:
            SnapshotError: a file of it is damaged.
        """
        reader = self._reader
        if reader is None:
            return []
        same_division = len(self._assign.snapshot_files) == self.config.pipeline.stages
        mine = [file for file in reader.files if same_division and file.startswith(f"stage-{self._assign.stage:03d}-")]
        metas = [reader.stage_meta(file) for file in mine or reader.files]
        changes = (change for meta in metas for change in arithmetic_differences(meta.arithmetic, self._arithmetic))
        return list(dict.fromkeys(changes))

    @property
    def num_parameters(self) -> int:
        """Parameters of this stage."""
        parameters = sum(p.numel() for module in self._modules.values() for p in module.parameters())
        covered = (low_rank_weights(module).values() for module in self._modules.values())
        return parameters + sum(weight.numel() for weights in covered for weight in weights)

    def connect(
        self, plan: Plan, transports: Mapping[int, Transport], on_action: Callable[[int, Action], None] | None = None
    ) -> Stage:
        """Join the parts to the links: a stage ready for `plan.start_step`.

        Raises:
            SnapshotError: the snapshot lacks what this stage owns.
        """
        config = self.config
        stage = Stage(
            StagePlan(
                stage=self._assign.stage,
                run=self._assign.run_id,
                seed=config.run.seed,
                seq_len=config.data.seq_len,
                total_steps=plan.total_steps,
                training=config.training,
                pipeline=config.pipeline,
                wire=config.wire,
                tie=config.model.tie == "sync",
            ),
            self._modules,
            self._batches,
            transports,
            device=self.device,
            bf16=computes_in_bf16(config, self.device),
            order=self._sample_order(plan),
            cache_folder=Path(config.run.dir) / config.run.name / "cache",
            on_action=on_action,
            beside=True,
        )
        if self._reader is not None:
            stage.load(self._reader.tensor, set(self._reader.names()))
        return stage

    def snapshot_writer(
        self, stage: Stage, report: Callable[[Snapshotted], None], pause: Callable[[float], None]
    ) -> SnapshotWriter:
        """The writer of this stage's part of checkpoints.

        Args:
            stage: whose tensors are written.
            report: called with every part, in any thread.
            pause: sleeps this many seconds while the disk is full; may raise to end the wait.
        """
        return SnapshotWriter(
            lambda step, tensors: report(self._write_snapshot(step, tensors, pause)),
            self.config.run.snapshot_buffers,
            stage.stopwatch,
        )

    def _write_snapshot(
        self, step: int, tensors: Mapping[str, torch.Tensor], pause: Callable[[float], None]
    ) -> Snapshotted:
        """Write this stage's part of the checkpoint after `step` steps; a failure is reported, not raised.

        If the disk is full, the next checkpoint replaces this one; the last one waits for room.
        """
        number = self._assign.stage
        write = partial(write_stage, snapshot_folder(self._snapshots(), step), number, tensors, self._meta(step))
        try:
            is_last = step == self.last_checkpoint
            written = wait_for_room(write, self.config.run.give_up, pause) if is_last else write()
        except SnapshotError as error:
            return Snapshotted(step, number, "", "", 0, error=str(error))
        if isinstance(self.config.hosts, list):
            try:
                prune(self._snapshots(), self.config.run.keep_snapshots, self.complete_snapshot, self.complete_snapshot)
            except SnapshotError as error:  # the new checkpoint is complete regardless
                _log.warning("%s", error)
        return Snapshotted(step, number, written.file, written.sha256, written.nbytes)

    def keep_batch(self, step: int, stage: Stage) -> None:
        """Keep the samples of a step, counted from 1, that had NaN or infinity; the first stage does so for all."""
        batch = stage.engine.batch
        if self._assign.stage != 0 or batch is None:
            return
        folder = Path(self.config.run.dir) / self.config.run.name / "non_finite"
        try:
            path = keep_batch(folder, step, batch)
        except SnapshotError as error:
            _log.warning("the batch of step %d, which had NaN or infinity, is not kept: %s", step, error)
        else:
            _log.warning("step %d had NaN or infinity; its batch is in %s", step, path)

    def _meta(self, step: int) -> StageMeta:
        cursor = self._batches.cursor(step) if self._batches is not None else Cursor(step)
        return StageMeta(
            step=step,
            stage=self._assign.stage,
            num_stages=self.config.pipeline.stages,
            block_start=min(module.parts.blocks.start for module in self._modules.values()),
            block_stop=max(module.parts.blocks.stop for module in self._modules.values()),
            cursor=asdict(cursor),
            config_hash=self._assign.config_hash,
            versions={"tahq": __version__, "torch": str(torch.__version__)},
            arithmetic=self._arithmetic,
        )

    def _snapshots(self) -> Path:
        return snapshots_folder(self.config)

    def _sample_order(self, plan: Plan) -> SampleOrder:
        """Which samples a step is made of; a stage without data has it from the plan."""
        if self._batches is not None:
            return self._batches.order
        return SampleOrder(
            plan.num_train_samples,
            self.config.data.shuffle,
            self.config.run.seed,
            self.config.training.global_batch,
            self.config.training.micro_batch,
            Cursor(plan.start_step, plan.next_sample, plan.num_train_samples),
        )

    def _batch_source(self) -> BatchSource | None:
        if self._data is None:
            return None
        training = self.config.training
        return BatchSource(
            self._data.dataset,
            seed=self.config.run.seed,
            global_batch=training.global_batch,
            micro_batch=training.micro_batch,
            origin=self._origin(),
        )

    def _origin(self) -> Cursor:
        """Where the snapshot's stage stood in the data; every run has a stage 0, and it has the data."""
        if self._reader is None:
            return BEGINNING
        return Cursor(**self._reader.stage_meta(self._file_with_cursor(self._reader)).cursor)

    def _file_with_cursor(self, reader: SnapshotReader) -> str:
        """This stage's own file where the same stages wrote it: it may be the only one on this host."""
        mine = own_file(self._assign, self.config.pipeline.stages)
        if mine in reader.files:
            return mine
        return next(file for file in sorted(self._assign.snapshot_files) if file.startswith("stage-000"))


def snapshots_folder(config: ClusterConfig) -> Path:
    """Where a run's snapshots lie on this machine."""
    return Path(config.run.dir) / config.run.name / "snapshots"


def _check_room(config: ClusterConfig, spec: ModelSpec, stage: int) -> None:
    """Refuse a run whose checkpoint does not fit on the disk; stages on one machine share it, and stage 0 checks.

    Raises:
        UserError: there is too little room.
    """
    are_together = isinstance(config.hosts, str)
    if config.model.sleep is not None or (are_together and stage > 0):
        return
    stages = range(config.pipeline.stages) if are_together else [stage]
    nbytes = sum(stage_estimate(config, spec, number, bf16=False).snapshot for number in stages)
    check_room(snapshots_folder(config), nbytes)


def _open_snapshot(assign: Assign, config: ClusterConfig) -> SnapshotReader | None:
    if not assign.snapshot:
        return None
    return SnapshotReader(Path(config.run.dir) / config.run.name / assign.snapshot, assign.snapshot_files)


def computes_in_bf16(config: ClusterConfig, device: torch.device) -> bool:
    """Whether a stage on this device computes under bf16 autocast (`training.precision`)."""
    precision = config.training.precision
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")
