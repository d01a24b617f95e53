"""A run as it goes on: its processes, its steps, and the moment of a fault."""

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
    """A run's processes while they run.

    Attributes:
        run: the run's folder.
        leader: the launcher, or the coordinator alone.
        workers: started by hand, by stage; empty under a launcher.
        num_stages: of the pipeline.
        peer: host:port of a coordinator whose workers are started by hand.
    """

    run: Path
    leader: Program
    workers: list[Program] = field(default_factory=list)
    num_stages: int = 0
    peer: str = ""
    former: list[Program] = field(default_factory=list)
    """Programs that others have taken the place of."""
    progress: list[tuple[float, int]] = field(default_factory=list)
    """(`time.time`, steps done) at every change."""
    worker_pids: set[int] = field(default_factory=set)
    """Of every worker that a launcher has had."""

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return count_steps(self.run)

    @property
    def lines(self) -> list[Line]:
        """What all programs said, in the order in which it was heard."""
        return sorted(
            (line for each in (self.leader, *self.workers, *self.former) for line in each.lines),
            key=lambda line: line.at_s,
        )

    def worker_pid(self, stage: int) -> int:
        """The worker of a stage that runs now."""
        if self.workers:
            return self.workers[stage].pid
        pids = [pid for pid in processes.workers(self.leader.pid) if processes.name(pid) == f"tahq stage {stage}"]
        assert len(pids) == 1, f"workers of stage {stage}: {pids}"
        return pids[0]

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> None:
        """Until so many steps are done."""
        self.wait(lambda: self.num_steps >= step, timeout_s, f"step {step}")

    def finish(self, timeout_s: float) -> Outcome:
        """Wait for the end of all programs, each with status 0, and take what they left."""
        programs = (self.leader, *self.workers)
        self.wait(lambda: all(each.status is not None for each in programs), timeout_s, "the end of the run")
        self._check()
        return read_outcome(self.run, "\n".join(line.text for line in self.lines))

    def watch(self) -> None:
        """Note how far the run is, and who works for it; called all the time."""
        done = self.num_steps
        if not self.progress or done != self.progress[-1][1]:
            self.progress.append((time.time(), done))
        if not self.workers and self.leader.status is None:
            self.worker_pids.update(processes.workers(self.leader.pid))

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Until it holds, or a program fails."""
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

    # What a fault came to

    def detected_s(self, began_s: float) -> float | None:
        """From a fault to the first line that speaks of it; None: nobody did."""
        return next(
            (line.at_s - began_s for line in self.lines if line.at_s >= began_s and _NOTICED.search(line.text)), None
        )

    def stalls(self) -> list[tuple[float, float, float]]:
        """Of each step but the first: from when to when it lasted, and how much longer than the median of them."""
        times = [at_s for at_s, done in self.progress if done]
        if len(times) < 2:
            return []
        usual_s = median([after - before for before, after in pairwise(times)])
        return [(before, after, after - before - usual_s) for before, after in pairwise(times)]

    def stall_s(self, began_s: float) -> float:
        """The longest of them that ended after a fault began."""
        return max((stall_s for _, after, stall_s in self.stalls() if after >= began_s), default=0.0)

    def recovery_s(self, ended_s: float) -> float | None:
        """From the end of a fault to the end of the step that it held up longest; None: it was the last."""
        later = [(stall_s, after) for _, after, stall_s in self.stalls() if after >= ended_s]
        return max(later)[1] - ended_s if later else None

    @property
    def restarts(self) -> int:
        """Workers that a launcher started in place of others."""
        return max(0, len(self.worker_pids) - self.num_stages)


@contextmanager
def watched(scene: Scene) -> Iterator[None]:
    """Have a thread note all the time how far the run is, and who works for it."""
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
