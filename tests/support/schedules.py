"""Schedules from their printed form."""

import re

from tahq.pipeline.schedule.schedule import Action, ActionKind, Schedule


def action(text: str) -> Action:
    """The action that prints as `2F0`: chunk 2, forward, micro-batch 0."""
    chunk, kind, micro_batch = re.fullmatch(r"(\d+)([FBIW])(\d+)", text).groups()
    return Action(int(chunk), ActionKind(kind), int(micro_batch))


def schedule(text: str, name: str = "custom") -> Schedule:
    """A row per line; a chunk is on the first stage that computes it."""
    rows = tuple(tuple(map(action, line.split())) for line in text.splitlines())
    holders = {each.chunk: stage for stage, row in reversed(list(enumerate(rows))) for each in row}
    num_micro_batches = 1 + max(each.micro_batch for row in rows for each in row)
    return Schedule(name, num_micro_batches, rows, tuple(holders[chunk] for chunk in sorted(holders)))
