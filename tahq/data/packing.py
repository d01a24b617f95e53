"""Rows that several records share, so that few of the tokens that are computed and sent are padding.

Best fit decreasing: records are placed longest first, each in the row with the least room that holds it. The rows
depend on the lengths alone; each epoch has the same rows in another order.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

I64 = npt.NDArray[np.int64]


def packed_rows(lengths: I64, capacity: int) -> list[list[int]]:
    """Numbers of the records in each row, ascending, as are the rows' first records; lengths are 1 … `capacity`.

    Example:
        >>> packed_rows(np.array([2, 5, 3, 4, 1]), 6)
        [[0, 3], [1, 4], [2]]
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set if a row has room for r tokens
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        if enough := rooms >> length:
            room = length + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(number)
        if left := room - length:
            with_room[left].append(row)
            rooms |= 1 << left
    return sorted(map(sorted, rows))


def begins_of(positions: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
    """A bit per token [B, S], set where a record begins in a row of several, uint8; each row padded to whole bytes.

    `positions`: of each token in its record; None: rows are one record each.
    """
    is_begin = np.zeros(shape, dtype=bool) if positions is None else positions.cpu().numpy() == 0
    return torch.from_numpy(np.packbits(is_begin, axis=1).reshape(-1))


def positions_of(begins: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """The inverse of `begins_of`: positions, int64 [B, S]."""
    is_begin = np.unpackbits(begins.numpy().reshape(shape[0], -1), axis=1, count=shape[1]).astype(bool)
    if not is_begin.any():
        return None
    at = np.arange(shape[1])
    return torch.from_numpy(at - np.maximum.accumulate(np.where(is_begin, at, 0), axis=1))
