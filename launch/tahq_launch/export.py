"""`tahq export`: a checkpoint of a run as a Hugging Face folder, or its adapters as one of peft."""

import contextlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_from_json
from tahq.errors import UserError
from tahq.hub import local_folder
from tahq.memory.galore.stored_weight import snapshot_weight
from tahq.models.adapters.lora import adapted_layers, merged_weight
from tahq.models.adapters.peft_folder import export_adapter
from tahq.models.export import export_folder
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec, require_folder, untying_note
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice, fill_weights
from tahq.models.weights import sum_of_bits
from tahq.pipeline.checkpoint.stage_file import SnapshotReader
from tahq.pipeline.update import check_frozen, frozen_dtype
from tahq_launch.run_source import source_of
from tahq_launch.runs.pull import Which, checkpoint_of, fetch
from tahq_launch.start.run_folder import RunFolder


def export_run(
    run: Path, out: Path, *, step: Which = None, max_shard_nbytes: int, is_adapter: bool = False
) -> list[str]:
    """Write a run's model where `AutoModelForCausalLM.from_pretrained` loads it; returns lines with its step and size.

    Files of the checkpoint that are not here are fetched from their hosts first. Adapters are merged into the model's
    weights.

    Args:
        run: the run's folder, such as runs/demo.
        out: the folder to make; must be new or empty.
        step: of the checkpoint.
        max_shard_nbytes: bytes of tensors per file.
        is_adapter: write the adapters alone, where `peft.PeftModel.from_pretrained` loads them.

    Raises:
        UserError: there is no such checkpoint, or it has no adapters, or weights that were not trained are not here.
    """
    folder, manifest = checkpoint_of(run, step)
    if absent := [entry for entry in manifest.files if not (folder / entry.file).is_file()]:
        fetch(run, folder, manifest, absent)
    config = config_from_json(json.dumps(manifest.config))
    if is_adapter and config.adapter is None:
        raise UserError(f"{run} trains the model's own weights, so it has no adapters; leave --adapter out")
    spec, tokenizer = source_of(RunFolder(run), config)
    with contextlib.closing(SnapshotReader(folder, manifest.sha256)) as reader:
        if is_adapter:
            read = partial(snapshot_weight, read=reader.tensor)
            num_parameters, what = export_adapter(spec, read, out, tokenizer, config.model.path), "adapters"
        else:
            weights, what = _Weights(config, spec, reader), "model"
            num_parameters = export_folder(
                *(_without_adapters(spec), weights.read, out, tokenizer, max_shard_nbytes),
                matrices=_matrix_dtype(config, spec),
            )
    note = untying_note(config.model, spec)
    line = f"{out}: the {what} of {run} after step {manifest.step}, {num_parameters:,} parameters"
    return [line, *([f"note: {note}"] if note else [])]


class _Weights:
    """A model's weights in fp32: from the checkpoint, or those that were not trained from where the run had them."""

    def __init__(self, config: ClusterConfig, spec: ModelSpec, reader: SnapshotReader) -> None:
        self._reader, self._names, self._spec = reader, reader.names(), spec
        self._seed, self._path = config.run.seed, config.model.path
        model = ModelSlice(spec, BlockRange(0, spec.num_layers, spec.num_layers), RandomContext(0))
        self._shapes = {name: parameter.shape for name, parameter in model.canonical_parameters().items()}
        self._adapted = dict(adapted_layers(model))

    def read(self, name: str) -> torch.Tensor:
        """A weight by its canonical name, with what its adapter adds."""
        if self._spec.is_trained(name):
            return snapshot_weight(name, self._reader.tensor)
        weight, path = self._frozen(name), name.removesuffix(".weight")
        if path not in self._adapted:
            return weight
        assert self._spec.adapter is not None, "a layer has one"
        read = partial(snapshot_weight, read=self._reader.tensor)
        return merged_weight(self._adapted[path], path, weight, read, self._spec.adapter.scale)

    def _frozen(self, name: str) -> torch.Tensor:
        spec = self._spec
        if self._path is not None:  # the run's own folder has no weights
            folder = local_folder(self._path)
            require_folder(folder)
            spec = replace(spec, folder=folder, path=self._path)
        weight = torch.empty(self._shapes[name])
        fill_weights(spec, {name: weight}, self._seed)
        dtype = frozen_dtype(name, self._names)
        check_frozen(name, sum_of_bits(weight.to(dtype)), dtype, self._reader.tensor, self._names)
        return weight


def _without_adapters(spec: ModelSpec) -> ModelSpec:
    """The model to write; beside adapters a tied head stays tied."""
    if spec.adapter is None:
        return spec
    return replace(spec, adapter=None, tie="sync" if spec.tied else spec.tie)


def _matrix_dtype(config: ClusterConfig, spec: ModelSpec) -> torch.dtype:
    """The type of matrices: as they were trained, or beside adapters as they were stored before."""
    stored = getattr(spec.hf_config, "dtype", None)
    is_bf16 = config.training.has_bf16_weights or (spec.adapter is not None and stored == torch.bfloat16)
    return torch.bfloat16 if is_bf16 else torch.float32
