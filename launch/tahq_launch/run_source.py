"""Model and tokenizer of a run, of which it keeps copies.

A run's folder is enough: at each start `keep_source` copies what export needs of `model.path` and `data.tokenizer` into
`source/`. Runs started by version 0.1 have no such copies and need both at their original paths.
"""

import shutil

from tahq.config.cluster import ClusterConfig
from tahq.data.config import DataConfig
from tahq.data.tokenizer import Tokenizer, load_tokenizer
from tahq.errors import DataError, ModelError, UserError
from tahq.models.config import ModelConfig
from tahq.models.export import copy_generation_config
from tahq.models.model_spec import CONFIG_FILE, ModelSpec, load_spec, untying_note
from tahq_launch.start.run_folder import RunFolder

_TOKENIZER = "tokenizer"
_MAX_TOKENIZER_NBYTES = 2**28


def keep_source(run: RunFolder, config: ClusterConfig) -> list[str]:
    """Copy what `tahq export` needs of the model's folder and the tokenizer into the run's folder; returns notes."""
    spec, tokenizer = _load(config, config.model, config.data)
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


def source_of(run: RunFolder, config: ClusterConfig) -> tuple[ModelSpec, Tokenizer]:
    """Model and tokenizer from the run's copies, or from the paths in its configuration."""
    model, data = config.model, config.data
    if model.path is not None and (run.source / CONFIG_FILE).is_file():
        model = model.model_copy(update={"path": str(run.source)})
    if (run.source / _TOKENIZER).is_dir():
        data = data.model_copy(update={"tokenizer": str(run.source / _TOKENIZER)})
    try:
        return _load(config, model, data)
    except (DataError, ModelError) as error:
        if run.source.exists():
            raise
        raise UserError(
            f"{run.path} has no copy of its model and tokenizer, because an older version started it; run tahq export "
            f"in the directory where the run was started: {error}"
        ) from error


def _load(config: ClusterConfig, model: ModelConfig, data: DataConfig) -> tuple[ModelSpec, Tokenizer]:
    tokenizer = load_tokenizer(data)
    sizes = {"vocab_size": tokenizer.vocab_size, "seq_len": data.seq_len}
    return load_spec(model, **sizes, needs_weights=False, adapter=config.adapter), tokenizer
