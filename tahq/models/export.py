"""A trained model as a Hugging Face folder: config.json, generation_config.json, sharded safetensors, the tokenizer.

Tensors stream through: at most one shard is in memory. The folder appears complete or not at all: everything is written
into a hidden sibling, flushed to disk and renamed.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
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
    shapes = slice_parameters(spec, BlockRange(0, spec.num_layers, spec.num_layers))
    num_parameters = sum(shape.numel() for shape in shapes.values())
    if spec.tie == "sync":
        del shapes[HEAD_WEIGHT]
    with _appearing_whole(out) as folder:
        _write_shards(folder, shapes, read, max_shard_nbytes, matrices)
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


def _write_shards(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    read: Callable[[str], torch.Tensor],
    max_nbytes: int,
    matrices: torch.dtype,
) -> None:
    dtypes = {name: matrices if len(shape) >= 2 else torch.float32 for name, shape in shapes.items()}
    sizes = {name: dtypes[name].itemsize * shape.numel() for name, shape in shapes.items()}
    shards: list[list[str]] = []
    nbytes = 0
    for name, size in sizes.items():
        nbytes += size
        if nbytes > max_nbytes or not shards:
            shards.append([])
            nbytes = size
        shards[-1].append(name)
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE_FILE
        tensors = {name: _checked(name, read(name), shapes[name], dtypes[name]) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _checked(name: str, tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if tensor.shape != shape:
        raise ModelError(f"cannot export {name}: its shape is {list(tensor.shape)}, expected {list(shape)}")
    return tensor.detach().to("cpu", dtype).contiguous()


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
