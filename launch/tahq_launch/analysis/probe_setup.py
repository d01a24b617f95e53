"""Model, data and optimizer of a probe, from the cluster.yaml of a run.

The same parts as in a run's stages (data, slices, optimizer, learning rate, clipping), all in this process. Weights
are the run's random ones or its folder's, those of another folder, or of the run's newest checkpoint.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from tahq.comm.topology import Position, total_steps
from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config
from tahq.config.stage_estimate import autocast_dtype, block_ranges, matrix_dtype
from tahq.coordinator.steps import clip_factor, global_norm
from tahq.data.batches import BatchSource
from tahq.data.dataset import Dataset
from tahq.data.sample_order import Cursor
from tahq.errors import ConfigError, UserError, brief
from tahq.memory.stored_slice import build_slice
from tahq.models.experts.load_balance import router_loss_of
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec
from tahq.models.slice import HEAD_WEIGHT
from tahq.models.weights import FolderWeights
from tahq.pipeline.checkpoint.manifest import read_latest
from tahq.pipeline.checkpoint.resume import compare_configs
from tahq.pipeline.checkpoint.stage_file import SnapshotReader
from tahq.pipeline.cut_model import CutModel, ProbedWire
from tahq.pipeline.update import StageUpdate
from tahq.quant import CodecSpec
from tahq.worker.assembly import (
    StageData,
    compute_device,
    keep_as_configured,
    resolved_spec,
)
from tahq_launch.start.prepared_run import continued_config, resolved_run, with_run_name
from tahq_launch.start.run_folder import RunFolder

RAW = "raw:dtype=fp32"
PAPER_TILES = ("tah:group=64", "tah:group=32")
_SEPARATOR = re.compile(r"\s*/\s*(?=[a-z])")  # the slash in int4=4/5 is followed by a digit


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """One command line of `tahq probe`.

    Attributes:
        wires: pairs of codecs, ``tah / fixed:bits=8``; empty: the run's, and the paper's tiles.
        steps: probed steps.
        batches: per probed step.
        warm_up: training steps before.
        weights: Hugging Face folder to read them from.
    """

    config_path: Path
    overrides: tuple[str, ...] = ()
    wires: tuple[str, ...] = ()
    steps: int = 4
    batches: int = 4
    warm_up: int = 0
    weights: Path | None = None
    resume: bool = False
    device: str | None = None


@dataclass(frozen=True, slots=True)
class ProbeSetup:
    """A model that can be probed, with its data; `update` takes the optimizer step of a given number."""

    config: ClusterConfig
    model: CutModel
    batches: BatchSource
    update: Callable[[int], None]
    start_step: int
    wires: tuple[ProbedWire, ...]
    weights: str
    """Their origin, in words."""

    @property
    def boundary(self) -> tuple[int, int, int]:
        """[B, S, C] at each cut."""
        return self.config.training.micro_batch, self.config.data.seq_len, self.model.hidden_size


@dataclass(frozen=True, slots=True)
class _Start:
    """The configuration, and the checkpoint if there is one."""

    config: ClusterConfig
    reader: SnapshotReader | None = None
    cursor: Cursor = field(default_factory=Cursor)


def open_setup(request: ProbeRequest) -> ProbeSetup:
    """Read the configuration, the data and the weights, and build the model."""
    if request.resume and request.weights is not None:
        raise UserError("--weights and --resume both say where the weights come from; give one of them")
    start = _start(request)
    config, training = start.config, start.config.training
    if request.resume and training.is_low_rank:
        raise UserError(
            f"{config.run.name} was trained by {training.optimizer}, whose weights and subspaces a probe cannot "
            "resume; write its model to a folder with tahq export, and give that with --weights"
        )
    if training.dpo is not None:
        raise UserError("tahq probe takes the loss of tokens; probe without training.dpo, on prompts and responses")
    if config.pipeline.stages == 1:
        raise UserError("pipeline.stages is 1, so nothing crosses a wire; probe with --set pipeline.stages=2 or more")
    wires = tuple(map(parse_wire, request.wires)) or default_wires(config)
    for wire in wires:
        wire.codecs()  # refuses a codec that a probe cannot use
    device = compute_device(config, 0, request.device)
    if config.run.threads is not None:  # the order of sums changes their last bits
        torch.set_num_threads(config.run.threads)
    data, seed, start_step = StageData.load(config), config.run.seed, start.cursor.step
    batches = BatchSource(
        data.dataset,
        seed=seed,
        global_batch=training.global_batch,
        micro_batch=training.micro_batch,
        origin=start.cursor,
    )
    spec = resolved_spec(config, data.tokenizer.vocab_size)
    if request.weights is not None:
        found = FolderWeights.find(str(request.weights), spec.layout)
        spec = replace(spec, folder=request.weights, path=str(request.weights), tied=HEAD_WEIGHT not in found.file_of)
    model = _build_model(config, spec, device, with_weights=start.reader is None)
    update = _update(start, model, data.dataset)
    weights = f"from {spec.folder}" if spec.folder is not None else "random"
    if start.reader is not None:
        weights = f"the run's after {start_step} steps"
    return ProbeSetup(config, model, batches, update, start_step, wires, weights)


def parse_wire(text: str) -> ProbedWire:
    """The codecs of ``ACTIVATIONS / GRADIENTS``, such as ``tah:group=32 / fixed:bits=8``, with all parameters."""
    specs = _SEPARATOR.split(text.strip())
    if len(specs) != 2:
        raise ConfigError(f"--codec {brief(repr(text))}: expected 'FORWARD / BACKWARD', as in 'tah / fixed:bits=8'")
    return ProbedWire(*(str(CodecSpec.parse(spec)) for spec in specs))


def default_wires(config: ClusterConfig) -> tuple[ProbedWire, ...]:
    """The run's own wire, then the paper's tiles of 64 and 32 forward, with raw and with the run's gradients."""
    own = config.wire.gradients
    pairs = [(config.wire.activations, own), *((tile, gradients) for gradients in (RAW, own) for tile in PAPER_TILES)]
    return tuple(dict.fromkeys(parse_wire(" / ".join(pair)) for pair in pairs))


def _start(request: ProbeRequest) -> _Start:
    if not request.resume:
        return _Start(resolved_run(load_config(request.config_path, request.overrides)))
    given = load_config(request.config_path, with_run_name(request.config_path, request.overrides, resume=True))
    folder = RunFolder(Path(given.run.dir) / given.run.name)
    folder.check_startable(resume=True)
    snapshot, manifest = read_latest(folder.snapshots)
    config = resolved_run(continued_config(manifest.config, given))
    compare_configs(manifest.config, config.model_dump(mode="json")).check()
    reader = SnapshotReader(snapshot, manifest.sha256)
    first = next(file for file in sorted(manifest.sha256) if file.startswith("stage-000"))
    return _Start(config, reader, Cursor(**reader.stage_meta(first).cursor))


def _build_model(config: ClusterConfig, spec: ModelSpec, device: torch.device, *, with_weights: bool) -> CutModel:
    seed, random, matrices = config.run.seed, RandomContext(config.run.seed), matrix_dtype(config, device)
    slices = [
        build_slice(spec, blocks, seed=seed, device=device, random=random, weights=with_weights, matrices=matrices)
        for blocks in block_ranges(config, spec)
    ]
    for chunk, part in enumerate(slices):
        keep_as_configured(config, part, chunk % config.pipeline.stages)
    num_pieces = partial(config.training.num_pieces, seq_len=config.data.seq_len)
    dtype, router_loss = autocast_dtype(config, device), router_loss_of(config.training.router_aux_loss, spec)
    return CutModel(slices, seed=seed, autocast=dtype, num_pieces=num_pieces, router_loss=router_loss)


def _update(start: _Start, model: CutModel, dataset: Dataset) -> Callable[[int], None]:
    """The optimizer step as a run takes it: global clipping, then that step's learning rate."""
    training, position = start.config.training, Position(start.cursor.step, start.cursor.sample)
    total = total_steps(training.steps, training.epochs, dataset.num_train_samples, training.global_batch, position)
    update = StageUpdate(training, model.weights, model.is_decayed, total, model.tied, seed=start.config.run.seed)
    if start.reader is not None:
        update.load(start.reader.tensor, set(start.reader.names()))
    return lambda step: update.apply(step, clip_factor(global_norm(update.squared_norms()), training.clip_norm))
