"""The result of a finished run: the loss of every step, and every bit of the final checkpoint."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tahq.pipeline.checkpoint.manifest import latest_folder, read_manifest
from tahq.pipeline.checkpoint.stage_file import SnapshotReader


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: steps and losses as in metrics.jsonl, and SHA-256 of every tensor of the final checkpoint, by name."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    tensors: dict[str, str]

    @property
    def steps_lost(self) -> int:
        """Steps that are missing, or that were computed and decided again."""
        num_different = len(set(self.steps))
        return max(self.steps, default=0) - num_different + len(self.steps) - num_different


def count_steps(run: Path) -> int:
    """Complete lines in metrics.jsonl by now."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()[: count_steps(run)]]


def read_outcome(run: Path) -> Outcome:
    """Read a finished run's folder."""
    rows = read_metrics(run)
    return Outcome(tuple(row["step"] for row in rows), tuple(row["loss"] for row in rows), _digests(run))


def _digests(run: Path) -> dict[str, str]:
    """SHA-256 of every tensor of the newest checkpoint, dtype and shape included."""
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
    names = outcome.tensors.keys() | calm.tensors.keys()
    wrong = sorted(name for name in names if outcome.tensors.get(name) != calm.tensors.get(name))
    assert not wrong, f"{len(wrong)} tensors differ from the undisturbed run's, {wrong[:3]} among them"
