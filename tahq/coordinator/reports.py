"""What the stages still owe after a commit: the validation loss, and their parts of a snapshot.

Pure. A snapshot is complete once every stage has reported its part; one part with an error and the
whole snapshot has failed. Training does not wait for either, only the end of the run does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tahq.comm.control.messages import Commit, Evaluated, Snapshotted
from tahq.coordinator.observer import ValidationRecord
from tahq.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True)
class SnapshotParts:
    """Every stage's part of the snapshot after `step` steps, by stage.

    `codecs` is what `LinkCodecs.saved` says of the links then; `base` the snapshot at which lost stages may have to
    begin again, None: this one.
    """

    step: int
    parts: tuple[Snapshotted, ...]
    codecs: Mapping[str, Any] = field(default_factory=dict)
    base: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def error(self) -> str:
        """What went wrong, by stage; empty if every part is durable."""
        return "; ".join(f"stage {part.stage}: {part.error}" for part in self.parts if part.error)


class Reports:
    """Debts of the stages, by step.

    Args:
        num_stages: parts of a snapshot.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._evaluating: int | None = None
        self._snapshots: dict[int, dict[int, Snapshotted]] = {}

    @property
    def outstanding(self) -> tuple[str, ...]:
        """What has not come in yet, in words; empty: nothing is owed."""
        evaluation = ["the validation loss"] if self._evaluating is not None else []
        return (*evaluation, *(f"the snapshot after step {step}" for step in self._snapshots))

    def owe(self, commit: Commit) -> None:
        """Note what this commit asks for."""
        if commit.evaluate:
            self._evaluating = commit.step
        if commit.snapshot:
            self._snapshots[commit.step + 1] = {}

    @property
    def evaluating(self) -> int | None:
        """The step, from 0, whose validation loss is owed; None: none is."""
        return self._evaluating

    def lacks(self, step: int, stage: int) -> bool:
        """Whether a stage owes its part of the snapshot after so many steps."""
        return step in self._snapshots and stage not in self._snapshots[step]

    def forget(self, stage: int) -> None:
        """A stage's process is gone, and perhaps its disk: it owes its parts of unfinished snapshots again."""
        for parts in self._snapshots.values():
            parts.pop(stage, None)

    def have_snapshot(self, step: int) -> None:
        """The snapshot after so many steps is complete, as is known from elsewhere: nobody owes it, or older ones."""
        self._snapshots = {number: parts for number, parts in self._snapshots.items() if number > step}

    def evaluated(self, evaluated: Evaluated, name: str) -> ValidationRecord:
        """The validation loss has come in.

        Args:
            evaluated: its `step` is that of the commit that asked for it.
            name: how messages call its sender.

        Raises:
            RemoteProtocolError: nobody asked, or there is no token in it.
        """
        if evaluated.step != self._evaluating:
            raise RemoteProtocolError(f"{name} evaluated step {evaluated.step}; asked for was {self._evaluating}")
        if evaluated.tokens < 1:
            raise RemoteProtocolError(f"{name} evaluated step {evaluated.step} on {evaluated.tokens} tokens")
        self._evaluating = None
        return ValidationRecord(
            step=evaluated.step + 1,
            tokens=evaluated.tokens,
            loss=evaluated.loss_sum / evaluated.tokens,
            loss_raw=evaluated.raw_loss_sum / evaluated.tokens,
        )

    def snapshotted(self, part: Snapshotted, name: str) -> SnapshotParts | None:
        """A stage's part has come in; all of them once it was the last.

        Args:
            part: its `step` counts the steps that the snapshot has behind it.
            name: how messages call its sender.

        Raises:
            RemoteProtocolError: nobody asked, or the stage has reported before.
        """
        parts = self._snapshots.get(part.step)
        if parts is None or part.stage in parts:
            raise RemoteProtocolError(f"{name} reported a snapshot after step {part.step} that it was not asked for")
        parts[part.stage] = part
        if len(parts) < self._num_stages:
            return None
        del self._snapshots[part.step]
        return SnapshotParts(part.step, tuple(parts[stage] for stage in sorted(parts)))
