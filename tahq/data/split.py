"""Which part of the data is for training and which for validation.

The split is a function of the size of the data and the share held out, and of nothing else: neither of
the seed nor of the sequence length. So a run that is resumed with another of either never trains on what
it was validated on.

Tokens are divided into at most 16 equal stripes, and the end of each stripe is held out: stripes spread
the validation set over the data, and being long (65,536 held-out tokens or more, else there are fewer)
they are cut into windows with little loss. Windows never cross a boundary, so no token of one part is an
input or a label in the other.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

_MAX_STRIPES = 16
_MIN_HELD_OUT = 2**16

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """Tokens start … stop−1 of the data."""

    start: int
    stop: int

    def num_windows(self, seq_len: int) -> int:
        """Windows of `seq_len` tokens, each with the token after it as its last label."""
        return max(self.stop - self.start - 1, 0) // seq_len


def split_tokens(num_tokens: int, validation: float) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """Regions for training and for validation, in ascending order, disjoint, and together everything.

    Args:
        num_tokens: tokens of the data.
        validation: share held out, in [0, 1).

    Example:
        >>> split_tokens(100, 0.1)
        ((Region(start=0, stop=90),), (Region(start=90, stop=100),))
    """
    if validation == 0:
        return (Region(0, num_tokens),), ()
    num_stripes = min(max(int(num_tokens * validation) // _MIN_HELD_OUT, 1), _MAX_STRIPES)
    edges = [num_tokens * k // num_stripes for k in range(num_stripes + 1)]
    cuts = [stop - int((stop - start) * validation) for start, stop in pairwise(edges)]
    training = tuple(map(Region, edges, cuts))
    return training, tuple(map(Region, cuts, edges[1:]))


def split_records(num_records: int, validation: float) -> I64:
    """Indices of the records held out: round(num_records · validation) of them, evenly spread, ascending."""
    num_held_out = round(num_records * validation)
    return np.arange(1, num_held_out + 1, dtype=np.int64) * num_records // max(num_held_out, 1) - 1


class WindowIndex:
    """Consecutive windows of `seq_len` tokens in regions, numbered through."""

    def __init__(self, regions: tuple[Region, ...], seq_len: int) -> None:
        counts = [region.num_windows(seq_len) for region in regions]
        self._seq_len = seq_len
        self._starts = np.array([region.start for region in regions], dtype=np.int64)
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._before[-1])

    def start(self, number: int) -> int:
        """Position of the first token of window `number`."""
        region = int(np.searchsorted(self._before, number, side="right")) - 1
        return int(self._starts[region] + (number - self._before[region]) * self._seq_len)
