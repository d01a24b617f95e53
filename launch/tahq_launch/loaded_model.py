"""A trained model in memory: a run's checkpoint, exported on the way, or any folder that transformers loads."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from tahq.models.model_spec import CONFIG_FILE
from tahq_launch.export import export_run

_SHARD_NBYTES = 4 * 10**9


def is_run(source: Path) -> bool:
    """Whether this is to be read as a run's folder, rather than as a Hugging Face folder."""
    return not (source / CONFIG_FILE).is_file()


@contextmanager
def model_folder(source: Path, step: int | None = None) -> Iterator[Path]:
    """A Hugging Face folder with a run's model after a step (None: its newest checkpoint), or `source` if it is one.

    Raises:
        UserError: there is no such model.
    """
    if not is_run(source):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="tahq-model-") as name:
        folder = Path(name) / "model"
        for line in export_run(source, folder, step=step, max_shard_nbytes=_SHARD_NBYTES):
            print(line, file=sys.stderr)
        yield folder


def default_device() -> str:
    """cuda if there is one, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(folder: Path, device: str) -> tuple[Any, Any]:
    """The model of a Hugging Face folder, whole on one device, and its tokenizer."""
    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
    return model.eval(), tokenizer
