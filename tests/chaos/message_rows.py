"""Messages that no peer sends: 10⁶ of each kind, in one process, against the code that reads them.

A try has a twentieth of them, with the seed of its number.
"""

import time
from collections.abc import Callable
from functools import partial

from chaos.control_fuzz import fuzz_damaged_control, fuzz_resealed_control
from chaos.frame_fuzz import FRAME_LIMIT_NBYTES, fuzz_damaged, fuzz_order, fuzz_resealed
from chaos.memory import peak_growth
from chaos.row import Attempt, Figures, Row
from chaos.stranger_fuzz import fuzz_strangers

NUM_MESSAGES = 50_000
"""Of a try."""
_WARM_UP = 200
"""Messages before memory is measured: first imports and caches do not count as growth."""

Fuzz = Callable[[int, int], dict[str, int]]
"""Takes the number of messages and the seed; returns counts."""


def _attempt(attempt: Attempt, fuzz: Fuzz) -> Figures:
    count, seed = int(NUM_MESSAGES * attempt.scale), attempt.number
    fuzz(_WARM_UP, seed)
    began_s = time.monotonic()
    with peak_growth() as growth:
        counts = fuzz(count, seed)
    assert growth.nbytes < 2 * FRAME_LIMIT_NBYTES, f"grew by {growth.nbytes} bytes"
    took_s = time.monotonic() - began_s
    return {"messages": count, **counts, "grew_mb": growth.nbytes / 1e6, "messages_per_s": round(count / took_s)}


_NONE = "none accepted, no crash, memory growth under twice the frame limit"
_ONCE = "every frame delivered once, in order, whole; memory growth under twice the frame limit"
_ADMITTED = "admitted only with the contents of the peer's HELLO; no crash, memory growth under twice the frame limit"
_RESEALED = "10⁶ control messages changed, with a checksum made right again"
_SENSE = "taken only if well-formed, typed and in range; no crash, memory growth under twice the frame limit"


def _row(name: str, fault: str, shows: str, fuzz: Fuzz, takes_s: float) -> Row:
    return Row(name, fault, shows, partial(_attempt, fuzz=fuzz), takes_s, is_quick=True)


MESSAGE_ROWS = (
    _row("frames-corrupted", "10⁶ frames corrupted", _NONE, partial(fuzz_damaged, "corrupted"), 2),
    _row("frames-truncated", "10⁶ frames truncated or too long", _NONE, partial(fuzz_damaged, "truncated"), 2),
    _row("frames-resealed", "10⁶ frames changed, with a checksum made right again", _SENSE, fuzz_resealed, 8),
    _row("frames-duplicated", "10⁶ frames duplicated", _ONCE, partial(fuzz_order, "duplicated"), 2),
    _row("frames-reordered", "10⁶ frames reordered", _ONCE, partial(fuzz_order, "reordered"), 2),
    _row("frames-old-epoch", "10⁶ frames replayed from an old epoch", _ONCE, partial(fuzz_order, "old-epoch"), 2),
    _row("frames-strangers", "10⁶ first messages of strangers", _ADMITTED, fuzz_strangers, 3),
    _row("control-damaged", "10⁶ control messages corrupted or truncated", _NONE, fuzz_damaged_control, 2),
    _row("control-resealed", _RESEALED, _SENSE, fuzz_resealed_control, 45),
)
