"""Parse printed schedules, and check that a schedule is valid."""

import re

from tahq.pipeline.schedule.schedule import Action, ActionKind, Schedule, schedule_dependencies


def action(text: str) -> Action:
    """The action that prints as `2F0`: chunk 2, forward, micro-batch 0."""
    chunk, kind, micro_batch = re.fullmatch(r"(\d+)([FBIW])(\d+)", text).groups()
    return Action(int(chunk), ActionKind(kind), int(micro_batch))


def schedule(text: str, name: str = "custom") -> Schedule:
    """The schedule with one row per line; a chunk is on the first stage that computes it."""
    rows = tuple(tuple(map(action, line.split())) for line in text.splitlines())
    holders = {each.chunk: stage for stage, row in reversed(list(enumerate(rows))) for each in row}
    num_micro_batches = 1 + max(each.micro_batch for row in rows for each in row)
    return Schedule(name, num_micro_batches, rows, tuple(holders[chunk] for chunk in sorted(holders)))


def check(made: Schedule) -> None:
    """Assert that every pass comes once, on its chunk's stage, weight gradients ascend, and no stage waits forever."""
    everything = [(stage, each) for stage, row in enumerate(made.actions) for each in row]
    assert len({each for _, each in everything}) == len(everything)
    assert all(made.placement[each.chunk] == stage for stage, each in everything)
    assert all(each.micro_batch < made.num_micro_batches for _, each in everything)
    for chunk in range(made.num_chunks):
        mine = [each for _, each in everything if each.chunk == chunk]
        for number in range(made.num_micro_batches):
            passes = "".join(each.kind for each in mine if each.micro_batch == number)
            assert passes in (("F",) if chunk < made.num_frozen else ("FB", "FIW"))
        summed = [each.micro_batch for each in mine if each.kind in "BW"]
        assert summed == sorted(summed)
    needs, done, rows = schedule_dependencies(made), set(), [list(row) for row in made.actions]
    while any(rows):
        ready = [row for row in rows if row and done.issuperset(needs[row[0]])]
        assert ready, f"deadlock at {[str(row[0]) for row in rows if row]}"
        done |= {row.pop(0) for row in ready}
