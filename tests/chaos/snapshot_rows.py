"""Checkpoints that are damaged, or that the disk has no room for."""

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support.disks import fill, kept_full, small_disk

from chaos.outcome import assert_same_bits
from chaos.row import Attempt, Figures, Row
from chaos.starting import LORA, launched, small_run
from tahq.pipeline.checkpoint.manifest import LATEST, latest_folder

NUM_STEPS = 12
_DISK_NBYTES = 64 * 1024 * 1024
_FULL_S = 6.0
_GOES_ON_S = 8.0
"""Of that, 5 s at most until the journal tries again."""


def _damaged(attempt: Attempt, damage: Callable[[Attempt, Path], None]) -> Figures:
    """A run is stopped in order, a file of its newest checkpoint is damaged, and it is started again with --resume."""
    config = small_run(NUM_STEPS)
    with launched(attempt.folder, config) as scene:
        scene.wait_for_step(attempt.dice.randint(5, 7))
        scene.leader.send_signal(signal.SIGTERM)
        scene.leader.process.wait(60)
    assert scene.leader.status == 128 + signal.SIGTERM, scene.leader.text
    num_done = scene.num_steps
    newest = latest_folder(scene.run / "snapshots")
    before = max(int(folder.name.rpartition("-")[2]) for folder in newest.parent.glob("step-*") if folder != newest)
    victim = attempt.dice.choice(sorted(newest.glob("stage-*.safetensors")))
    damage(attempt, victim)
    with launched(attempt.folder, config, "--resume") as scene:
        outcome = scene.finish(120)
    assert_same_bits(outcome, attempt.calm.of(config))
    assert victim.name in scene.text, f"no line names {victim.name}:\n{scene.text}"
    least = min(done for _, done in scene.progress)
    assert least == before, f"went on from step {least}, and the previous checkpoint is after step {before}"
    return {"steps_lost": outcome.steps_lost, "steps_repeated": num_done - least}


def _flip(attempt: Attempt, victim: Path) -> None:
    content = bytearray(victim.read_bytes())
    content[attempt.dice.randrange(len(content))] ^= 1 << attempt.dice.randrange(8)
    victim.write_bytes(content)


def disk_full(attempt: Attempt, **sections: Any) -> Figures:
    """The disk is full when a checkpoint is due, and has room again for the last one."""
    config = small_run(30, run={"checkpoint_every": 10}, **sections)
    snapshots = attempt.folder / "runs" / "run" / "snapshots"
    snapshots.mkdir(parents=True)
    with small_disk(snapshots, _DISK_NBYTES), launched(attempt.folder, config) as scene:
        scene.wait((snapshots / LATEST).exists, 60, "the first checkpoint")
        first = latest_folder(snapshots)
        filler = snapshots / "filler"
        fill(filler)
        scene.leader.line_with("warning: no checkpoint after step", 60)
        assert latest_folder(snapshots) == first
        filler.unlink()
        outcome = scene.finish(120)
        assert_same_bits(outcome, attempt.calm.of(config))
    assert "No space left on device" in scene.text, scene.text
    return {"steps_lost": outcome.steps_lost}


def journal_disk_full(attempt: Attempt) -> Figures:
    """All room on the run folder's disk is taken, and all that the run frees: no step is decided meanwhile."""
    config = small_run(30)
    run = attempt.folder / "runs" / "run"
    with small_disk(run, _DISK_NBYTES), launched(attempt.folder, config) as scene:
        scene.wait_for_step(attempt.dice.randint(5, 10))
        began_s = time.time()
        with kept_full(run / "filler"):
            line = scene.leader.line_with("training waits for room", 60)
            assert "journal.sqlite" in line, line
            time.sleep(_FULL_S)
            assert scene.leader.status is None, "it did not wait: all remaining steps take half as long"
        ended_s = time.time()
        measured = attempt.finish(scene, config, began_s, ended_s)
    assert scene.text.count("training waits for room") == 1, scene.text
    assert measured["restarts"] == 0
    assert measured["recovery_s"] <= _GOES_ON_S, f"training went on {measured['recovery_s']:.1f} s after there was room"
    return measured


flipped_bit = partial(_damaged, damage=_flip)
missing_file = partial(_damaged, damage=lambda attempt, victim: victim.unlink())
_BEFORE = "the previous checkpoint is used, with a warning that names the file; BX"

SNAPSHOT_ROWS = (
    Row("snapshot-flipped-bit", "a bit of the newest checkpoint flipped", _BEFORE, flipped_bit, 8),
    Row("snapshot-missing-file", "a file of the newest checkpoint missing", _BEFORE, missing_file, 8),
    Row(
        "snapshot-disk-full",
        "the disk full when a checkpoint is due",
        "training goes on, the user is told, the previous checkpoint stands; BX",
        disk_full,
        8,
        needs=("namespaces",),
    ),
    Row(
        "snapshot-disk-full-adapters",
        "the same, training adapters",
        "training goes on, the user is told, the previous checkpoint stands; BX",
        partial(disk_full, adapter=LORA),
        8,
        True,
        ("namespaces",),
    ),
    Row(
        "journal-disk-full",
        "the disk of the run folder full for 6 s",
        "training waits for room, the user is told once, and it goes on by itself within 8 s; no worker restarts; BX",
        journal_disk_full,
        15,
        needs=("namespaces",),
    ),
)
