"""Snapshots that are damaged, or that the disk has no room for."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos.configurations import small_run
from chaos.outcome import assert_same_bits
from chaos.row import Attempt, Figures, Row
from chaos.starting import launched
from tahq.pipeline.manifest import LATEST, latest_folder

NUM_STEPS = 12
STOPPED_STATUS = 128 + signal.SIGTERM
_DISK_NBYTES = 64 * 1024 * 1024


def _damaged(attempt: Attempt, damage: Callable[[Attempt, Path], None]) -> Figures:
    """A run is stopped in order, a file of its newest snapshot is damaged, and it is started again with --resume."""
    config = small_run(NUM_STEPS)
    with launched(attempt.folder, config) as scene:
        scene.wait_for_step(attempt.dice.randint(5, 7))
        scene.leader.send_signal(signal.SIGTERM)
        scene.leader.process.wait(60)
    assert scene.leader.status == STOPPED_STATUS, scene.leader.text
    num_done = scene.num_steps
    newest = latest_folder(scene.run / "snapshots")
    victim = attempt.dice.choice(sorted(newest.glob("stage-*.safetensors")))
    damage(attempt, victim)
    with launched(attempt.folder, config, "--resume") as scene:
        outcome = scene.finish(120)
    assert_same_bits(outcome, attempt.calm.of(config))
    assert victim.name in outcome.text, f"nobody named {victim.name}:\n{outcome.text}"
    least = min(done for _, done in scene.progress)
    assert least == 4, f"went on from step {least}"
    return {"steps_lost": outcome.steps_lost, "steps_repeated": num_done - least}


def _flip_a_bit(attempt: Attempt, victim: Path) -> None:
    content = bytearray(victim.read_bytes())
    content[attempt.dice.randrange(len(content))] ^= 1 << attempt.dice.randrange(8)
    victim.write_bytes(content)


def _remove(attempt: Attempt, victim: Path) -> None:
    victim.unlink()


def flipped_bit(attempt: Attempt) -> Figures:
    return _damaged(attempt, _flip_a_bit)


def missing_file(attempt: Attempt) -> Figures:
    return _damaged(attempt, _remove)


def disk_full(attempt: Attempt) -> Figures:
    """The disk is full when a snapshot is due, and has room again for the last one."""
    config = small_run(30, run={"snapshot_every": 10})
    snapshots = attempt.folder / "runs" / "run" / "snapshots"
    snapshots.mkdir(parents=True)
    with _small_disk(snapshots), launched(attempt.folder, config) as scene:
        scene.wait((snapshots / LATEST).exists, 60, "the first snapshot")
        first = latest_folder(snapshots)
        filler = snapshots / "filler"
        _fill(filler)
        scene.leader.line_with("warning: no snapshot after step", 60)
        assert latest_folder(snapshots) == first
        filler.unlink()
        outcome = scene.finish(120)
        assert_same_bits(outcome, attempt.calm.of(config))
    assert "No space left on device" in outcome.text, outcome.text
    return {"steps_lost": outcome.steps_lost}


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_NBYTES}", "chaos", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(path: Path) -> None:
    with path.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            return  # full


_BEFORE = "the snapshot before it is used, with a warning that names the file; BX"

SNAPSHOT_ROWS = (
    Row("snapshot-flipped-bit", "a bit of the newest snapshot flipped", _BEFORE, flipped_bit, 8),
    Row("snapshot-missing-file", "a file of the newest snapshot missing", _BEFORE, missing_file, 8),
    Row(
        "snapshot-disk-full",
        "the disk full when a snapshot is due",
        "training goes on, the user is told, the snapshot before stands; BX",
        disk_full,
        8,
        needs=("namespaces",),
    ),
)
