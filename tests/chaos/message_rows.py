"""What comes over the wire as no peer sends it: 10⁶ of each, in one process, against the code that reads it.

A try has a twentieth of them, with the seed of its number.
"""

import time
from collections.abc import Callable
from pathlib import Path

from chaos.control_fuzz import fuzz_damaged_control, fuzz_resealed_control
from chaos.frame_fuzz import FRAME_LIMIT_NBYTES, fuzz_damaged, fuzz_order, fuzz_resealed
from chaos.memory import peak_growth
from chaos.row import Attempt, Figures, Row
from chaos.stranger_fuzz import fuzz_strangers

NUM_MESSAGES = 50_000
"""Of a try."""
_WARM_UP = 200
"""Messages before memory is measured: what is imported and cached at first is no growth."""


Fuzz = Callable[[int, int, Path], dict[str, int]]
"""Told how many messages, the seed, and a folder."""


def _fuzz(fuzz: Fuzz) -> Callable[[Attempt], Figures]:
    def attempt(attempt: Attempt) -> Figures:
        count, seed = int(NUM_MESSAGES * attempt.scale), attempt.number
        fuzz(_WARM_UP, seed, attempt.folder)
        began_s = time.monotonic()
        with peak_growth() as growth:
            counts = fuzz(count, seed, attempt.folder)
        assert growth.nbytes < 2 * FRAME_LIMIT_NBYTES, f"grew by {growth.nbytes} bytes"
        took_s = time.monotonic() - began_s
        return {"messages": count, **counts, "grew_mb": growth.nbytes / 1e6, "messages_per_s": round(count / took_s)}

    return attempt


_NONE = "none accepted, no crash, memory growth under twice the frame limit"
_ONCE = "every frame delivered once, in order, whole; memory growth under twice the frame limit"

_SENSE = "taken only if well-formed, typed and in range; no crash, memory growth under twice the frame limit"


def _damaged(family: str) -> Fuzz:
    return lambda count, seed, folder: fuzz_damaged(family, count, seed)


def _order(family: str) -> Fuzz:
    return lambda count, seed, folder: fuzz_order(family, count, seed)


def _row(name: str, fault: str, shows: str, fuzz: Fuzz, takes_s: float) -> Row:
    return Row(name, fault, shows, _fuzz(fuzz), takes_s, is_quick=True)


MESSAGE_ROWS = (
    _row("frames-corrupted", "10⁶ frames corrupted", _NONE, _damaged("corrupted"), 2),
    _row("frames-truncated", "10⁶ frames truncated or too long", _NONE, _damaged("truncated"), 2),
    _row(
        "frames-resealed",
        "10⁶ frames changed, with a checksum made right again",
        _SENSE,
        lambda count, seed, folder: fuzz_resealed(count, seed),
        8,
    ),
    _row("frames-duplicated", "10⁶ frames duplicated", _ONCE, _order("duplicated"), 2),
    _row("frames-reordered", "10⁶ frames reordered", _ONCE, _order("reordered"), 2),
    _row("frames-old-epoch", "10⁶ frames replayed from an old epoch", _ONCE, _order("old-epoch"), 2),
    _row(
        "frames-strangers",
        "10⁶ first messages of strangers",
        "admitted only who says what the peer says; no crash, memory growth under twice the frame limit",
        lambda count, seed, folder: fuzz_strangers(count, seed),
        3,
    ),
    _row(
        "control-damaged",
        "10⁶ control messages corrupted or truncated",
        _NONE,
        lambda count, seed, folder: fuzz_damaged_control(count, seed),
        2,
    ),
    _row(
        "control-resealed",
        "10⁶ control messages changed, with a checksum made right again",
        _SENSE,
        fuzz_resealed_control,
        45,
    ),
)
