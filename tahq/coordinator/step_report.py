"""What a committed step looked like: the stages' PREPAREs as one `StepRecord`.

A row of `Prepare.links` is (link, direction, frames, payload bytes, wire bytes, elements, busy
seconds), for what that worker sent.
"""

import math
from collections.abc import Sequence

from tahq.comm.control import Commit, Prepare
from tahq.comm.frame import Direction
from tahq.coordinator.observer import LinkRecord, StageRecord, StepRecord, Traffic
from tahq.errors import RemoteProtocolError

ROW_LENGTH = 7


def step_record(commit: Commit, prepares: Sequence[Prepare], norm: float, step_time_s: float) -> StepRecord:
    """One record of a step that was just decided.

    Args:
        commit: the decision.
        prepares: every stage's, by stage; the last one's has the loss.
        norm: global gradient norm before clipping.
        step_time_s: seconds from the commit before to this one.

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
        stages=tuple(StageRecord(p.stage, dict(p.timing), p.codec_state_bytes) for p in prepares),
        links=tuple(_link_record(p.stage, row, len(prepares)) for p in prepares for row in p.links),
    )


def _link_record(stage: int, row: Sequence[float], num_stages: int) -> LinkRecord:
    try:
        if len(row) != ROW_LENGTH or not all(number >= 0 for number in row):
            raise ValueError
        link, direction, frames, payload_bytes, wire_bytes, elements = (int(number) for number in row[:-1])
        receiver, traffic = _other_end(stage, link, Direction(direction), num_stages)
    except (ValueError, OverflowError):
        raise RemoteProtocolError(f"stage {stage} reported traffic that makes no sense: {list(row)}") from None
    return LinkRecord(link, stage, receiver, traffic, frames, payload_bytes, wire_bytes, elements, float(row[-1]))


def _other_end(stage: int, link: int, direction: Direction, num_stages: int) -> tuple[int, Traffic]:
    """Who receives what this stage sends on this link, and what it is.

    Both directions of the link of tied embeddings (number P − 1) carry gradients.
    """
    last = num_stages - 1
    if link == last and stage in (0, last) and last > 0:
        return last - stage, "gradients"
    if link == stage and stage < last and direction is Direction.FORWARD:
        return stage + 1, "activations"
    if link == stage - 1 and direction is Direction.BACKWARD:
        return stage - 1, "gradients"
    raise ValueError
