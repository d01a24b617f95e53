"""Rows that several records share, so that few of the tokens that are computed and sent are padding.

Best fit decreasing: records are placed longest first, each in the row with the least room that holds it. The rows
depend on the lengths alone; each epoch has the same rows in another order.
"""

import numpy as np
import numpy.typing as npt

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
