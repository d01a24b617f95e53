"""Models and tokenizers by their names on the Hugging Face Hub, through huggingface_hub.

``NAME@REVISION`` names a branch, tag or commit; without, it is main. Token, endpoint, cache and offline mode are those
of that library (HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE). Its cache keeps the files, each commit's in one
folder, and an interrupted download goes on there.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from tahq.errors import ModelError

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_PINNED: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+@[0-9a-f]{40}")
_SMALL: Final = ["*.json", "*.txt", "*.model", "*.jinja"]
"""Configuration, tokenizer, and the index of the weights."""


def is_hub_name(path: str) -> bool:
    """Whether this is ``NAME@COMMIT``, as `pinned` writes it: no other path is ever looked for on the Hub."""
    return bool(_PINNED.fullmatch(path))


def pinned(path: str) -> str:
    """The path of a folder here, or what is no name; ``NAME@COMMIT`` for ``NAME`` or ``NAME@REVISION`` on the Hub.

    For the machine that starts a run: on others a folder may be missing, and must not be taken for a name.

    Raises:
        ModelError: the Hub has no such model, or does not give it to this user, or cannot be reached.
    """
    if is_hub_name(path) or not _NAME.fullmatch(path) or os.path.exists(os.path.expanduser(path)):
        return path
    name, revision = _parts(path)
    return f"{name}@{_small_files(name, revision).name}"


def local_folder(path: str) -> Path:
    """A folder here; or for ``NAME@COMMIT`` that of its small files, downloaded if they are not here.

    ModelError as of `pinned`.
    """
    return _small_files(*_parts(path)) if is_hub_name(path) else Path(os.path.expanduser(path))


def weight_files(path: str, single_file: str) -> dict[str, str]:
    """The file of each tensor of a model on the Hub, by its header; ModelError if it has no safetensors."""
    from huggingface_hub import get_safetensors_metadata
    from safetensors import safe_open

    name, revision = _parts(path)
    here = local_folder(path) / single_file
    if here.exists():
        with safe_open(here, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), single_file)
    with _in_one_line(path):
        return dict(get_safetensors_metadata(name, revision=revision).weight_map)


def download(path: str, file: str, told: Callable[[int, int], None] = lambda done, whole: None) -> Path:
    """Download a file of a model on the Hub, unless it is here; `told` is called with bytes done and bytes in all."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import tqdm

    class Progress(tqdm):
        """Tells instead of drawing."""

        def update(self, n: float | None = 1) -> Any:
            self.n += n or 0
            told(int(self.n), int(self.total or 0))

    name, revision = _parts(path)
    with _in_one_line(path):
        return Path(hf_hub_download(name, file, revision=revision, tqdm_class=Progress))


@cache
def _small_files(name: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download  # imports a web client

    with _in_one_line(name):
        return Path(snapshot_download(name, revision=revision, allow_patterns=_SMALL))


def _parts(path: str) -> tuple[str, str]:
    name, _, revision = path.partition("@")
    return name, revision or "main"


@contextmanager
def _in_one_line(path: str) -> Iterator[None]:
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"model.path {path}: the Hub gives it only to users who have accepted its licence there; then `hf auth "
            "login`, or HF_TOKEN in the environment, on each host"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"model.path {path} is no folder here, and the Hub has no such model, or a private one, which needs `hf "
            "auth login` on each host"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"model.path {path}: the Hub has no such revision of this model") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"model.path {path} is no folder here, nor in the cache, and the Hub cannot be reached"
        ) from error
    except errors.NotASafetensorsRepoError as error:
        raise ModelError(f"model.path {path} has no safetensors; pickled weights are never opened") from error
    except (errors.HfHubHTTPError, errors.SafetensorsParsingError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"model.path {path} is no folder here, and the Hub does not give it: {reason}") from error
