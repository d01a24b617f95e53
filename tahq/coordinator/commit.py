"""The commit of a step: every stage's PREPARE in, one COMMIT for all out.

Pure: times are arguments. Invariants:

- a step is decided once, when the last stage has prepared it, whatever the order of arrival;
- the decision is a function of the set of PREPAREs alone: norms are summed by `math.fsum`, which is
  exact before its one rounding and therefore blind to the order and to the division into stages;
- the same PREPARE again changes nothing, a different one is an error.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tahq.comm.control.messages import Commit, Prepare
from tahq.coordinator.observer import StepRecord
from tahq.coordinator.step_report import step_record
from tahq.errors import DataError, NonFiniteError, RemoteProtocolError


@dataclass(frozen=True, slots=True)
class CommitRules:
    """What decides about a step besides the gradients. Steps count from 0."""

    first_step: int
    total_steps: int
    clip_norm: float | None = None
    non_finite: Literal["skip", "halt"] = "skip"
    max_skipped_in_a_row: int = 10
    eval_every: int | None = None
    snapshot_every: int | None = None
    chunks_per_stage: int = 1
    """Pieces of the model on each stage, which say whose links are whose."""


def global_norm(squared_norms: Iterable[float]) -> float:
    """√(Σ ‖g‖²) in fp64, the sum rounded once (`math.fsum`); infinity or NaN where a term or the sum is.

    Args:
        squared_norms: ‖g‖² of each parameter, of all stages, in any order; none is negative.
    """
    try:
        return math.sqrt(math.fsum(squared_norms))
    except OverflowError:
        return math.inf


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """min(1, clip_norm / norm): what gradients of this global norm are multiplied by.

    `torch.nn.utils.clip_grad_norm_` divides by norm + 1e-6 instead; a norm of zero needs no such
    guard here, since only a norm above clip_norm is divided by.

    Args:
        norm: global gradient norm, fp64.
        clip_norm: None: not clipped.
    """
    return clip_norm / norm if clip_norm is not None and norm > clip_norm else 1.0


def is_due(steps_done: int, every: int | None) -> bool:
    """Whether something done every so many steps is done after this many; `every` None: never."""
    return every is not None and steps_done % every == 0


class CommitLedger:
    """Collects the PREPAREs of one step after the other.

    Args:
        rules: what decides.
        names: how messages call the stages; there are as many stages as names.
        now_s: when the first step starts.
    """

    def __init__(self, rules: CommitRules, names: Sequence[str], now_s: float) -> None:
        self._rules = rules
        self._names = tuple(names)
        self._started_s = now_s
        self._step = rules.first_step
        self._prepared: dict[int, Prepare] = {}
        self._decided: Mapping[int, Prepare] = {}
        self._skipped_in_a_row = 0

    @property
    def step(self) -> int:
        """Index of the step that is being prepared; so many steps are committed."""
        return self._step

    @property
    def decided(self) -> tuple[Prepare, ...]:
        """What every stage said of the step that was decided last, by stage."""
        return tuple(self._decided[stage] for stage in sorted(self._decided))

    def forget(self, stage: int) -> None:
        """A stage's process is gone; what it said of the present step will be said again."""
        self._prepared.pop(stage, None)

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Stages that have not prepared the present step."""
        return tuple(stage for stage in range(len(self._names)) if stage not in self._prepared)

    def restart_clock(self, now_s: float) -> None:
        """The present step starts now (what came before it was no training)."""
        self._started_s = now_s

    def adopt(self, commit: Commit, prepares: Sequence[Prepare], now_s: float) -> float:
        """Take over a decision that was made before; returns the global gradient norm."""
        self._decided = {prepare.stage: prepare for prepare in prepares}
        self._skipped_in_a_row = 0 if commit.apply else self._skipped_in_a_row + 1
        self._step = commit.step + 1
        self._started_s = now_s
        return global_norm(square for prepare in prepares for square in prepare.norm2)

    def take(self, prepare: Prepare, now_s: float, *, stop_requested: bool = False) -> tuple[Commit, StepRecord] | None:
        """Count a stage's PREPARE; the decision and its record once it was the last one.

        Args:
            prepare: from the holder of `prepare.stage`, which the caller has made sure of.
            now_s: time of arrival.
            stop_requested: this step is to be the last.

        Raises:
            RemoteProtocolError: a wrong step, a second and different PREPARE, impossible numbers.
            DataError: the stages that read data read different batches.
            NonFiniteError: NaN or infinity, and the rules say to halt.
        """
        if self._is_repeated(prepare):
            return None
        self._check(prepare)
        self._prepared[prepare.stage] = prepare
        if self.waiting_for:
            return None
        return self._decide(now_s, stop_requested)

    def _is_repeated(self, prepare: Prepare) -> bool:
        before = self._prepared.get(prepare.stage) or self._decided.get(prepare.stage)
        if before is None or before.step != prepare.step:
            return False
        return repr(before) == repr(prepare)  # by value, also where a number is NaN

    def _check(self, prepare: Prepare) -> None:
        name = self._names[prepare.stage]
        if prepare.step != self._step:
            raise RemoteProtocolError(f"{name} prepared step {prepare.step} while step {self._step} is due")
        if prepare.stage in self._prepared:
            raise RemoteProtocolError(f"{name} prepared step {self._step} twice, with different numbers")
        if any(square < 0 for square in prepare.norm2):
            raise RemoteProtocolError(f"{name} prepared step {self._step} with a negative squared norm")
        if prepare.stage == len(self._names) - 1 and (prepare.loss_sum is None or prepare.tokens is None):
            raise RemoteProtocolError(f"{name}, the last stage, prepared step {self._step} without a loss")

    def _decide(self, now_s: float, stop_requested: bool) -> tuple[Commit, StepRecord]:
        prepares = [self._prepared[stage] for stage in range(len(self._names))]
        self._compare_batches(prepares)
        norm = global_norm(square for prepare in prepares for square in prepare.norm2)
        culprits = non_finite_stages(prepares)
        apply = not culprits and math.isfinite(norm)
        self._count_skipped(apply, culprits)
        commit = self._commit(apply, norm, stop_requested)
        record = step_record(commit, prepares, norm, now_s - self._started_s, self._rules.chunks_per_stage)
        self._decided, self._prepared = self._prepared, {}
        self._step += 1
        self._started_s = now_s
        return commit, record

    def _compare_batches(self, prepares: Sequence[Prepare]) -> None:
        readers = [prepare for prepare in prepares if prepare.batch_digest]
        other = next((p for p in readers if p.batch_digest != readers[0].batch_digest), None)
        if other is not None:
            raise DataError(
                f"{self._names[readers[0].stage]} and {self._names[other.stage]} read different batches at step "
                f"{self._step} (digests {readers[0].batch_digest} and {other.batch_digest}): give both the same data "
                "files, and for `text: stdlib` the same Python"
            )

    def _count_skipped(self, apply: bool, culprits: Sequence[int]) -> None:
        self._skipped_in_a_row = 0 if apply else self._skipped_in_a_row + 1
        halt = self._rules.non_finite == "halt" and not apply
        if not halt and self._skipped_in_a_row <= self._rules.max_skipped_in_a_row:
            return
        where = ", ".join(self._names[stage] for stage in culprits) or "the global gradient norm"
        times = f"{self._skipped_in_a_row} steps in a row" if not halt else "training.non_finite is halt"
        raise NonFiniteError(
            f"halted at step {self._step}: NaN or infinity in {where} ({times}); a lower learning rate or clip_norm "
            "may help"
        )

    def _commit(self, apply: bool, norm: float, stop_requested: bool) -> Commit:
        done = self._step + 1
        last = done >= self._rules.total_steps
        stop = last or stop_requested
        evaluate = is_due(done, self._rules.eval_every) or (last and self._rules.eval_every is not None)
        return Commit(
            step=self._step,
            apply=apply,
            clip_factor=clip_factor(norm, self._rules.clip_norm) if apply else 1.0,
            evaluate=evaluate,
            snapshot=stop or is_due(done, self._rules.snapshot_every),
            stop=stop,
        )


def non_finite_stages(prepares: Iterable[Prepare]) -> tuple[int, ...]:
    """Stages that met NaN or infinity, in a gradient or in the loss."""
    return tuple(p.stage for p in prepares if not _is_finite(p))


def _is_finite(prepare: Prepare) -> bool:
    loss = prepare.loss_sum if prepare.loss_sum is not None else 0.0
    return prepare.finite and math.isfinite(loss) and all(map(math.isfinite, prepare.norm2))
