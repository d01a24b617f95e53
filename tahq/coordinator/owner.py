"""Answers to the owner of a run: a process elsewhere that has the coordinator's own key.

It may read metrics, events and logs, fetch checkpoint files, and stop the run. Members may not: their keys differ.
"""

import os
import re
from pathlib import Path

from tahq.comm.control.messages import FilePlaces, FindFiles, ReadRun, RunLines, ServeFiles
from tahq.comm.relay.tickets import LOWER, UPPER
from tahq.coordinator import copies
from tahq.coordinator.context import RunContext
from tahq.coordinator.joining.seats import Seat, Seats

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


def file_places(ctx: RunContext, request: FindFiles, owner_key: str) -> FilePlaces:
    """Where the owner can fetch a stage's checkpoint files; UserError if the relay cannot listen."""
    places = list[list[str]]()
    if 0 <= request.stage < len(ctx.seats):
        seat = ctx.seats[request.stage]
        places = _over_relay(ctx, seat, owner_key) if request.is_relayed else _to_dial(ctx.seats, seat)
    return FilePlaces(ctx.options.run_id, ctx.options.config_hash, places)


def _to_dial(seats: Seats, seat: Seat) -> list[list[str]]:
    """The stage's worker, then those that have copies."""
    holders = [seat, *(holder for _, holder, _ in copies.sources(seats, seat.stage))]
    known = [(holder.hello.address, holder.public_key) for holder in holders if holder.hello is not None]
    return [[address, key] for address, key in dict.fromkeys(known) if address]


def _over_relay(ctx: RunContext, seat: Seat, owner_key: str) -> list[list[str]]:
    """A ticket of the link to the stage's worker, which is sent the other."""
    if ctx.relay is None or seat.hello is None:
        return []
    ctx.num_relayed_files += 1  # else the ticket would be that of an earlier link, which may not have ended
    link = len(ctx.options.grid.links()) + seat.stage
    theirs, ours = (ctx.relay.ticket(link, ctx.num_relayed_files, end) for end in (LOWER, UPPER))
    ctx.send(seat, ServeFiles(theirs, owner_key))
    return [[ours, seat.public_key]]
