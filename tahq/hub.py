"""Models, tokenizers and datasets by their names on the Hugging Face Hub, through huggingface_hub.

``NAME@REVISION`` names a branch, tag or commit; without, it is main. Token, endpoint, cache and offline mode are those
of that library (HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE). Its cache keeps the files, each commit's in one
folder, and an interrupted download goes on there.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from tahq.errors import DataError, ModelError

Kind = Literal["model", "dataset"]

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_PINNED: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+@[0-9a-f]{40}")
DATA_FILES: Final = (".jsonl", ".json", ".parquet", ".arrow")
"""Endings of files of records."""
_OTHER_SPLITS: Final = re.compile(r"(?<![a-z])(test|testing|valid|validation|val|dev|eval|evaluation)(?![a-z])")
_WORDS: Final[dict[Kind, tuple[str, str, type[ModelError | DataError]]]] = {
    "model": ("model.path", "no folder here", ModelError),
    "dataset": ("data.records", "no path here (of other machines write ./PATH)", DataError),
}
_SMALL: Final = ["*.json", "*.txt", "*.model", "*.jinja"]
"""Configuration, tokenizer, and the index of the weights."""


def is_hub_name(path: str) -> bool:
    """Whether this is ``NAME@COMMIT``, as `pinned` writes it: no other path is ever looked for on the Hub."""
    return bool(_PINNED.fullmatch(path))


def pinned(path: str, kind: Kind = "model", key: str | None = None) -> str:
    """A path here, or what is no name; ``NAME@COMMIT`` for ``NAME`` or ``NAME@REVISION`` on the Hub.

    For the machine that starts a run: on others a folder may be missing, and must not be taken for a name. Messages
    name the setting by `key`, None: as is usual for the kind.

    Raises:
        ModelError, DataError: the Hub has none of this name, or does not give it to this user, or cannot be reached.
    """
    is_file = kind == "dataset" and path.endswith(DATA_FILES)
    if is_file or is_hub_name(path) or not _NAME.fullmatch(path) or os.path.exists(os.path.expanduser(path)):
        return path
    name, revision = _parts(path)
    return f"{name}@{_small_files(name, revision, kind, key).name}"


def pinned_data(key: str, path: str) -> str:
    """As `pinned`, a path of a setting of `data:`.

    Beside `data.records`, sets of `data.validation` may be on the Hub; a name of theirs with an ending needs an ``@``.
    """
    is_of_a_set = key.startswith("data.validation") and ("@" in path or not Path(path).suffix)
    return pinned(path, "dataset", key) if key == "data.records" or is_of_a_set else path


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


def dataset_files(path: str, subset: str | None, split: str | None, key: str = "data.records") -> list[Path]:
    """The files of a dataset ``NAME@COMMIT`` that hold a split, downloaded if they are not here, in order.

    They are those that the dataset's README lists for it; without such a list those with the split's name in theirs, or
    for `train`, if there are none, all that have no other split's name.

    Raises:
        DataError: there is no such split or subset, or the Hub does not give it.
    """
    split = split or "train"
    listed = _listed(_small_files(*_parts(path), "dataset", key) / "README.md", f"{key} {path}", subset, split)
    if listed is not None:
        found = _fetched(path, listed)
    else:
        place = f"{subset}/*" if subset else "*"
        found = _fetched(path, [f"{place}{split}*{suffix}" for suffix in DATA_FILES])
        if not found and split == "train":
            found = _fetched(path, [place + suffix for suffix in DATA_FILES], _OTHER_SPLITS)
    if not found:
        where = f"the split {split} of its subset {subset}" if subset else f"the split {split}"
        raise DataError(
            f"{key} {path} has no file of {where} that ends with {', '.join(DATA_FILES)}; set data.split or "
            "data.subset to what it has, or download it and name its files"
        )
    return found


def _listed(readme: Path, what: str, subset: str | None, split: str) -> list[str] | None:
    """The patterns of files that a dataset's README has for a split; None: it lists none."""
    head = re.match(r"---\n(.*?)\n---", readme.read_text(encoding="utf-8"), re.DOTALL) if readme.exists() else None
    try:
        front = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:
        return None
    configs = front.get("configs") if isinstance(front, dict) else None
    listed = [each for each in configs or () if isinstance(each, dict) and "data_files" in each]
    by_name = {str(each.get("config_name", "default")): each["data_files"] for each in listed}
    if not by_name:
        return None
    marked = [name for name, each in zip(by_name, listed, strict=True) if each.get("default")]
    chosen = subset or ([*by_name] if len(by_name) == 1 else marked or ["default"])[0]
    if chosen not in by_name:
        raise DataError(f"{what} has the subsets {', '.join(by_name)}; set data.subset to one of them")
    files = by_name[chosen]
    of_splits = files if isinstance(files, list) and isinstance(files[0], dict) else [{"split": "train", "path": files}]
    by_split = {str(each.get("split")): each.get("path") for each in of_splits}
    if split not in by_split:
        is_to_train_on = what.startswith("data.records")
        remedy = "set data.split to one of them" if is_to_train_on else f"not {split}; download one and name its files"
        raise DataError(f"{what} has the splits {', '.join(by_split)}; {remedy}")
    patterns = by_split[split]
    return [str(each) for each in (patterns if isinstance(patterns, list) else [patterns])]


def _fetched(path: str, patterns: list[str], but: re.Pattern[str] | None = None) -> list[Path]:
    """The files of a dataset that match, downloaded if they are not here."""
    from huggingface_hub import snapshot_download

    name, revision = _parts(path)
    with _in_one_line(path, "dataset"):
        folder = Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    kept = [n for n in names if n.endswith(DATA_FILES) and any(fnmatch(n, pattern) for pattern in patterns)]
    return [folder / name for name in kept if not (but and but.search(name.lower()))]


@cache
def _small_files(name: str, revision: str, kind: Kind = "model", key: str | None = None) -> Path:
    from huggingface_hub import snapshot_download  # imports a web client

    patterns = _SMALL if kind == "model" else ["README.md"]
    with _in_one_line(name, kind, key):
        return Path(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=patterns))


def _parts(path: str) -> tuple[str, str]:
    name, _, revision = path.partition("@")
    return name, revision or "main"


@contextmanager
def _in_one_line(path: str, kind: Kind = "model", given: str | None = None) -> Iterator[None]:
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    usual, place, refused = _WORDS[kind]
    key = given or usual
    try:
        yield
    except errors.GatedRepoError as error:
        raise refused(
            f"{key} {path}: the Hub gives it only to users who have accepted its licence there; then `hf auth "
            "login`, or HF_TOKEN in the environment, on each host"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise refused(
            f"{key} {path} is {place}, and the Hub has no such {kind}, or a private one, which needs `hf "
            "auth login` on each host"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise refused(f"{key} {path}: the Hub has no such revision of this {kind}") from error
    except errors.LocalEntryNotFoundError as error:
        raise refused(f"{key} {path} is {place}, nor in the cache, and the Hub cannot be reached") from error
    except errors.NotASafetensorsRepoError as error:
        raise refused(f"{key} {path} has no safetensors; pickled weights are never opened") from error
    except (errors.HfHubHTTPError, errors.SafetensorsParsingError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise refused(f"{key} {path} is {place}, and the Hub does not give it: {reason}") from error
