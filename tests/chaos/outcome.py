"""What a finished run has to show: the loss of every step, and every bit of what it has learned."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tahq.pipeline.checkpoint.manifest import latest_folder, read_manifest
from tahq.pipeline.checkpoint.stage_file import SnapshotReader


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run from its first step to its last.

    Attributes:
        steps: the numbers of the steps in metrics.jsonl, in the order in which they stand there.
        losses: of the same.
        step_times_s: of the same.
        tensors: SHA-256 of every tensor of the final snapshot, by name.
        text: what the programs said.
    """

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    tensors: dict[str, str]
    text: str = field(default="", repr=False)

    @property
    def longest_stall_s(self) -> float:
        """How much longer than the others the longest step took; the first one builds things, and doesn't count."""
        times = self.step_times_s[1:]
        return max(times) - median(times)

    @property
    def steps_lost(self) -> int:
        """Steps that are missing, or had to be computed and decided again."""
        expected = max(self.steps, default=0)
        return expected - len(set(self.steps)) + len(self.steps) - len(set(self.steps))


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, whole ones only."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    content = path.read_bytes()
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]


def count_steps(run: Path) -> int:
    """Steps that stand in metrics.jsonl by now."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read_outcome(run: Path, text: str = "") -> Outcome:
    """What a finished run has left in its folder."""
    rows = read_metrics(run)
    return Outcome(
        tuple(row["step"] for row in rows),
        tuple(row["loss"] for row in rows),
        tuple(row["step_time_s"] for row in rows),
        digests(run),
        text,
    )


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of every tensor of the newest snapshot, dtype and shape with it."""
    folder = latest_folder(run / "snapshots")
    reader = SnapshotReader(folder, read_manifest(folder).sha256)
    result = {}
    for name in sorted(reader.names()):
        tensor = reader.tensor(name)
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        result[name] = digest.hexdigest()
    return result


def assert_same_bits(outcome: Outcome, calm: Outcome) -> None:
    """BX: the losses of all steps and the final weights and optimizer states are those of the undisturbed run."""
    assert outcome.steps == calm.steps, f"steps {outcome.steps}; expected {calm.steps}"
    differing = [step for step, one, other in zip(calm.steps, outcome.losses, calm.losses, strict=True) if one != other]
    assert not differing, f"the losses of steps {differing} are not those of the undisturbed run"
    names = sorted(
        name
        for name in outcome.tensors.keys() | calm.tensors.keys()
        if outcome.tensors.get(name) != calm.tensors.get(name)
    )
    assert not names, f"{len(names)} tensors differ from the undisturbed run's, {names[:3]} among them"
