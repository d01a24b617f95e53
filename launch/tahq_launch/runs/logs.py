"""`tahq logs`: the logs of a run's launcher and stages, as one stream in the order of their times."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tahq.errors import UserError
from tahq_launch.command_line import announce
from tahq_launch.dashboard.run_feed import Tail

_LOGS = "logs"
_LAUNCHER = "launcher"
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
_LOOK_S = 0.3


class _Log:
    """One file's new lines, each with its time; a line without one belongs to the line before."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem.replace("-", " ")
        self._path, self._tail, self._time = path, Tail(path), ""

    def news(self) -> Iterator[tuple[str, str, str]]:
        """(time, name, line) of each line that was written since the last call."""
        lines = self._tail.read()
        if lines is None:  # another file now
            self._tail = Tail(self._path)
            lines = self._tail.read() or []
        while lines:
            for line in lines:
                text = line.decode(errors="replace")
                self._time = stamp[0] if (stamp := _TIME.match(text)) else self._time
                yield self._time, self.name, text
            lines = self._tail.read() if self._tail.has_more else []


def print_logs(
    folder: Path, *, stage: int | None, lines: int | None, is_live: Callable[[], bool], refresh: Callable[[], None]
) -> None:
    """Print a run's logs, then what they gain while it is live.

    Args:
        folder: the run's.
        stage: print this stage's log alone; None: all of them, each line with its stage.
        lines: of those that there are already, only so many; None: all.
        is_live: whether more lines may come; False at once: do not wait for any.
        refresh: brings the files up to date, before each look.

    Raises:
        UserError: there is no such log.
    """
    logs: dict[Path, _Log] = {}
    is_last = False
    while not is_last:
        is_last = not is_live()  # before the files, whose last lines are then there
        refresh()
        for path in _paths(folder, stage):
            logs.setdefault(path, _Log(path))
        news = sorted((new for log in logs.values() for new in log.news()), key=lambda new: new[0])
        for _, name, text in news if lines is None else news[len(news) - min(lines, len(news)) :]:
            announce(text if stage is not None else f"{name:<9}| {text}")
        lines = None
        if not is_last:
            time.sleep(_LOOK_S)
    if not logs:
        raise UserError(_missing(folder, stage))


def _paths(folder: Path, stage: int | None) -> Sequence[Path]:
    logs = folder / _LOGS
    if stage is not None:
        return [path for path in (logs / f"stage-{stage}.log",) if path.exists()]
    return [path for path in (logs / f"{_LAUNCHER}.log", *sorted(logs.glob("stage-*.log"))) if path.exists()]


def _missing(folder: Path, stage: int | None) -> str:
    if stage is None:
        return f"{folder} has no logs; the launcher writes them into {folder / _LOGS}"
    return f"{folder / _LOGS} has no log of stage {stage}; a worker that was started by hand writes to its own terminal"
