"""The commit of a step: every stage's PREPARE in, one COMMIT for all out.

Pure. Invariants:

- the decision is a function of the set of PREPAREs alone: norms are summed by `math.fsum`, which is exact before its
  one rounding and therefore independent of the order and of the division into stages;
- the same PREPARE again changes nothing, a different one is an error.
"""

import math
from collections.abc import Iterable, Sequence

from tahq.comm.control.messages import Commit, Prepare
from tahq.errors import DataError, NonFiniteError, RemoteProtocolError
from tahq.pipeline.config import TrainingConfig


def global_norm(squared_norms: Iterable[float]) -> float:
    """√(Σ ‖g‖²) in fp64, the sum rounded once (`math.fsum`); infinity or NaN where a term or the sum is.

    Args:
        squared_norms: ‖g‖² of each parameter, of all stages, in any order; none is negative.
    """
    try:
        return math.sqrt(math.fsum(squared_norms))
    except OverflowError:
        return math.inf


def norm_of(prepares: Iterable[Prepare]) -> float:
    """The global gradient norm of a step."""
    return global_norm(square for prepare in prepares for square in prepare.norm2)


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """min(1, clip_norm / norm): what gradients of this global norm are multiplied by.

    `torch.nn.utils.clip_grad_norm_` divides by norm + 1e-6 instead; here only a norm above clip_norm is divided by, so
    a norm of zero needs no guard.

    Args:
        norm: global gradient norm, fp64.
        clip_norm: None: not clipped.
    """
    return clip_norm / norm if clip_norm is not None and norm > clip_norm else 1.0


def is_repeated(prepare: Prepare, before: Prepare | None) -> bool:
    """Whether a stage says the same of the same step again, NaN included."""
    return before is not None and before.step == prepare.step and repr(before) == repr(prepare)


def check_prepare(prepare: Prepare, step: int, before: Prepare | None, name: str, *, is_last: bool) -> None:
    """Check a PREPARE that is not a repetition.

    Args:
        prepare: from the worker of `prepare.stage`.
        step: the step that the run is at.
        before: the stage's PREPARE of this step, if there is one.
        name: of the stage, for messages.
        is_last: whether it is the last stage, which has the loss.

    Raises:
        RemoteProtocolError: a wrong step, a second and different PREPARE, impossible numbers.
    """
    if prepare.step != step:
        raise RemoteProtocolError(f"{name} prepared step {prepare.step} while step {step} is due")
    if before is not None:
        raise RemoteProtocolError(f"{name} prepared step {step} twice, with different numbers")
    if any(square < 0 for square in prepare.norm2):
        raise RemoteProtocolError(f"{name} prepared step {step} with a negative squared norm")
    if is_last and (prepare.loss_sum is None or prepare.tokens is None):
        raise RemoteProtocolError(f"{name}, the last stage, prepared step {step} without a loss")


def decide(
    training: TrainingConfig,
    prepares: Sequence[Prepare],
    names: Sequence[str],
    *,
    num_steps: int,
    snapshot_every: int | None = None,
    skipped_in_a_row: int = 0,
    stop: bool = False,
) -> Commit:
    """The decision about a step.

    Args:
        training: clipping, evaluations, and what to do about NaN.
        prepares: every stage's, by stage.
        names: of the stages, for messages.
        num_steps: length of the run.
        snapshot_every: steps between checkpoints.
        skipped_in_a_row: steps before this one that were skipped.
        stop: this step is to be the last.

    Raises:
        DataError: the stages that read data read different batches.
        NonFiniteError: NaN or infinity, and the configuration says to halt.
    """
    done = prepares[0].step + 1
    _compare_batches(prepares, names)
    norm, culprits = norm_of(prepares), [p.stage for p in prepares if not _is_finite(p)]
    apply = not culprits and math.isfinite(norm)
    if not apply:
        _check_skipped(training, done - 1, [names[stage] for stage in culprits], skipped_in_a_row + 1)
    last = done >= num_steps
    return Commit(
        step=done - 1,
        apply=apply,
        clip_factor=clip_factor(norm, training.clip_norm) if apply else 1.0,
        evaluate=training.eval_every is not None and (last or done % training.eval_every == 0),
        snapshot=last or stop or (snapshot_every is not None and done % snapshot_every == 0),
        stop=last or stop,
    )


def _compare_batches(prepares: Sequence[Prepare], names: Sequence[str]) -> None:
    readers = [prepare for prepare in prepares if prepare.batch_digest]
    other = next((p for p in readers if p.batch_digest != readers[0].batch_digest), None)
    if other is not None:
        raise DataError(
            f"{names[readers[0].stage]} and {names[other.stage]} read different batches at step {other.step} "
            f"(digests {readers[0].batch_digest} and {other.batch_digest}): give both the same data files, and for "
            "`text: stdlib` the same Python"
        )


def _check_skipped(training: TrainingConfig, step: int, culprits: Sequence[str], skipped_in_a_row: int) -> None:
    halt = training.non_finite == "halt"
    if not halt and skipped_in_a_row <= training.max_skipped_in_a_row:
        return
    where = ", ".join(culprits) or "the global gradient norm"
    times = "training.non_finite is halt" if halt else f"{skipped_in_a_row} steps in a row"
    raise NonFiniteError(
        f"halted at step {step}: NaN or infinity in {where} ({times}); a lower learning rate or clip_norm may help"
    )


def _is_finite(prepare: Prepare) -> bool:
    loss = prepare.loss_sum if prepare.loss_sum is not None else 0.0
    return prepare.finite and math.isfinite(loss) and all(map(math.isfinite, prepare.norm2))
