"""How many of n packets a link with a given loss may lose before it is not that link: exact binomial intervals.

No normal approximation: at 0.1 % of a few thousand packets it is off by more than what is being tested.
"""

import math


def acceptance_interval(num_packets: int, share: float, confidence: float) -> tuple[int, int]:
    """The counts that are not too improbable on either side.

    With k ~ B(n, p), the smallest and largest k for which P(K ≤ k) and P(K ≥ k) both exceed (1 − confidence)/2.

    Args:
        num_packets: n.
        share: p, the loss that is set.
        confidence: 0.999 refuses a true link once in a thousand times at most.

    Returns:
        Smallest and largest accepted count. For n = 10, p = 0.5, confidence = 0.9: (2, 8).
    """
    if share in (0.0, 1.0):
        return round(num_packets * share), round(num_packets * share)
    tail = (1.0 - confidence) / 2.0
    return _first_above(num_packets, share, tail), num_packets - _first_above(num_packets, 1.0 - share, tail)


def _first_above(num_packets: int, share: float, tail: float) -> int:
    """The smallest k with P(K ≤ k) > tail."""
    cumulated = 0.0
    for count in range(num_packets + 1):
        cumulated += _probability(count, num_packets, share)
        if cumulated > tail:
            return count
    return num_packets


def _probability(count: int, num_packets: int, share: float) -> float:
    """C(n, k)·p^k·(1−p)^(n−k), through logarithms, which neither overflow nor vanish."""
    choices = math.lgamma(num_packets + 1) - math.lgamma(count + 1) - math.lgamma(num_packets - count + 1)
    return math.exp(choices + count * math.log(share) + (num_packets - count) * math.log1p(-share))
