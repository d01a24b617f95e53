"""Which pairs of hosts measure their way to each other at the same time: a round-robin tournament. Pure."""

from collections.abc import Sequence

Pair = tuple[int, int]
"""Two stages, the lower one first."""


def tournament(num_players: int) -> list[list[Pair]]:
    """Rounds in which everybody meets everybody once, and nobody twice in a round.

    The circle method: the first stays, the others move on by one place each round; with an odd number, one
    place is empty.

    Example:
        Four players: (0,3) (1,2), then (0,2) (1,3) — the last has moved behind the first —, then (0,1) (2,3).
    """
    places: list[int | None] = list(range(num_players))
    if num_players % 2:
        places.append(None)
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        meetings = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in meetings if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in rounds if pairs]


def measuring_rounds(machines: Sequence[str], *, parallel: bool) -> list[list[Pair]]:
    """Rounds of pairs that may measure at the same time, since no machine is in two of them.

    Args:
        machines: where each stage runs; two stages may share one, and so its uplink.
        parallel: False measures one pair at a time, in the same order: pairs with machines of their own can
            still share a bottleneck somewhere.
    """
    rounds = [part for pairs in tournament(len(machines)) for part in _apart(pairs, machines)]
    return rounds if parallel else [[pair] for pairs in rounds for pair in pairs]


def _apart(pairs: Sequence[Pair], machines: Sequence[str]) -> list[list[Pair]]:
    """The pairs of a round, in as many rounds as sharing a machine makes of it."""
    parts: list[list[Pair]] = []
    busy: list[set[str]] = []
    for pair in pairs:
        wanted = {machines[stage] for stage in pair}
        free = next((index for index, taken in enumerate(busy) if not taken & wanted), None)
        if free is None:
            parts.append([pair])
            busy.append(wanted)
        else:
            parts[free].append(pair)
            busy[free] |= wanted
    return parts
