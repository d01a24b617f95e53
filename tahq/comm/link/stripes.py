"""The connections of a link as its sender sees them: which one takes the next piece.

Each connection keeps the order of what is put on it, and nothing is known of the order between two. A piece goes
where the fewest bytes are on their way, so one that is slower for a while is given less.
"""

from collections import deque
from collections.abc import Sequence


class Stripes:
    """What is on its way over each of `connections` connections."""

    def __init__(self, connections: int) -> None:
        self._sent: list[deque[tuple[int, int]]] = [deque() for _ in range(connections)]
        self._nbytes = [0] * connections

    def take(self, sequence: int, nbytes: int) -> int:
        """The connection that carries the piece with this number; of equals the first one."""
        connection = self._nbytes.index(min(self._nbytes))
        if len(self._sent) > 1:
            self._sent[connection].append((sequence, nbytes))
            self._nbytes[connection] += nbytes
        return connection

    def forget(self) -> None:
        """Nothing is on its way: what was is lost, or will be dropped."""
        for connection, sent in enumerate(self._sent):
            sent.clear()
            self._nbytes[connection] = 0

    def acknowledge(self, arrived: Sequence[int]) -> None:
        """Up to which number each connection has delivered what it was given."""
        for connection, sequence in enumerate(arrived):
            sent = self._sent[connection]
            while sent and sent[0][0] <= sequence:
                self._nbytes[connection] -= sent.popleft()[1]
