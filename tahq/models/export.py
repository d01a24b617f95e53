"""A trained model as a Hugging Face folder: config.json, generation_config.json, sharded safetensors, the tokenizer.

Tensors stream through: at most one shard is in memory. The folder appears complete or not at all: everything is written
into a hidden sibling, flushed to disk and renamed.
"""

import copy
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file

from tahq.errors import ModelError, UserError
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import HEAD_WEIGHT, slice_parameters
from tahq.models.weights import INDEX_FILE, SINGLE_FILE, read_json

DEFAULT_SHARD_NBYTES = 4 * 10**9
GENERATION_FILE = "generation_config.json"
_MAX_GENERATION_NBYTES = 2**20


class SavedTokenizer(Protocol):
    """The part of a tokenizer that export needs."""

    end_of_document: int | None
    """The end-of-sequence token; None: there is none."""

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files."""


def copy_generation_config(source: Path, out: Path) -> None:
    """Copy generation_config.json where the source has it; ModelError if it is not a JSON object of at most 1 MiB."""
    if (source / GENERATION_FILE).is_file():
        read_json(source / GENERATION_FILE, _MAX_GENERATION_NBYTES)
        shutil.copyfile(source / GENERATION_FILE, out / GENERATION_FILE)


def export_folder(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, torch.Tensor]],
    out: Path,
    tokenizer: SavedTokenizer | None,
    max_shard_nbytes: int = DEFAULT_SHARD_NBYTES,
) -> None:
    """Write a folder, new or empty, that `AutoModelForCausalLM.from_pretrained` loads with the same logits.

    config.json has `tie_word_embeddings: false`, since embedding and head are two parameters; under `tie: sync` they
    are equal, so it has true and the head is left out. A model without an end-of-sequence token gets the tokenizer's.
    generation_config.json is copied from the model's folder.

    Args:
        tensors: (canonical name, tensor) of every parameter once, in any order; consumed one by one.
        tokenizer: saved into the folder, if there is one.
        max_shard_nbytes: bytes of tensors per file, unless one tensor alone has more.
        spec, out: the model, and the folder.

    Raises:
        UserError: `out` is not empty.
        ModelError: a parameter that is missing, unknown, duplicate or of another shape.
    """
    with _appearing_whole(out) as folder:
        left_out = HEAD_WEIGHT if spec.tie == "sync" else None
        kept = ((name, tensor) for name, tensor in _complete(spec, tensors) if name != left_out)
        _write_shards(folder, kept, max_shard_nbytes)
        _write_config(spec, folder, None if tokenizer is None else tokenizer.end_of_document)
        if spec.folder is not None:
            copy_generation_config(spec.folder, folder)
        if tokenizer is not None:
            tokenizer.save(folder)


def _complete(spec: ModelSpec, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, each checked as it passes; raises at the end if one is missing."""
    missing = slice_parameters(spec, BlockRange(0, spec.num_layers, spec.num_layers))
    for name, tensor in tensors:
        shape = missing.pop(name, None)
        if shape is None:
            raise ModelError(f"cannot export {name}: the model has no such parameter, or it is a duplicate")
        if tensor.shape != shape:
            raise ModelError(f"cannot export {name}: its shape is {list(tensor.shape)}, expected {list(shape)}")
        yield name, tensor
    if missing:
        raise ModelError(f"cannot export: {len(missing)} parameters are missing, first {next(iter(missing))}")


def _write_config(spec: ModelSpec, folder: Path, eos: int | None) -> None:
    config = copy.deepcopy(spec.hf_config)
    config.tie_word_embeddings = spec.tie == "sync"
    config.architectures = [spec.layout.causal_lm]
    config.dtype = "float32"
    if config.eos_token_id is None:
        config.eos_token_id = eos
    config.save_pretrained(folder)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_nbytes: int) -> None:
    """Write files of at most that size, unless one tensor alone has more, and an index if there are several."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    pending_nbytes = total_nbytes = 0

    def part(number: int) -> Path:
        return folder / f"part-{number:05d}.safetensors"

    def flush() -> None:
        shards.append(list(pending))
        save_file(pending, part(len(shards)), metadata={"format": "pt"})
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_nbytes + tensor.nbytes > max_nbytes:
            flush()
            pending_nbytes = 0
        pending[name] = tensor.detach().cpu().contiguous()
        pending_nbytes += tensor.nbytes
        total_nbytes += tensor.nbytes
    flush()
    if len(shards) == 1:
        part(1).rename(folder / SINGLE_FILE)
        return
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        part(number).rename(folder / file)
        file_of |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_nbytes}, "weight_map": file_of}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _appearing_whole(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out` that becomes `out` if the body succeeds, else is removed."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists and is not an empty folder; export into a new one")
    folder = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        folder.mkdir(parents=True)
        yield folder
        for path in [*folder.rglob("*"), folder]:
            _flush_to_disk(path)
        folder.rename(out)
        _flush_to_disk(out.parent)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
