"""What comes over the wire as no peer sends it: 10⁶ of each, in one process, against the code that reads it."""

import time
from collections.abc import Callable

from chaos.frame_fuzz import FRAME_LIMIT_NBYTES, fuzz_damaged, fuzz_order, fuzz_resealed
from chaos.memory import peak_growth
from chaos.row import Attempt, Figures, Row

NUM_MESSAGES = 1_000_000
_WARM_UP = 200
"""Messages before memory is measured: what is imported and cached at first is no growth."""


def _fuzz(fuzz: Callable[[int, int], dict[str, int]]) -> Callable[[Attempt], Figures]:
    def attempt(attempt: Attempt) -> Figures:
        count, seed = int(NUM_MESSAGES * attempt.scale), attempt.number
        fuzz(_WARM_UP, seed)
        began_s = time.monotonic()
        with peak_growth() as growth:
            counts = fuzz(count, seed)
        assert growth.nbytes < 2 * FRAME_LIMIT_NBYTES, f"grew by {growth.nbytes} bytes"
        took_s = time.monotonic() - began_s
        return {"messages": count, **counts, "grew_mb": growth.nbytes / 1e6, "messages_per_s": round(count / took_s)}

    return attempt


def _row(family: str, fault: str, shows: str, fuzz: Callable[[int, int], dict[str, int]], takes_s: float) -> Row:
    return Row(f"frames-{family}", f"frames {fault}", shows, _fuzz(fuzz), takes_s, is_quick=True)


_NONE = "none accepted, no crash, memory growth under twice the frame limit"
_ONCE = "every frame delivered once, in order, whole; memory growth under twice the frame limit"

MESSAGE_ROWS = (
    _row("corrupted", "corrupted", _NONE, lambda count, seed: fuzz_damaged("corrupted", count, seed), 15),
    _row("truncated", "truncated or too long", _NONE, lambda count, seed: fuzz_damaged("truncated", count, seed), 15),
    _row(
        "resealed",
        "changed, with a checksum made right again",
        "taken only if well-formed, in range and posted; no crash, memory growth under twice the frame limit",
        fuzz_resealed,
        180,
    ),
    _row("duplicated", "duplicated", _ONCE, lambda count, seed: fuzz_order("duplicated", count, seed), 40),
    _row("reordered", "reordered", _ONCE, lambda count, seed: fuzz_order("reordered", count, seed), 60),
    _row(
        "old-epoch", "replayed from an old epoch", _ONCE, lambda count, seed: fuzz_order("old-epoch", count, seed), 60
    ),
)
