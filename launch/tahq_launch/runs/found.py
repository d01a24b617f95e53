"""The runs of this machine: a run is its folder, and is live while a process holds the folder's lock."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tahq.errors import UserError, brief

RUNS = Path("runs")
"""Where `run.dir` puts runs unless it is set."""
METRICS = "metrics.jsonl"
_LOCK = ".lock"
_OF_RUNS_AND_MODELS = (METRICS, _LOCK, "config.yaml", "config.json")


def writer_of(folder: Path) -> int | None:
    """Id of the process that writes a run's folder, by its lock; None: none does."""
    lock = folder / _LOCK
    try:
        pid = lock.read_text(encoding="ascii", errors="replace").partition(" ")[2]
        held = lock.stat()
    except OSError:
        return None
    if not pid.isdecimal():
        return None
    try:
        opened = list(Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:  # another user's
        return int(pid)
    except OSError:
        return None
    for descriptor in opened:
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(descriptor.stat(), held):
                return int(pid)
    return None


def live_runs() -> list[Path]:
    """Folders of all runs that this user's processes write, sorted."""
    return sorted(set(_locked_folders()))


def _locked_folders() -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    path = Path(descriptor.readlink())
                    if path.name == _LOCK and writer_of(path.parent) == int(process.name):
                        yield path.parent


def kept_runs(runs: Path = RUNS) -> list[Path]:
    """Folders of the runs in a folder, sorted."""
    return sorted(path.parent for path in runs.glob(f"*/{METRICS}"))


def find_run(name: str | Path) -> Path:
    """The folder of a run that is named by its folder, its name in `runs/`, or the name of a live run.

    Raises:
        UserError: there is no such run; the message names the runs that there are.
    """
    folders = [folder for folder in (Path(name), RUNS / name) if folder.is_dir()]
    for folder in folders:
        if any((folder / file).exists() for file in _OF_RUNS_AND_MODELS):  # else it is the data, perhaps
            return folder
    live = live_runs()
    matching = [folder for folder in live if folder.name == str(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UserError(f"several runs here are named {name}: {', '.join(map(str, matching))}; give the folder")
    if folders:
        return folders[0]
    there = ", ".join(dict.fromkeys(folder.name for folder in (*kept_runs(), *live)))
    raise UserError(
        f"{brief(str(name))} is not a run's folder, nor a name in {RUNS}/ or of a run that is live here; there are: "
        f"{brief(there, 400) or 'no runs'}"
    )
