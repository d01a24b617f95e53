"""The parts of a stage, built from the configuration: model slice, data, and, once there are links, the stage.

Building takes two calls, because HELLO reports hashes and sizes before links are known: `Assembly.build` needs the
configuration only, `connect` needs the plan and the transports.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tahq import __version__
from tahq.comm.control.messages import Assign, Hello, Plan
from tahq.comm.transport import Transport
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_hash
from tahq.config.stage_estimate import (
    autocast_dtype,
    block_ranges,
    check_layers,
    chunks_of,
    frozen_chunks,
    lacks_bf16,
    loss_chunks,
    matrix_dtype,
    stage_estimate,
)
from tahq.data.batches import BatchSource
from tahq.data.dataset import Dataset, ValidationSet, fingerprint_of, load_dataset, load_validation
from tahq.data.sample_order import BEGINNING, Cursor, SampleOrder
from tahq.data.tokenizer import Tokenizer, load_tokenizer
from tahq.errors import ConfigError
from tahq.hub import local_folder
from tahq.memory.agoq.stored_inputs import store_inputs
from tahq.memory.block_graphs import BlockGraphs
from tahq.memory.coat.fp8_flow import use_fp8_flow
from tahq.memory.compiled_blocks import compile_blocks
from tahq.memory.config import NEEDS_BF16, Offload
from tahq.memory.fp8_products import check_fp8_units, use_fp8_products
from tahq.memory.free_memory import free_bytes
from tahq.memory.galore.qgalore import build_low_rank_slice, low_rank_weights
from tahq.memory.offload.blocks import offload_blocks, place_on_host
from tahq.memory.offload.host_memory import HostMemory
from tahq.memory.offload.host_part import device_nbytes
from tahq.memory.recompute import recompute
from tahq.memory.shares import shares_of
from tahq.memory.stored_slice import build_slice
from tahq.models.fused_attention import attend_in_chunks
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec, load_spec, require_folder
from tahq.models.partition import BlockRange
from tahq.models.sleeping_slice import SleepingSlice
from tahq.models.slice import HEAD_WEIGHT, ModelSlice, Parts, slice_parameters
from tahq.models.weights import FolderWeights
from tahq.pipeline.checkpoint.copies import own_file
from tahq.pipeline.checkpoint.durable_file import check_room
from tahq.pipeline.checkpoint.manifest import StageMeta, arithmetic_differences, arithmetic_of
from tahq.pipeline.checkpoint.stage_file import SnapshotReader
from tahq.pipeline.engine import StageEngine
from tahq.pipeline.optimizer import low_rank_settings
from tahq.pipeline.sampling import Sampler
from tahq.pipeline.schedule.schedule import Action
from tahq.pipeline.stage import PRODUCTS, Stage, StagePlan
from tahq.pipeline.weight_loans import SharedBlock
from tahq.units import counted, format_size

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"

# -- one machine, by the configuration -------------------------------------------------------------------


def resolved_spec(config: ClusterConfig, tokenizer_vocab_size: int | None) -> ModelSpec:
    """The model of a resolved configuration, whose vocabulary does not depend on the tokenizer being here.

    Where a tokenizer is needed, the size of its vocabulary is checked against the model's.
    """
    vocabulary = tokenizer_vocab_size or config.model.vocab_size or 1
    spec = load_spec(config.model, vocab_size=vocabulary, seq_len=config.data.seq_len, adapter=config.adapter)
    check_layers(config, spec)
    return spec


def compute_device(config: ClusterConfig, stage: int, override: str | None) -> torch.device:
    """Where a stage computes: the command line, its host's entry, `run.device`; `auto` takes CUDA if there is any.

    A GPU becomes this thread's current one; otherwise pinning memory would open a context on the first GPU as well. It
    gets `use_repeatable_kernels`.

    Raises:
        ConfigError: a device that this machine does not have, or that cannot compute as configured.
    """
    host = config.hosts[stage] if isinstance(config.hosts, list) else None
    name = override or (host.device if host is not None and host.device != "auto" else config.run.device)
    if name == "auto":
        name = f"cuda:{stage % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    try:
        if name.startswith("cuda"):
            use_repeatable_kernels(name)
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"stage {stage}: device {name!r} cannot be used here: {reason}") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.training.precision == "fp8":
        check_fp8_units(device)
    if config.memory.residual == "bf16" and autocast_dtype(config, device) != torch.bfloat16:
        raise ConfigError(
            f"memory.residual: bf16 needs products in bf16, and training.precision: auto is fp32 on {device}; set "
            "training.precision: bf16, or memory.residual: fp32"
        )
    return device


def use_repeatable_kernels(device: torch.device | str) -> None:
    """Make torch compute the same bits from the same inputs each time; call it before CUDA is first used, on a GPU.

    Without this the backward of flash attention adds up the gradient of Q by atomics, in the order in which blocks
    happen to finish, so no CUDA run could be repeated or resumed to the bit; the memory-efficient kernel may do the
    same, and cuDNN's is left out. The price is time and a workspace: flash attention keeps ⌈multiprocessors / (B · H)⌉
    partial sums of that gradient, in fp32. So most attention has a backward of our own (`models/attention_kernels`).
    An operator that has no repeatable form raises.

    What else a step uses is repeatable in any case. In particular the embedding's backward has no atomics: up to 3072
    tokens it adds rows that collide one after the other, beyond that it sorts tokens and adds each one's rows in order.
    """
    torch.set_deterministic_debug_mode("error")  # as `use_deterministic_algorithms`, which imports the compiler first
    # would write every new tensor once more
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if _CUBLAS_WORKSPACE not in os.environ:
        # cuBLAS needs a workspace for each stream, which torch gives it in any case. Yet torch's first product insists
        # on this variable, and every later one that finds it parses it, which takes the host 50 to 150 µs.
        os.environ[_CUBLAS_WORKSPACE] = ":4096:8"
        try:
            torch.ones(2, 2, device=device).mm(torch.ones(2, 2, device=device))
        finally:
            del os.environ[_CUBLAS_WORKSPACE]


def offloaded(config: ClusterConfig, stage: int, device: torch.device) -> frozenset[Offload]:
    """What a stage on this device keeps in host memory; ConfigError: `master`, but its products are in fp32."""
    which = config.memory.offload_of(stage)
    if "master" in which and autocast_dtype(config, device) is None:
        raise ConfigError(f"stage {stage}: memory.offload: {NEEDS_BF16}; this stage computes in fp32 on {device}")
    return which


def snapshots_folder(config: ClusterConfig) -> Path:
    """Where a run's checkpoints lie on this machine."""
    return Path(config.run.dir) / config.run.name / "snapshots"


# -- modules -----------------------------------------------------------------------------------------


def chunk_module(
    config: ClusterConfig,
    spec: ModelSpec,
    chunk: int,
    *,
    device: torch.device,
    random: RandomContext,
    weights: bool = True,
    filled: Callable[[int], None] = lambda numel: None,
    replica: int = 0,
) -> ModelSlice:
    """The module of one chunk: a slice of the model, or under `emulate.sleep` a slice that only takes time.

    `weights` False leaves them uninitialised, for a checkpoint to fill; `filled` as of `build_slice`; of weights that
    replicas share, those of `replica`.
    """
    blocks = block_ranges(config, spec)[chunk]
    stage = chunk % config.pipeline.stages
    if config.emulate.sleep is not None:
        whole_s = config.emulate.sleep.of(stage)
        forward_s, backward_s = (seconds / config.pipeline.chunks for seconds in whole_s)
        return SleepingSlice(spec, blocks, forward_s, backward_s, device=device, random=random)
    which, memory = offloaded(config, stage, device), HostMemory(device)
    copies = autocast_dtype(config, device) if matrix_dtype(config, device) == torch.float32 else None
    copies = None if config.training.precision == "fp8" else copies
    shares = shares_of(spec, slice_parameters(spec, blocks), config.pipeline.replicas, config.shards).values()
    if owners := [share.owner for share in shares if share.keeps_alone]:
        replicas = config.pipeline.replicas
        place: Callable[..., Any] = partial(SharedBlock, owners=iter(owners), replica=replica, replicas=replicas)
    else:
        place = partial(place_on_host, which=which)
    placed = partial(place, memory=memory, copies=copies)
    module = _slice(config, spec, blocks, device, random, weights, filled, placed if which or owners else None)
    keep_as_configured(config, module, stage)
    if which or owners:
        offload_blocks(module, which, memory)
    return module


def _slice(
    config: ClusterConfig,
    spec: ModelSpec,
    blocks: BlockRange | Parts,
    device: torch.device,
    random: RandomContext,
    weights: bool,
    filled: Callable[[int], None] = lambda numel: None,
    placed: Callable[[torch.nn.Module], None] | None = None,
) -> ModelSlice:
    seed, settings = config.run.seed, low_rank_settings(config.training, config.run.seed)
    if settings is not None:
        build: Callable[..., ModelSlice] = partial(build_low_rank_slice, settings=settings, placed=placed)
    else:
        placed = placed or (lambda block: None)
        build = partial(build_slice, matrices=matrix_dtype(config, device), placed=placed)
    return build(spec, blocks, seed=seed, device=device, random=random, weights=weights, filled=filled)


def keep_as_configured(config: ClusterConfig, module: ModelSlice, stage: int, micro_batch: int | None = None) -> None:
    """Make a stage's slice keep what `memory` says of a micro-batch, and multiply as `training.precision` says.

    `micro_batch`: its samples; None: as configured.

    Raises:
        ModelError: `memory.activations` has no code for the model's blocks.
    """
    level = config.memory.recompute_of(stage)
    if config.training.compile:
        module.checkpoint_blocks = level == "block"
    else:
        recompute(module, level, fuses=config.memory.activations == "none")
    attend_in_chunks(module, config.memory.attention_chunks)
    module.residual = torch.bfloat16 if config.memory.residual == "bf16" else None
    module.loss_chunks = loss_chunks(config, module.spec, micro_batch or config.training.micro_batch)
    module.z_loss = config.training.z_loss
    if config.memory.activations == "coat":
        use_fp8_flow(module, config.memory.coat)
    elif config.memory.activations == "agoq":
        store_inputs(module, config.memory.agoq, config.memory.agoq.bits_of(stage))
    if config.training.compile:
        compile_blocks(module)
    elif config.training.precision == "fp8":
        use_fp8_products(module, config.training.fp8)
    elif config.memory.activations == "none" and not config.training.is_low_rank and module.spec.layout.layers_like:
        # DoRA's norms of weights are made once a step, by more than a cast
        can_record = not (config.adapter is not None and config.adapter.dora) and next(module.parameters()).is_cuda
        module.graphs = BlockGraphs(module) if can_record else None


def _fetch_weights(spec: ModelSpec, ranges: list[BlockRange], working: Callable[[str], None]) -> None:
    """Download the files of these blocks' weights, if the model is on the Hub."""
    names = {name for blocks in ranges for name in slice_parameters(replace(spec, adapter=None), blocks)}
    if spec.tied and HEAD_WEIGHT in names:
        names = names - {HEAD_WEIGHT} | {spec.layout.embedding_weight}

    def told(file: str, done: int, whole: int) -> None:
        working(f"downloading {file}, {format_size(done)} of {format_size(whole)}")

    FolderWeights.find(spec.path, spec.layout).fetch(names, told)


# -- the stage ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageData:
    """Tokenizer and samples; first and last stage have them."""

    tokenizer: Tokenizer
    dataset: Dataset
    validation: tuple[ValidationSet, ...]

    @classmethod
    def load(cls, config: ClusterConfig) -> "StageData":
        """Read what `data:` names; validation sets only if the run evaluates them."""
        tokenizer = load_tokenizer(config.data)
        training = config.training
        dataset = load_dataset(config.data, tokenizer, training.global_batch, are_preferences=training.dpo is not None)
        evaluates = training.eval_every is not None
        return cls(tokenizer, dataset, load_validation(config.data, dataset, tokenizer) if evaluates else ())

    @property
    def fingerprint(self) -> str:
        """See `fingerprint_of`."""
        return fingerprint_of(self.dataset, self.validation)


@dataclass(frozen=True)
class Assembly:
    """One stage's parts, before they are joined to others.

    `data` is None on a stage that needs none; `reader` is None without a checkpoint to continue from.
    """

    assign: Assign
    config: ClusterConfig
    device: torch.device
    modules: Mapping[int, ModelSlice]
    data: StageData | None
    reader: SnapshotReader | None

    @classmethod
    def build(
        cls, assign: Assign, config: ClusterConfig, device: torch.device, working: Callable[[str], None]
    ) -> "Assembly":
        """Read or draw this stage's weights, and read the data if the stage needs it.

        `working` is called with the present activity.

        Raises:
            UserError: the configuration does not fit this machine.
        """
        stage, stages = assign.stage, config.pipeline.stages
        if config.model.path is not None:  # before its tokenizer, so that a message names this key
            require_folder(local_folder(config.model.path))
        working("reading data")
        data = StageData.load(config) if stage % stages in (0, stages - 1) else None
        working("building the model")
        spec = resolved_spec(config, data.tokenizer.vocab_size if data is not None else None)
        _check_room(config, spec, stage)
        folder = Path(config.run.dir) / config.run.name / assign.snapshot
        reader = SnapshotReader(folder, assign.snapshot_files, working) if assign.snapshot else None
        random = RandomContext(config.run.seed)
        chunks, ranges = chunks_of(config, stage), block_ranges(config, spec)
        num_weights = sum(shape.numel() for c in chunks for shape in slice_parameters(spec, ranges[c]).values())
        if spec.path:
            _fetch_weights(spec, [ranges[chunk] for chunk in chunks], working)
        filled = counted(working, "building the model" if spec.folder is None else "loading weights", 4 * num_weights)
        modules = {
            chunk: chunk_module(
                *(config, spec, chunk),
                device=device,
                random=random,
                weights=reader is None,
                filled=lambda numel: filled(4 * numel),
                replica=stage // stages,
            )
            for chunk in chunks
        }
        return cls(assign, config, device, modules, data, reader)

    def greeting(self, address: str) -> Hello:
        """HELLO: hashes and sizes for the coordinator to compare, and this worker's address.

        Raises:
            SnapshotError: a file of the checkpoint is damaged.
        """
        data, batches, modules = self.data, self._batches, self.modules.values()
        num_parameters = sum(p.numel() for module in modules for p in module.parameters())
        num_low_rank = sum(weight.numel() for module in modules for weight in low_rank_weights(module).values())
        return Hello(
            stage=self.assign.stage,
            version=__version__,
            config_hash=config_hash(self.config),
            tokenizer_hash=data.tokenizer.fingerprint if data is not None else "",
            data_hash=data.fingerprint if data is not None else "",
            address=address,
            device=str(self.device),
            torch_version=str(torch.__version__),
            num_parameters=num_parameters + num_low_rank,
            num_train_samples=data.dataset.num_train_samples if data is not None else 0,
            next_sample=batches.cursor(self.assign.start_step).sample if batches is not None else 0,
            arithmetic_changes=self._arithmetic_changes(),
            data_notes=data.dataset.notes if data is not None else [],
            start_step=self.assign.start_step,
            memory_nbytes=free_bytes(self.device) + sum(map(device_nbytes, chain(*(m.parameters() for m in modules)))),
            products=PRODUCTS[self._autocast],
            emulates_bf16=self._autocast == torch.bfloat16 and lacks_bf16(self.device),
        )

    def connect(
        self, plan: Plan, transports: Mapping[int, Transport], on_action: Callable[[int, Action], None] | None = None
    ) -> Stage:
        """Join the parts to the links: a stage ready for `plan.start_step`.

        Raises:
            SnapshotError: the checkpoint lacks a tensor of this stage.
        """
        config = self.config
        stage = Stage(
            StagePlan(
                stage=self.assign.stage,
                run=self.assign.run_id,
                seed=config.run.seed,
                seq_len=config.data.seq_len,
                may_be_packed=config.data.may_be_packed,
                total_steps=plan.total_steps,
                training=config.training,
                pipeline=config.pipeline,
                wire=config.wire,
                gradients=config.memory.gradients,
                shards=config.shards,
                tie=config.model.tie == "sync",
                sum_codecs=config.sum_codecs,
                num_frozen=frozen_chunks(config, next(iter(self.modules.values())).spec),
            ),
            self.modules,
            self._batches,
            transports,
            device=self.device,
            autocast=self._autocast,
            order=self._sample_order(plan),
            cache_folder=Path(config.run.dir) / config.run.name / "cache",
            on_action=on_action,
            beside=True,
        )
        if self.reader is not None:
            stage.load(self.reader.tensor, self.reader.names())
        return stage

    def sampler(self, engine: StageEngine) -> Sampler | None:
        """Writes the run's samples on this stage; None: the run has none."""
        training, data = self.config.training, self.config.data
        if training.samples is None:
            return None
        num_frames = len(data.validation_sets) * training.eval_batches * training.num_micro_batches
        tokenizer = None if self.data is None else self.data.tokenizer
        return Sampler(engine, training.samples, data.seq_len, num_frames, tokenizer)

    def meta(self, step: int) -> StageMeta:
        """The description of this stage's part of the checkpoint after `step` steps."""
        blocks = [module.parts.blocks for module in self.modules.values()]
        return StageMeta(
            step=step,
            stage=self.assign.stage,
            num_stages=self.config.pipeline.num_workers,
            block_start=min(each.start for each in blocks),
            block_stop=max(each.stop for each in blocks),
            cursor=asdict(self._batches.cursor(step) if self._batches is not None else Cursor(step)),
            config_hash=self.assign.config_hash,
            versions={"tahq": __version__, "torch": str(torch.__version__)},
            arithmetic=self._arithmetic,
        )

    @cached_property
    def _autocast(self) -> torch.dtype | None:
        return autocast_dtype(self.config, self.device)

    @cached_property
    def _arithmetic(self) -> dict[str, str]:
        return arithmetic_of(self.device, self.config.wire.backend)

    def _arithmetic_changes(self) -> list[str]:
        """Differences between the hardware and libraries here and those that computed the checkpoint."""
        if self.reader is None:
            return []
        mine = self._own_file
        metas = [self.reader.stage_meta(file) for file in ([mine] if mine is not None else self.reader.files)]
        changes = (change for meta in metas for change in arithmetic_differences(meta.arithmetic, self._arithmetic))
        return list(dict.fromkeys(changes))

    @property
    def _own_file(self) -> str | None:
        """This stage's file of the checkpoint, if the same stages wrote it and it is here."""
        mine = own_file(self.assign, self.config.pipeline.num_workers)
        return mine if self.reader is not None and mine in self.reader.files else None

    def _sample_order(self, plan: Plan) -> SampleOrder:
        """The samples of each step; a stage without data has them from the plan."""
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

    @cached_property
    def _batches(self) -> BatchSource | None:
        """Samples from the checkpoint's place in the data on; None on a stage that needs none."""
        if self.data is None:
            return None
        origin = BEGINNING
        if self.reader is not None:
            # if this stage has no file, that of stage 0, which reads data in every run
            stage_0 = (name for name in sorted(self.assign.snapshot_files) if name.startswith("stage-000"))
            file = self._own_file or next(stage_0)
            origin = Cursor(**self.reader.stage_meta(file).cursor)
        training = self.config.training
        return BatchSource(
            self.data.dataset,
            seed=self.config.run.seed,
            global_batch=training.global_batch,
            micro_batch=training.micro_batch,
            origin=origin,
            sets=self.data.validation,
        )


def _check_room(config: ClusterConfig, spec: ModelSpec, stage: int) -> None:
    """Refuse a run whose checkpoint does not fit on the disk; stages on one machine share it, and stage 0 checks."""
    are_together = isinstance(config.hosts, str)
    if config.emulate.sleep is not None or (are_together and stage > 0):
        return
    stages = range(config.pipeline.num_workers) if are_together else [stage]
    nbytes = sum(stage_estimate(config, spec, number, device="cpu").snapshot for number in stages)
    check_room(snapshots_folder(config), nbytes)
