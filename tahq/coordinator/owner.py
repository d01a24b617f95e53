"""Answers to the owner of a run: a process elsewhere that has the coordinator's own key.

It may read metrics, events and logs, and stop the run. Members may not: their keys differ.
"""

import os
import re
from pathlib import Path

from tahq.comm.control.messages import ReadRun, RunLines

READABLE = re.compile(r"metrics\.jsonl|events\.jsonl|logs/(launcher|stage-\d{1,4})\.log")
MOST_NBYTES = 1 << 18
"""Of a file in one answer."""


def run_lines(folder: Path, request: ReadRun) -> RunLines:
    """Whole lines of a file in the run's folder, at most `MOST_NBYTES`; none of a file that may not be read."""
    nothing = RunLines(request.file, "", 0, -1)
    if READABLE.fullmatch(request.file) is None:
        return nothing
    try:
        with (folder / request.file).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = request.offset
            if begin < 0 and size > -begin:
                file.seek(size + begin)
                file.readline(MOST_NBYTES)  # the rest of a line
                begin = file.tell()
            begin = max(begin, 0) if begin <= size else 0  # the file was cut
            file.seek(begin)
            data = file.read(MOST_NBYTES)
    except OSError:
        return nothing
    data = data[: data.rfind(b"\n") + 1]
    return RunLines(request.file, data.decode(errors="replace"), begin + len(data), size)
