"""A run in progress: its processes, its progress, and the effects of a fault."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from support import processes

from chaos.outcome import Outcome, count_steps, read_outcome
from chaos.program import Line, Program

_POLL_S = 0.02
_NOTICED = re.compile("degraded|lost|no sign of life|exited with|started again|go back to step|is gone", re.IGNORECASE)


@dataclass
class Scene:
    """The processes of a run while they run.

    `leader` is the launcher, or the coordinator (at `peer`) of `workers` that are started by hand; `former` programs
    were replaced. `progress` has (`time.time`, steps done) at every change, `worker_pids` all that a launcher has had.
    """

    run: Path
    leader: Program
    num_stages: int
    peer: str = ""
    workers: list[Program] = field(default_factory=list)
    former: list[Program] = field(default_factory=list)
    progress: list[tuple[float, int]] = field(default_factory=list)
    worker_pids: set[int] = field(default_factory=set)

    @property
    def num_steps(self) -> int:
        return count_steps(self.run)

    @property
    def lines(self) -> list[Line]:
        """The output of all programs, by time of arrival."""
        lines = [line for each in (self.leader, *self.workers, *self.former) for line in each.lines]
        return sorted(lines, key=lambda line: line.at_s)

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def worker_pid(self, stage: int) -> int:
        """The present worker of a stage under a launcher."""
        pids = [pid for pid in processes.workers(self.leader.pid) if processes.name(pid) == f"tahq stage {stage}"]
        assert len(pids) == 1, f"workers of stage {stage}: {pids}"
        return pids[0]

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: self.num_steps >= step, 120.0, f"step {step}")

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait for the end of all programs, each with status 0."""
        programs = (self.leader, *self.workers)
        self.wait(lambda: all(each.status is not None for each in programs), timeout_s, "the end of the run")
        self._check()

    def finish(self, timeout_s: float) -> Outcome:
        """Wait for the end of the run, and read its result."""
        self.wait_for_end(timeout_s)
        return read_outcome(self.run)

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until a condition holds; AssertionError if a program fails or time is up."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            self._check()
            assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:.0f} s\n{self._last_words()}"
            time.sleep(_POLL_S)

    def _check(self) -> None:
        failed = {each.name: each.status for each in (self.leader, *self.workers) if each.status not in (None, 0)}
        assert not failed, f"ended with {failed}:\n{self._last_words()}"

    def _last_words(self) -> str:
        return "\n".join(f"{line.source}: {line.text}" for line in self.lines[-20:])

    def watch(self) -> None:
        """Record progress and the launcher's workers; called repeatedly."""
        done = self.num_steps
        if not self.progress or done != self.progress[-1][1]:
            self.progress.append((time.time(), done))
        if not self.workers and self.leader.status is None:
            self.worker_pids.update(processes.workers(self.leader.pid))

    # Consequences of a fault

    def detected_s(self, began_s: float) -> float | None:
        """From a fault to the first line about it; None: there is no such line."""
        later = (line for line in self.lines if line.at_s >= began_s and _NOTICED.search(line.text))
        return next((line.at_s - began_s for line in later), None)

    def stalls(self) -> list[tuple[float, float, float]]:
        """(begin, end, excess over the median duration) of each step but the first."""
        steps = list(pairwise(at_s for at_s, done in self.progress if done))
        usual_s = median(after - before for before, after in steps) if steps else 0.0
        return [(before, after, after - before - usual_s) for before, after in steps]

    def stall_s(self, began_s: float) -> float:
        """The longest stall that ended after a fault began."""
        return max((stall_s for _, after, stall_s in self.stalls() if after >= began_s), default=0.0)

    def recovery_s(self, ended_s: float) -> float | None:
        """From the end of a fault to the end of the step that it delayed most; None: no step followed."""
        later = [(stall_s, after) for _, after, stall_s in self.stalls() if after >= ended_s]
        return max(later)[1] - ended_s if later else None

    @property
    def restarts(self) -> int:
        """Workers that a launcher started in place of others."""
        return max(0, len(self.worker_pids) - self.num_stages)


@contextmanager
def watched(scene: Scene) -> Iterator[None]:
    """Call `scene.watch` repeatedly, in a thread."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_POLL_S):
            scene.watch()
        scene.watch()

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
