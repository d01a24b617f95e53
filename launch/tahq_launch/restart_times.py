"""How soon, and how often, a stage's worker is started again: at once, then ever later, and not for ever."""

from tahq.errors import PeerLostError

_FIRST_S = 1.0
_LONGEST_S = 30.0


class RestartTimes:
    """Counts restarts.

    Args:
        max_restarts: of each stage.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._counts: dict[int, int] = {}

    def delay_s(self, stage: int) -> float:
        """Seconds until a stage's worker may be started once more, which is counted: 0, 1, 2, 4, … at most 30.

        Raises:
            PeerLostError: that was done too often; the message names the stage.
        """
        count = self._counts.get(stage, 0)
        if count >= self._max_restarts:
            raise PeerLostError(
                f"the worker of stage {stage} was killed, and was started again {count} times before (run.restarts)"
            )
        self._counts[stage] = count + 1
        return 0.0 if count == 0 else float(min(_FIRST_S * 2 ** (count - 1), _LONGEST_S))
