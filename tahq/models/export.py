"""A trained model as a Hugging Face folder: config.json, generation_config.json, sharded safetensors, the tokenizer.

Tensors stream through: at most one shard, and one parameter, is in memory. The folder appears complete or not at all:
everything is written into a hidden sibling, flushed to disk and renamed.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file

from tahq.errors import ModelError, UserError
from tahq.models.families import FamilyLayout
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import HEAD_WEIGHT, slice_parameters
from tahq.models.weights import INDEX_FILE, SINGLE_FILE, read_json

DEFAULT_SHARD_NBYTES = 4 * 10**9
GENERATION_FILE = "generation_config.json"
_MAX_GENERATION_NBYTES = 2**20


class SavedTokenizer(Protocol):
    """The part of a tokenizer that export needs."""

    end_of_document: int | None  # The end-of-sequence token; None: there is none

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files."""


def copy_generation_config(source: Path, out: Path) -> None:
    """Copy generation_config.json where the source has it; ModelError if it is not a JSON object of at most 1 MiB."""
    if (source / GENERATION_FILE).is_file():
        read_json(source / GENERATION_FILE, _MAX_GENERATION_NBYTES)
        shutil.copyfile(source / GENERATION_FILE, out / GENERATION_FILE)


def export_folder(
    spec: ModelSpec,
    read: Callable[[str], torch.Tensor],
    out: Path,
    tokenizer: SavedTokenizer | None,
    max_shard_nbytes: int = DEFAULT_SHARD_NBYTES,
    matrices: torch.dtype = torch.float32,
) -> int:
    """Write a folder, new or empty, that `AutoModelForCausalLM.from_pretrained` loads with the same logits.

    config.json has `tie_word_embeddings: false`, since embedding and head are two parameters; under `tie: sync` they
    are equal, so it has true and the head is left out. A model without an end-of-sequence token gets the tokenizer's.
    generation_config.json is copied from the model's folder.

    Args:
        spec, out: the model, and the folder.
        read: canonical name -> parameter, fp32; called for one at a time.
        tokenizer: saved into the folder, if there is one.
        max_shard_nbytes: bytes of tensors per file, unless one tensor alone has more.
        matrices: type of tensors with two dimensions, and config.json's; norms and biases are written in fp32.

    Returns:
        The number of trained parameters.

    Raises:
        UserError: `out` is not empty.
        ModelError: a parameter has another shape.
    """
    shapes = dict(slice_parameters(spec, BlockRange(0, spec.num_layers, spec.num_layers)))
    num_parameters = sum(shape.numel() for shape in shapes.values())
    if spec.tie == "sync":
        del shapes[HEAD_WEIGHT]
    with appearing_whole(out) as folder:
        _write_shards(folder, _written(spec.layout, shapes), read, max_shard_nbytes, matrices)
        _write_config(spec, folder, None if tokenizer is None else tokenizer.end_of_document, matrices)
        if spec.folder is not None:
            copy_generation_config(spec.folder, folder)
        if tokenizer is not None:
            tokenizer.save(folder)
    return num_parameters


def _write_config(spec: ModelSpec, folder: Path, eos: int | None, dtype: torch.dtype) -> None:
    config = copy.deepcopy(spec.hf_config)
    config.tie_word_embeddings = spec.tie == "sync"
    config.architectures = [spec.layout.causal_lm]
    config.dtype = str(dtype).removeprefix("torch.")
    if config.eos_token_id is None:
        config.eos_token_id = eos
    config.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class _Written:
    """A tensor of a file: a part of a parameter, if experts are stacked there, else all of it."""

    parameter: str
    shape: torch.Size  # The parameter's
    num_parts: int = 1
    part: int = 0

    @property
    def numel(self) -> int:
        return self.shape.numel() // self.num_parts

    def taken_from(self, whole: torch.Tensor) -> torch.Tensor:
        """The parameter's tensor, or a copy of the part."""
        return whole if self.num_parts == 1 else whole.view(self.num_parts, -1, whole.shape[-1])[self.part].clone()


def _written(layout: FamilyLayout, shapes: Mapping[str, torch.Size]) -> dict[str, _Written]:
    """The tensors of the files by name, named and divided as by transformers' `save_pretrained`."""
    written: dict[str, _Written] = {}
    for name, shape in shapes.items():
        names = layout.names_in_files(name) or (name,)
        experts = range(shape[0] if "*" in names[0] else 1)
        parts = [each.replace("*", str(expert)) for expert in experts for each in names]
        written |= {each: _Written(name, shape, len(parts), number) for number, each in enumerate(parts)}
    return written


def _write_shards(
    folder: Path,
    written: Mapping[str, _Written],
    read: Callable[[str], torch.Tensor],
    max_nbytes: int,
    matrices: torch.dtype,
) -> None:
    dtypes = {name: matrices if len(each.shape) >= 2 else torch.float32 for name, each in written.items()}
    sizes = {name: dtypes[name].itemsize * each.numel for name, each in written.items()}
    shards: list[list[str]] = []
    nbytes = 0
    for name, size in sizes.items():
        nbytes += size
        if nbytes > max_nbytes or not shards:
            shards.append([])
            nbytes = size
        shards[-1].append(name)
    file_of: dict[str, str] = {}
    latest = lru_cache(1)(read)  # the parts of a parameter follow each other
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE_FILE
        tensors = {name: _checked(written[name], latest, dtypes[name]) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _checked(one: _Written, read: Callable[[str], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    name, tensor = one.parameter, read(one.parameter)
    if tensor.shape != one.shape:
        raise ModelError(f"cannot export {name}: its shape is {list(tensor.shape)}, expected {list(one.shape)}")
    return one.taken_from(tensor.detach()).to("cpu", dtype).contiguous()


@contextmanager
def appearing_whole(out: Path) -> Iterator[Path]:
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
