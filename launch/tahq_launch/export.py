"""`tahq export`: the newest snapshot of a run as a Hugging Face folder.

Composes what already exists: the manifest says which files and which configuration, the reader
verifies and reads them one tensor at a time, and `tahq.models.export` writes shards as they fill.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tahq.config.file import config_from_json
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import UserError
from tahq.memory.galore.snapshot_weight import snapshot_weight
from tahq.models.export import export_folder
from tahq.models.model_spec import load_spec
from tahq.pipeline.checkpoint.manifest import Manifest, read_latest, read_manifest, snapshot_folder, snapshot_folders
from tahq.pipeline.checkpoint.reader import SnapshotReader
from tahq_launch.run_folder import RunFolder

MODEL_PREFIX = "model/"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was exported: the model after `step` steps."""

    step: int
    num_parameters: int
    out: Path


def export_run(run: Path, out: Path, *, step: int | None = None, max_shard_nbytes: int) -> Exported:
    """Write a run's model where `AutoModelForCausalLM.from_pretrained` loads it.

    Args:
        run: the run's folder, such as runs/demo.
        out: the folder to make; must not have anything in it.
        step: which snapshot; None: the newest.
        max_shard_nbytes: bytes of tensors a file.

    Raises:
        UserError: there is no such run or snapshot, a file of it is damaged or on another machine, or
            `out` is taken.
    """
    folder, manifest = _snapshot(RunFolder(run), step)
    config = config_from_json(json.dumps(manifest.config))
    tokenizer = load_tokenizer(config.data)
    spec = load_spec(config.model, vocab_size=tokenizer.vocab_size, seq_len=config.data.seq_len)
    counted = _ParameterCount()
    with contextlib.closing(SnapshotReader(folder, manifest.sha256)) as reader:
        export_folder(spec, counted.passing(_model_tensors(reader)), out, tokenizer, max_shard_nbytes)
    return Exported(manifest.step, counted.total, out)


def _snapshot(run: RunFolder, step: int | None) -> tuple[Path, Manifest]:
    if not run.path.is_dir():
        raise UserError(f"{run.path} is no run's folder; expected one such as runs/demo")
    if step is None:
        return read_latest(run.snapshots)
    if step not in snapshot_folders(run.snapshots):
        there = ", ".join(map(str, snapshot_folders(run.snapshots))) or "none"
        raise UserError(f"{run.path} has no snapshot after step {step}; there are: {there}")
    folder = snapshot_folder(run.snapshots, step)
    return folder, read_manifest(folder)


def _model_tensors(reader: SnapshotReader) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(reader.names()):
        if name.startswith(MODEL_PREFIX):
            canonical = name.removeprefix(MODEL_PREFIX)
            yield canonical, snapshot_weight(canonical, reader.tensor)


class _ParameterCount:
    """Counts parameters as they pass."""

    def __init__(self) -> None:
        self.total = 0

    def passing(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self.total += tensor.numel()
            yield name, tensor
