"""`tahq stop`: the signals that Ctrl-C sends, to the process that writes a run's folder."""

import os
import signal
import time
from pathlib import Path

from tahq.errors import UserError
from tahq_launch.command_line import announce
from tahq_launch.dashboard.run_feed import RunFeed
from tahq_launch.runs.found import writer_of
from tahq_launch.runs.status import view_of

_LOOK_S = 0.1


def stop_run(folder: Path, *, now: bool) -> None:
    """Stop a run after its present step and a checkpoint, and wait for its end; with `now` at once.

    Raises:
        UserError: it is not running here, or belongs to another user.
    """
    pid = writer_of(folder)
    if pid is None:
        raise UserError(f"{folder} is not running here: {view_of(RunFeed(folder))['state']}")
    try:
        os.kill(pid, signal.SIGINT)
        if now:
            os.kill(pid, signal.SIGTERM)  # the second signal; another SIGINT could merge with the first
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError as error:
        raise UserError(f"{folder} is written by process {pid} of another user; ask them, or root") from error
    if not now:
        announce(f"{folder}: stopping after its step and a checkpoint (tahq stop --now does not wait for them)")
    while writer_of(folder) == pid:
        time.sleep(_LOOK_S)
    announce(f"{folder}: {view_of(RunFeed(folder))['state']}")
