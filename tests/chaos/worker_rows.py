"""Faults of a worker that stays alive: stopped, slow, with a NaN, with a wrong clock."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaos.outcome import Outcome, assert_same_bits, read_metrics
from chaos.program import Program, cold
from chaos.row import Attempt, Figures, Row
from chaos.starting import STAGES, by_hand, launched, small_run, usual_worker

MICRO_BATCHES = 8
STOPPED_S = 20.0
SKEW_S = 3600
RUNS_S, STANDS_S = 0.002, 0.018
"""Of a worker that is ten times slower."""


def odd_worker(folder: Path, stage: int, peer: str, oddity: str, value: str, *before: str) -> Program:
    """A worker with one thing odd about it; see odd_worker.py. `before`: the beginning of the command line."""
    module = (sys.executable, "-m", "chaos.odd_worker", oddity, value, "--")
    extra = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return cold(f"stage {stage}", folder, [*before, *module, "--stage", str(stage), "--peer", peer], extra)


def stopped(attempt: Attempt) -> Figures:
    stage, step = attempt.dice.randrange(STAGES), attempt.dice.randint(1, 5)
    config = small_run(12)
    with launched(attempt.folder, config) as scene:
        scene.wait_for_step(step)
        pid, began_s = scene.worker_pid(stage), time.time()
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(STOPPED_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        measured = attempt.finish(scene, config, began_s, time.time())
    assert scene.restarts == 0
    return measured


def slow(attempt: Attempt) -> Figures:
    """The summary must name the straggler as the limit."""
    stage = attempt.dice.randrange(STAGES)
    config = small_run(12, model={"hidden_size": 256, "num_heads": 4})
    with launched(attempt.folder, config) as scene:
        scene.wait_for_step(1)
        began_s = time.time()
        with _slowed(scene.worker_pid(stage)):
            scene.wait_for_end(300)
        measured = attempt.finish(scene, config, began_s)
    assert scene.restarts == 0
    limits = [line.strip() for line in scene.text.splitlines() if line.strip().startswith("its limit")]
    assert limits, f"no line names the limit:\n{scene.text}"
    assert f"stage {stage}" in limits[-1], f"stage {stage} was slow; the run says: {limits[-1]}"
    step_s = read_metrics(scene.run)[-1]["step_time_s"]
    return {"restarts": measured["restarts"], "steps_lost": measured["steps_lost"], "step_s": step_s}


@contextmanager
def _slowed(pid: int) -> Iterator[None]:
    """Let a process run for a tenth of the time, in turns that are short beside a micro-batch."""
    is_over = threading.Event()

    def hold_up() -> None:
        with suppress(ProcessLookupError):
            while not is_over.wait(RUNS_S):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STANDS_S)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=hold_up, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def nan(attempt: Attempt) -> Figures:
    """The same step has a NaN, on one stage and then on another: whichever it is, all stages decide alike."""
    step, config = attempt.dice.randint(1, 6), small_run(8)
    stages = attempt.dice.sample(range(STAGES), 2)
    outcomes = [_with_nan(attempt.folder / f"stage-{stage}", config, stage, step) for stage in stages]
    calm = attempt.calm.of(config)
    for outcome in outcomes:
        assert outcome.losses[:step] == calm.losses[:step]
        assert outcome.losses[step + 1 :] != calm.losses[step + 1 :], "the step was not skipped"
    one, other = (_without_step(outcome, step) for outcome in outcomes)
    assert_same_bits(one, other)
    return {"restarts": 0, "steps_lost": 0, "skipped": 1}


def _with_nan(folder: Path, config: dict[str, Any], stage: int, step: int) -> Outcome:
    """A run in which a micro-batch of a step (from 0) gives NaN on a stage."""
    folder.mkdir()
    call = str(step * MICRO_BATCHES + 3)

    def start(each: int, peer: str) -> Program:
        return odd_worker(folder, each, peer, "nan", call) if each == stage else usual_worker(folder, each, peer)

    with by_hand(folder, config, start_worker=start) as scene:
        outcome = scene.finish(120)
    skipped = [row["step"] - 1 for row in read_metrics(scene.run) if row["skipped"]]
    assert skipped == [step], f"steps {skipped} were skipped; expected {step}"
    return outcome


def _without_step(outcome: Outcome, step: int) -> Outcome:
    """Leave out that step, whose loss is NaN or not depending on the stage."""
    steps, losses = ((*values[:step], *values[step + 1 :]) for values in (outcome.steps, outcome.losses))
    return replace(outcome, steps=steps, losses=losses)


def clock_skew(attempt: Attempt) -> Figures:
    """One worker's clocks are ahead: the monotonic and the boot one by a time namespace, the wall clock in Python."""
    stage, config = attempt.dice.randrange(STAGES), small_run(8)
    shift = ("unshare", "--time", "--monotonic", str(SKEW_S), "--boottime", str(SKEW_S))

    def start(each: int, peer: str) -> Program:
        if each != stage:
            return usual_worker(attempt.folder, each, peer)
        return odd_worker(attempt.folder, each, peer, "clock", str(SKEW_S), *shift)

    with by_hand(attempt.folder, config, start_worker=start) as scene:
        measured = attempt.finish(scene, config, time.time())
    return {"steps_lost": measured["steps_lost"], "restarts": 0}


_SKIPPED = "the step is skipped everywhere and the run goes on, bit-identical to one with the NaN on another stage"
WORKER_ROWS = (
    Row("stopped-20s", "a worker stopped (SIGSTOP) for 20 s", "BX; no restarts; no false death", stopped, 35),
    Row("ten-times-slower", "a worker ten times slower", "BX; no restarts; the straggler named", slow, 30),
    Row("nan", "NaN in one micro-batch on one stage", _SKIPPED, nan, 30),
    Row("clock-skew", "a worker's clocks an hour ahead", "BX", clock_skew, 15, needs=("time-namespaces",)),
)
