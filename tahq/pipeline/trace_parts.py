"""What a stage tells of a traced step: its spans and its sendings as rows of text and numbers, cut into messages.

A frame is named alike at both ends (`frame_name`), so that a picture can draw an arrow from where it was encoded over
where it had the wire to where it was decoded.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tahq.comm.control.messages import Traced
from tahq.comm.link.frame import Direction, LogicalId, Purpose
from tahq.comm.link.wire_time import Passage
from tahq.pipeline.spans import Span

PART = 2048
"""Spans a message: some 200 kB, so that no heartbeat is stuck behind it for long."""
_WAITS = {"memory": "room", "codec": "the codec"}
CARRIES = {Direction.FORWARD: "activations", Direction.BACKWARD: "gradients"}


@dataclass(frozen=True, slots=True)
class Row:
    """One span, as it is sent."""

    lane: str
    category: str
    name: str
    frame: str
    begin_s: float
    end_s: float
    nbytes: int = 0
    queued_s: float = 0.0


def frame_name(id: LogicalId) -> str:
    """``train step 9 cut 1 forward 3``: the same wherever the frame is seen. Steps count from 1, as for people."""
    purpose, direction = id.purpose.name.lower(), id.direction.name.lower()
    return f"{purpose} step {id.step + 1} cut {id.cut} {direction} {id.micro_batch}"


def span_rows(spans: Iterable[Span]) -> Iterator[Row]:
    """What was computed, coded and waited for."""
    for span in spans:
        category, _, sender = span.activity.partition(":")
        frame = frame_name(span.detail) if isinstance(span.detail, LogicalId) else ""
        yield Row(span.lane, category, _name(category, sender, span.detail), frame, span.begin_s, span.end_s)


def _name(category: str, sender: str, detail: Any) -> str:
    if category == "wait":
        category = f"wait for stage {sender}" if sender.isdecimal() else f"wait for {_WAITS.get(sender, sender)}"
    if isinstance(detail, LogicalId):
        what = CARRIES[detail.direction] if detail.purpose is not Purpose.TIE else "tied gradient"
        return f"{category}: {what} {detail.micro_batch}"
    return category if detail is None else str(detail)


def sending_rows(passages: Iterable[Passage], lanes: dict[tuple[int, Direction], str]) -> list[Row]:
    """When each frame had the wire, one row a run of its pieces.

    Args:
        passages: in order.
        lanes: what to call the lane of a link and direction.
    """
    rows: list[Row] = []
    for passage in passages:
        piece, lane = passage.piece, lanes[passage.key]
        frame = frame_name(piece.id)
        last = rows[-1] if rows else None
        if last is not None and last.frame == frame and last.lane == lane:
            rows[-1] = Row(
                lane, last.category, last.name, frame, last.begin_s, passage.end_s, last.nbytes + piece.nbytes,
                last.queued_s,
            )  # fmt: skip
        else:
            name = f"{CARRIES[piece.id.direction]} {piece.id.micro_batch}"
            queued_s = max(0.0, passage.begin_s - piece.queued_s)
            rows.append(Row(lane, "send", name, frame, passage.begin_s, passage.end_s, piece.nbytes, queued_s))
    return rows


def trace_parts(step: int, stage: int, rows: Sequence[Row]) -> list[Traced]:
    """The messages that carry these rows; one at least, so that nobody waits for them."""
    chunks = [rows[start : start + PART] for start in range(0, len(rows), PART)] or [[]]
    return [
        Traced(
            step=step,
            stage=stage,
            part=part,
            num_parts=len(chunks),
            lanes=[row.lane for row in chunk],
            categories=[row.category for row in chunk],
            names=[row.name for row in chunk],
            frames=[row.frame for row in chunk],
            begins_s=[row.begin_s for row in chunk],
            ends_s=[row.end_s for row in chunk],
            nbytes=[row.nbytes for row in chunk],
            queued_s=[row.queued_s for row in chunk],
        )
        for part, chunk in enumerate(chunks)
    ]
