"""`tahq export`: a checkpoint of a run as a Hugging Face folder."""

import contextlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_from_json
from tahq.hub import local_folder
from tahq.memory.galore.stored_weight import snapshot_weight
from tahq.models.export import export_folder
from tahq.models.model_spec import ModelSpec, require_folder, untying_note
from tahq.models.partition import BlockRange
from tahq.models.slice import fill_weights, slice_parameters
from tahq.pipeline.checkpoint.stage_file import SnapshotReader
from tahq.pipeline.update import check_frozen, sum_of_bits
from tahq.worker.assembly import matrix_dtype
from tahq_launch.run_source import source_of
from tahq_launch.runs.pull import checkpoint_of, fetch
from tahq_launch.start.run_folder import RunFolder


def export_run(run: Path, out: Path, *, step: int | None = None, max_shard_nbytes: int) -> list[str]:
    """Write a run's model where `AutoModelForCausalLM.from_pretrained` loads it; returns lines with its step and size.

    Files of the checkpoint that are not here are fetched from their hosts first.

    Args:
        run: the run's folder, such as runs/demo.
        out: the folder to make; must be new or empty.
        step: of the checkpoint; None: the newest.
        max_shard_nbytes: bytes of tensors per file.
    """
    folder, manifest = checkpoint_of(run, step)
    if absent := [entry for entry in manifest.files if not (folder / entry.file).is_file()]:
        fetch(run, folder, manifest, absent)
    config = config_from_json(json.dumps(manifest.config))
    spec, tokenizer = source_of(RunFolder(run), config)
    with contextlib.closing(SnapshotReader(folder, manifest.sha256)) as reader:
        read = partial(_weight, config, spec, reader)
        num_parameters = export_folder(spec, read, out, tokenizer, max_shard_nbytes, matrices=matrix_dtype(config))
    note = untying_note(config.model, spec)
    line = f"{out}: the model of {run} after step {manifest.step}, {num_parameters:,} parameters"
    return [line, *([f"note: {note}"] if note else [])]


def _weight(config: ClusterConfig, spec: ModelSpec, reader: SnapshotReader, name: str) -> torch.Tensor:
    """A model's weight in fp32: from the checkpoint, or if it is not trained, from where the run had it."""
    if spec.is_trained(name):
        return snapshot_weight(name, reader.tensor)
    if config.model.path is not None:  # the run's own folder has no weights
        folder = local_folder(config.model.path)
        require_folder(folder)
        spec = replace(spec, folder=folder, path=config.model.path)
    shape = slice_parameters(spec, BlockRange(0, spec.num_layers, spec.num_layers))[name]
    weight = torch.empty(shape, dtype=matrix_dtype(config) if len(shape) >= 2 else torch.float32)
    fill_weights(spec, {name: weight}, config.run.seed)
    check_frozen(name, sum_of_bits(weight), reader.tensor)
    return weight.float()
