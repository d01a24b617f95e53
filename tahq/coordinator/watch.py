"""The timers of a run: processes that ended, workers that fell silent, waiting that took too long.

Pure: they are asked with the time, and raise what ends the run.
"""

import signal
from collections.abc import Mapping

from tahq.coordinator.membership import Member, Membership, Standing, stage_list
from tahq.coordinator.run_state import Phase, RunState
from tahq.errors import NonFiniteError, OutOfMemoryError, PeerLostError, TahqError, UserError

LAST_WORDS_S = 0.3
"""How long the last messages of a process that has ended may still be on their way."""

TELLING: Mapping[int, type[TahqError]] = {2: UserError, 4: OutOfMemoryError, 5: NonFiniteError}
"""Exit statuses of a worker that say more than that it is gone."""


def check_exits(
    state: RunState, membership: Membership, refusals: Mapping[int, str], now_s: float, step: int | None
) -> dict[int, str]:
    """Stages whose processes were killed, with what to say; others that have ended without a word end the run.

    Args:
        state: knows which have ended.
        membership: for their names.
        refusals: why workers of a stage were refused, by stage.
        now_s: now.
        step: the step that is being prepared, from 0; None before the first.

    Raises:
        PeerLostError, or the error with the worker's own status where that says more.
    """
    killed = {}
    for stage, status in state.exits(now_s - LAST_WORDS_S).items():
        if status == UserError.exit_status and stage in refusals:
            raise UserError(refusals[stage])
        error = TELLING.get(status, PeerLostError)
        words = state.last_words(stage)
        said = f"; {words}" if words else ""
        what = f"{membership.name(stage)}: its worker exited with {status_name(status)}{_when(step)}{said}"
        if not was_killed(status):
            raise error(what)
        killed[stage] = what
    return killed


def was_killed(status: int) -> bool:
    """Whether a process with this exit status did not end by itself: a signal, or ssh (255) lost its connection."""
    return status < 0 or (status >= 128 and status not in (128 + signal.SIGINT, 128 + signal.SIGTERM))


def silence(member: Member, timeout_s: float, step: int | None) -> str:
    """That nothing has come from a member, in words."""
    return f"{member.name} has given no sign of life for {timeout_s:.1f} s{_when(step)}"


def check_waiting(state: RunState, membership: Membership, now_s: float, timeout_s: float, address: str) -> None:
    """Raise once the run has waited for longer than it should for workers to join, or to connect.

    Raises:
        UserError: stages without a worker that got as far as a Hello.
        PeerLostError: all are there, but not all could connect to their neighbours.
    """
    if now_s - state.phase_since_s <= timeout_s:
        return
    if state.phase is Phase.JOINING:
        late = membership.lacking(Standing.GREETED)
        raise UserError(
            f"waited {timeout_s:.0f} s in vain for {stage_list(late)}; start each with "
            f"`tahq-worker --stage {late[0]} --peer {address}`, or raise run.join_timeout"
        )
    if state.phase is Phase.CONNECTING:
        late = membership.lacking(Standing.READY)
        raise PeerLostError(f"{stage_list(late)} did not connect to the neighbours within {timeout_s:.0f} s")


def status_name(status: int) -> str:
    """``status 1``; ``status -9 (SIGKILL)`` for a process that a signal ended."""
    try:
        return f"status {status}" if status >= 0 else f"status {status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"status {status}"


def _when(step: int | None) -> str:
    return "" if step is None else f" at step {step + 1}"
