"""`tahq export`: a checkpoint of a run as a Hugging Face folder.

A run's folder is enough: at each start `keep_source` copies what export needs of `model.path` and `data.tokenizer` into
`source/`. Runs started by version 0.1 have no such copies and need both at their original paths.
"""

import contextlib
import json
import shutil
from pathlib import Path

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_from_json
from tahq.data.config import DataConfig
from tahq.data.tokenizer import Tokenizer, load_tokenizer
from tahq.errors import DataError, ModelError, UserError
from tahq.memory.galore.stored_weight import snapshot_weight
from tahq.models.config import ModelConfig
from tahq.models.export import copy_generation_config, export_folder
from tahq.models.model_spec import CONFIG_FILE, ModelSpec, load_spec, untying_note
from tahq.pipeline.checkpoint.manifest import Manifest, read_latest, read_manifest, snapshot_folder, snapshot_folders
from tahq.pipeline.checkpoint.stage_file import SnapshotReader
from tahq.worker.assembly import matrix_dtype
from tahq_launch.start.run_folder import RunFolder

_TOKENIZER = "tokenizer"
_MAX_TOKENIZER_NBYTES = 2**28


def keep_source(run: RunFolder, config: ClusterConfig) -> list[str]:
    """Copy what `export_run` needs of the model's folder and the tokenizer into the run's folder; returns notes."""
    spec, tokenizer = _load(config.model, config.data)
    notes = [note for note in (untying_note(config.model, spec),) if note]
    partial = run.path / ".source.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if spec.folder is not None:
            shutil.copyfile(spec.folder / CONFIG_FILE, partial / CONFIG_FILE)
            copy_generation_config(spec.folder, partial)
        if config.data.tokenizer != "bytes":
            tokenizer.save(partial / _TOKENIZER)
            if sum(file.stat().st_size for file in partial.rglob("*")) > _MAX_TOKENIZER_NBYTES:
                shutil.rmtree(partial / _TOKENIZER)
                notes.append(f"tahq export will need data.tokenizer {config.data.tokenizer}: too large to copy")
        shutil.rmtree(run.source, ignore_errors=True)
        if any(partial.iterdir()):
            partial.rename(run.source)
        else:
            partial.rmdir()
    except OSError as error:
        raise UserError(f"cannot write {run.source}: {error}") from error
    return notes


def export_run(run: Path, out: Path, *, step: int | None = None, max_shard_nbytes: int) -> list[str]:
    """Write a run's model where `AutoModelForCausalLM.from_pretrained` loads it; returns lines with its step and size.

    Args:
        run: the run's folder, such as runs/demo.
        out: the folder to make; must be new or empty.
        step: of the checkpoint; None: the newest.
        max_shard_nbytes: bytes of tensors per file.
    """
    folder, manifest = _checkpoint(RunFolder(run), step)
    config = config_from_json(json.dumps(manifest.config))
    spec, tokenizer = _source(RunFolder(run), config)
    with contextlib.closing(SnapshotReader(folder, manifest.sha256)) as reader:
        num_parameters = export_folder(
            *(spec, lambda name: snapshot_weight(name, reader.tensor), out, tokenizer, max_shard_nbytes),
            matrices=matrix_dtype(config),
        )
    note = untying_note(config.model, spec)
    line = f"{out}: the model of {run} after step {manifest.step}, {num_parameters:,} parameters"
    return [line, *([f"note: {note}"] if note else [])]


def _checkpoint(run: RunFolder, step: int | None) -> tuple[Path, Manifest]:
    if not run.path.is_dir():
        raise UserError(f"{run.path} is not a run's folder; expected a folder such as runs/demo")
    if step is None:
        return read_latest(run.snapshots)
    steps = snapshot_folders(run.snapshots)
    if step not in steps:
        existing = ", ".join(map(str, steps)) or "none"
        raise UserError(f"{run.path} has no checkpoint after step {step}; it has: {existing}")
    folder = snapshot_folder(run.snapshots, step)
    return folder, read_manifest(folder)


def _source(run: RunFolder, config: ClusterConfig) -> tuple[ModelSpec, Tokenizer]:
    """Model and tokenizer from the run's copies, or from the paths in its configuration."""
    model, data = config.model, config.data
    if model.path is not None and (run.source / CONFIG_FILE).is_file():
        model = model.model_copy(update={"path": str(run.source)})
    if (run.source / _TOKENIZER).is_dir():
        data = data.model_copy(update={"tokenizer": str(run.source / _TOKENIZER)})
    try:
        return _load(model, data)
    except (DataError, ModelError) as error:
        if run.source.exists():
            raise
        raise UserError(
            f"{run.path} has no copy of its model and tokenizer, because an older version started it; run tahq export "
            f"in the directory where the run was started: {error}"
        ) from error


def _load(model: ModelConfig, data: DataConfig) -> tuple[ModelSpec, Tokenizer]:
    tokenizer = load_tokenizer(data)
    return load_spec(model, vocab_size=tokenizer.vocab_size, seq_len=data.seq_len, needs_weights=False), tokenizer
