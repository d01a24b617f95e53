"""What a committed step looked like: the stages' PREPAREs as one `StepRecord`.

A row of `Prepare.links` is (link, direction, frames, payload bytes, wire bytes, elements, busy, sending and wire
seconds), one of `Prepare.codec_errors` (link, direction, relative error), for what that worker sent.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from tahq.comm.control.messages import Commit, Prepare
from tahq.comm.link.frame import Direction
from tahq.coordinator.observer import LinkRecord, StageRecord, StepRecord, Traffic
from tahq.coordinator.stage_split import stage_split
from tahq.errors import RemoteProtocolError

NUM_COUNTS, ROW_LENGTH = 6, 9
_MAX_NUMBER = 2.0**53
"""Whole numbers up to here are what fp64 says they are; and their sums are printed, which infinity cannot be."""


def step_record(
    commit: Commit, prepares: Sequence[Prepare], norm: float, step_time_s: float, chunks_per_stage: int = 1
) -> StepRecord:
    """One record of a step that was just decided.

    Args:
        commit: the decision.
        prepares: every stage's, by stage; the last one's has the loss.
        norm: global gradient norm before clipping.
        step_time_s: seconds from the commit before to this one.
        chunks_per_stage: pieces of the model on each stage.

    Raises:
        RemoteProtocolError: a row about a link that its stage does not have.
    """
    loss_sum, tokens = prepares[-1].loss_sum, prepares[-1].tokens
    return StepRecord(
        step=commit.step + 1,
        loss=loss_sum / tokens if loss_sum is not None and tokens else math.nan,
        tokens=tokens or 0,
        step_time_s=step_time_s,
        grad_norm=norm,
        clip_factor=commit.clip_factor,
        skipped=not commit.apply,
        evaluating=commit.evaluate,
        stages=tuple(_stage_record(p, step_time_s) for p in prepares),
        links=tuple(
            _with_error(_link_record(p.stage, row, len(prepares), chunks_per_stage, step_time_s), row, p)
            for p in prepares
            for row in p.links
        ),
    )


def _with_error(record: LinkRecord, row: Sequence[float], prepare: Prepare) -> LinkRecord:
    """The record with the error that its sender measured, which may be infinite and is never negative."""
    rows = prepare.codec_errors
    if not all(len(error) == 3 and error[2] >= 0 for error in rows):
        raise RemoteProtocolError(f"stage {prepare.stage} reported errors of codecs that make no sense: {rows}")
    measured = {(link, direction): error for link, direction, error in rows}
    return replace(record, relative_error=measured.get((row[0], row[1])))


def _stage_record(prepare: Prepare, step_time_s: float) -> StageRecord:
    split = stage_split(prepare.timing, prepare.active_s, step_time_s)
    return StageRecord(prepare.stage, dict(prepare.timing), prepare.codec_state_bytes, split)


def _link_record(
    stage: int, row: Sequence[float], num_stages: int, chunks_per_stage: int, step_time_s: float
) -> LinkRecord:
    try:
        if len(row) != ROW_LENGTH or not all(0 <= number <= _MAX_NUMBER for number in row):
            raise ValueError
        link, direction, frames, payload_bytes, wire_bytes, elements = (int(number) for number in row[:NUM_COUNTS])
        receiver, traffic = _other_end(stage, link, Direction(direction), num_stages, chunks_per_stage)
    except (ValueError, OverflowError):
        raise RemoteProtocolError(f"stage {stage} reported traffic that makes no sense: {list(row)}") from None
    busy_s, sending_s, wire_s = row[NUM_COUNTS:]
    idle_s = max(0.0, step_time_s - busy_s)
    counts = (frames, payload_bytes, wire_bytes, elements)
    return LinkRecord(link, stage, receiver, traffic, *counts, busy_s, sending_s, wire_s, idle_s)


def _other_end(
    stage: int, link: int, direction: Direction, num_stages: int, chunks_per_stage: int
) -> tuple[int, Traffic]:
    """Who receives what this stage sends on this link, and what it is.

    Both directions of the link of tied embeddings (the last number) carry gradients.
    """
    last = num_stages * chunks_per_stage - 1
    if link == last and stage in (0, num_stages - 1) and num_stages > 1:
        return num_stages - 1 - stage, "gradients"
    before, after = link % num_stages, (link + 1) % num_stages
    if stage == before and link < last and direction is Direction.FORWARD:
        return after, "activations"
    if stage == after and link < last and direction is Direction.BACKWARD:
        return before, "gradients"
    raise ValueError
