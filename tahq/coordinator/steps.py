"""From every stage's PREPARE: the decision about a step, its record for observers, and the picture of a traced step.

Pure: clock offsets and times are arguments. The decision is a function of the set of PREPAREs alone: norms are summed
by `math.fsum`, which is exact before its one rounding and so independent of the order and of the division into stages.
The same PREPARE again changes nothing; a different one is an error.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tahq.comm.control.messages import Commit, Prepare, Traced
from tahq.comm.control.server import ClockOffset
from tahq.comm.link.frame import Direction
from tahq.comm.topology import Grid, LinkEnds
from tahq.coordinator.loss_scale import LEAST
from tahq.coordinator.observer import (
    LinkRecord,
    StageRecord,
    StageSplit,
    StageTrace,
    StepRecord,
    StepTrace,
    TracedSpan,
    Traffic,
)
from tahq.errors import DataError, NonFiniteError, RemoteProtocolError
from tahq.pipeline.config import TrainingConfig

NUM_REWARDS = 4
"""Of `Prepare.rewards`."""

# -- the decision ----------------------------------------------------------------------------------


def global_norm(squared_norms: Iterable[float]) -> float:
    """√(Σ ‖g‖²) in fp64, the sum rounded once (`math.fsum`); infinity or NaN where a term or the sum is.

    Args:
        squared_norms: ‖g‖² of each parameter, of all stages, in any order; none is negative.
    """
    try:
        return math.sqrt(math.fsum(squared_norms))
    except OverflowError:
        return math.inf


def norm_of(prepares: Sequence[Prepare], num_norms: int) -> float:
    """The global gradient norm of a step, from the first so many workers; replicas have the same, or all count."""
    return global_norm(square for prepare in one_replica(prepares, num_norms).values() for square in prepare.norm2)


def one_replica(prepares: Sequence[Prepare], num_stages: int) -> dict[int, Prepare]:
    """For each stage of a pipeline of so many, the PREPARE of one of the workers that run it."""
    return {prepare.stage % num_stages: prepare for prepare in reversed(prepares)}


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """min(1, clip_norm / norm): the factor for gradients of this global fp64 norm; `clip_norm` None: not clipped.

    `torch.nn.utils.clip_grad_norm_` divides by norm + 1e-6 instead; here only a norm above clip_norm is divided by, so
    a norm of zero needs no guard.
    """
    return clip_norm / norm if clip_norm is not None and norm > clip_norm else 1.0


def is_repeated(prepare: Prepare, before: Prepare | None) -> bool:
    """Whether a stage sent the same PREPARE of the same step again, NaN included."""
    return before is not None and before.step == prepare.step and repr(before) == repr(prepare)


def check_prepare(
    prepare: Prepare, step: int, before: Prepare | None, name: str, *, has_loss: bool, may_abandon: bool = False
) -> None:
    """Check a stage's PREPARE that is not a repetition; `before` is its PREPARE of this step, if there is one.

    `has_loss`: it is the last stage, of a replica that computes. `may_abandon`: steps of this run can be abandoned.

    Raises:
        RemoteProtocolError: a wrong step, a second and different PREPARE, impossible numbers, a missing loss.
    """
    if prepare.step != step:
        raise RemoteProtocolError(f"{name} prepared step {prepare.step} while step {step} is due")
    if before is not None:
        raise RemoteProtocolError(f"{name} prepared step {step} twice, with different numbers")
    if any(square < 0 for square in prepare.norm2):
        raise RemoteProtocolError(f"{name} prepared step {step} with a negative squared norm")
    if prepare.abandoned and not may_abandon:
        raise RemoteProtocolError(f"{name} abandoned step {step}, and this run abandons none")
    if has_loss and not prepare.abandoned and (prepare.loss_sum is None or prepare.tokens is None):
        raise RemoteProtocolError(f"{name}, the last stage, prepared step {step} without a loss")
    if prepare.rewards and (len(prepare.rewards) != NUM_REWARDS or not prepare.rewards[0] >= 1):
        raise RemoteProtocolError(f"{name} prepared step {step} with impossible rewards: {prepare.rewards}")


def decide(
    training: TrainingConfig,
    prepares: Sequence[Prepare],
    names: Sequence[str],
    *,
    num_steps: int,
    num_stages: int | None = None,
    num_norms: int | None = None,
    abandoned: bool = False,
    is_checkpoint_due: bool = False,
    skipped_in_a_row: int = 0,
    loss_scale: float = 0.0,
    stop: bool = False,
) -> Commit:
    """The decision about a step.

    Args:
        training: clipping, evaluations, and what to do about NaN.
        prepares: every stage's, by stage; some replicas may lack some.
        names: of the stages, for messages.
        num_steps: length of the run.
        num_stages: of one replica; None: of the only one.
        num_norms: workers that report different norms; None: those of one replica.
        abandoned: this step is given up.
        is_checkpoint_due: this step ends with a checkpoint, as the last one does.
        skipped_in_a_row: steps before this one that were skipped.
        loss_scale: of this step, in which gradients may overflow; 0: there is none.
        stop: this step is to be the last.

    Raises:
        DataError: the stages that read data read different batches, or replicas have different sums or weights.
        NonFiniteError: NaN or infinity, and the configuration says to halt.
    """
    done, num_stages = prepares[0].step + 1, num_stages or len(prepares)
    num_norms = num_norms or num_stages
    abandoned |= any(prepare.abandoned for prepare in prepares)
    if not abandoned:
        _compare_batches(prepares, names)
        _compare_replicas(prepares, names, "weights", num_stages, lambda prepare: prepare.weights_digest)
        _compare_replicas(prepares, names, "summed gradients", num_norms, lambda prepare: repr(prepare.norm2))
    norm, culprits = norm_of(prepares, num_norms), [p.stage for p in prepares if not _is_finite(p)]
    apply = not abandoned and not culprits and math.isfinite(norm)
    if not (apply or abandoned):
        where = ", ".join(names[stage] for stage in culprits) or "the global gradient norm"
        if loss_scale == 0 or (training.non_finite == "halt" and not _has_finite_loss(prepares)):
            _check_skipped(training, done - 1, where, skipped_in_a_row + 1)
        elif loss_scale <= LEAST:
            raise NonFiniteError(
                f"halted at step {done - 1}: NaN or infinity in {where} at the lowest loss scale, {loss_scale:g}; a "
                "lower learning rate may help, or training.precision: fp32"
            )
    last, samples = done >= num_steps, training.samples
    return Commit(
        step=done - 1,
        apply=apply,
        clip_factor=clip_factor(norm, training.clip_norm) if apply else 1.0,
        evaluate=training.eval_every is not None and (last or done % training.eval_every == 0),
        snapshot=last or stop or is_checkpoint_due,
        stop=last or stop,
        abandoned=abandoned,
        sample=samples is not None and (last or done % samples.every == 0),
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


def _compare_replicas(
    prepares: Sequence[Prepare], names: Sequence[str], what: str, period: int, reported: Callable[[Prepare], str]
) -> None:
    """Compare what workers report whose numbers differ by a multiple of `period`."""
    firsts = one_replica(prepares, period)
    for prepare in prepares:
        first = firsts[prepare.stage % period]
        if prepare is not first and reported(prepare) != reported(first):
            raise DataError(
                f"{names[first.stage]} and {names[prepare.stage]}, replicas of one stage, have different {what} at "
                f"step {prepare.step + 1}: they need the same kind of device and the same torch; resume from the "
                "last checkpoint"
            )


def _check_skipped(training: TrainingConfig, step: int, where: str, skipped_in_a_row: int) -> None:
    halt = training.non_finite == "halt"
    if not halt and skipped_in_a_row <= training.max_skipped_in_a_row:
        return
    times = "training.non_finite is halt" if halt else f"{skipped_in_a_row} steps in a row"
    raise NonFiniteError(
        f"halted at step {step}: NaN or infinity in {where} ({times}); a lower learning rate or clip_norm may help"
    )


def _is_finite(prepare: Prepare) -> bool:
    return prepare.finite and _has_finite_loss([prepare]) and all(map(math.isfinite, prepare.norm2))


def _has_finite_loss(prepares: Sequence[Prepare]) -> bool:
    return all(prepare.loss_sum is None or math.isfinite(prepare.loss_sum) for prepare in prepares)


# -- the record ------------------------------------------------------------------------------------

BACKWARD = ("backward", "input_gradient", "weight_gradient")
WAIT, BESIDE = "wait:", "beside:"
NUM_COUNTS, ROW_LENGTH = 6, 10
"""Of a row of `Prepare.links`: link, direction, frames, payload bytes, wire bytes, elements; and four times."""
_MAX_NUMBER = 2.0**53
"""fp64 holds integers up to here exactly; and infinity could not be printed."""


def step_record(
    commit: Commit,
    prepares: Sequence[Prepare],
    step_time_s: float,
    grid: Grid,
    lr: float = 0.0,
    computing: Sequence[int] = (),
    num_norms: int | None = None,
) -> StepRecord:
    """The record of a step that was just decided.

    Args:
        commit: the decision.
        prepares: every stage's, by stage; those of last stages have the loss. Some replicas may lack some.
        step_time_s: seconds from the commit before to this one.
        grid: the stages and their links.
        lr: the step's learning rate.
        computing: the replicas that shared the batch; empty: all.
        num_norms: see `decide`.

    Raises:
        RemoteProtocolError: a row about a link that its stage does not have.
    """
    sums = [each.loss_sum for each in prepares if grid.is_last(each.stage) and each.loss_sum is not None]
    tokens = next((each.tokens for each in prepares if grid.is_last(each.stage) and each.tokens), None)
    ends, present = grid.links(), {each.stage: each for each in prepares}
    of_routers = [each.router_loss for each in prepares if each.router_loss is not None]
    has_loss = len(sums) == (len(computing) or grid.replicas) and not commit.abandoned
    rewards = [_sum(column) for column in zip(*(each.rewards for each in prepares if each.rewards), strict=True)]
    count = rewards[0] if rewards else tokens
    return StepRecord(
        step=commit.step + 1,
        loss=_sum(sums) / count if has_loss and count else math.nan,
        rewards=_rewards(*rewards) if rewards and has_loss else {},
        router_loss=_sum(of_routers) if of_routers and has_loss else None,
        tokens=tokens or 0,
        step_time_s=step_time_s,
        grad_norm=math.nan if commit.abandoned else norm_of(prepares, num_norms or grid.num_stages),
        clip_factor=commit.clip_factor,
        skipped=not commit.apply,
        evaluating=commit.evaluate,
        sampling=commit.sample,
        stages=tuple(_stage_record(number, present.get(number), step_time_s) for number in range(grid.num_workers)),
        links=tuple(link for p in prepares for link in _link_records(p, ends, step_time_s)),
        lr=lr,
        computing=tuple(computing) or tuple(range(grid.replicas)),
        abandoned=commit.abandoned,
    )


def _rewards(num_pairs: float, chosen: float, rejected: float, num_right: float) -> dict[str, float]:
    """Means over pairs, from sums."""
    means = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "accuracy": num_right}
    return {name: value / num_pairs for name, value in means.items()}


def _stage_record(stage: int, prepare: Prepare | None, step_time_s: float) -> StageRecord:
    """`prepare` None: its worker is lost."""
    if prepare is None:
        return StageRecord(stage, {})
    timing = prepare.timing
    return StageRecord(
        stage=stage,
        timing=dict(timing),
        codec_state_bytes=prepare.codec_state_bytes,
        split=stage_split(timing, prepare.active_s, step_time_s),
        peak_bytes=prepare.peak_bytes,
    )


def _sum(terms: Sequence[float]) -> float:
    """Exact where it is finite, so independent of the order."""
    return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)


def stage_split(timing: Mapping[str, float], active_s: float, step_time_s: float) -> StageSplit:
    """Split a stage's step.

    Args:
        timing: seconds by activity, as `Stopwatch.take` names them.
        active_s: from the COMMIT before to PREPARE, on the worker's clock.
        step_time_s: from commit to commit, on the coordinator's.
    """

    def take(*activities: str) -> float:
        return sum(timing.get(activity, 0.0) for activity in activities)

    senders = {name: name.removeprefix(WAIT) for name in timing if name.startswith(WAIT)}
    measured_s = sum(seconds for activity, seconds in timing.items() if not activity.startswith(BESIDE))
    return StageSplit(
        forward_s=take("forward"),
        backward_s=take(*BACKWARD),
        encode_s=take("encode"),
        decode_s=take("decode"),
        wait_s={int(sender): timing[name] for name, sender in senders.items() if sender.isdecimal()},
        wait_codec_s=take("wait:codec"),
        wait_memory_s=take("wait:memory"),
        data_s=take("data"),
        optimizer_s=take("optimizer", "norms"),
        snapshot_s=take("snapshot"),
        other_s=max(0.0, active_s - measured_s),
        commit_s=max(0.0, step_time_s - max(active_s, 0.0)),
        beside_s={name.removeprefix(BESIDE): s for name, s in timing.items() if name.startswith(BESIDE)},
    )


def _link_records(prepare: Prepare, ends: Sequence[LinkEnds], step_time_s: float) -> list[LinkRecord]:
    """The traffic that a stage sent, with the relative errors that it measured: infinite perhaps, never negative."""
    if not all(len(error) == 3 and error[2] >= 0 for error in prepare.codec_errors):
        raise RemoteProtocolError(
            f"stage {prepare.stage} reported impossible codec errors: expected rows of [link, direction, error >= 0]"
        )
    errors = {(link, direction): error for link, direction, error in prepare.codec_errors}
    records = []
    for row in prepare.links:
        try:
            if len(row) != ROW_LENGTH or not all(0 <= number <= _MAX_NUMBER for number in row):
                raise ValueError
            link, direction, frames, payload, wire, elements = (int(number) for number in row[:NUM_COUNTS])
            receiver, traffic = _other_end(prepare.stage, ends[link], Direction(direction))
        except (ValueError, OverflowError, IndexError):
            raise RemoteProtocolError(
                f"stage {prepare.stage} reported impossible traffic: {list(row)[:ROW_LENGTH]}"
            ) from None
        busy_s, sending_s, wire_s, round_trip_s = row[NUM_COUNTS:]
        place, counts = (link, prepare.stage, receiver, traffic), (frames, payload, wire, elements)
        idle_s, error = max(0.0, step_time_s - busy_s), errors.get((row[0], row[1]))
        times_s = busy_s, sending_s, wire_s, idle_s
        records.append(LinkRecord(*place, *counts, *times_s, relative_error=error, round_trip_s=round_trip_s))
    return records


def _other_end(stage: int, ends: LinkEnds, direction: Direction) -> tuple[int, Traffic]:
    """The stage that receives what this stage sends on this link, and the kind of traffic.

    Both directions of a link that is no cut, of tied embeddings or of replicas, carry gradients.
    """
    if stage not in (ends.lower, ends.upper):
        raise ValueError
    other = ends.other(stage)
    if ends.cut is None:
        return other, "gradients" if ends.is_tie else "all-reduce"
    if (stage == ends.lower) != (direction is Direction.FORWARD):
        raise ValueError
    return other, "activations" if direction is Direction.FORWARD else "gradients"


# -- traces ----------------------------------------------------------------------------------------

MAX_PART = 2048
"""Spans in one message."""
MAX_PARTS = 256
"""Messages of one stage about one step: half a million spans."""
KEPT_STEPS = 16
"""Steps whose times and parts are kept."""


class TraceCollector:
    """Collects the parts of traced steps, and brings their spans to the coordinator's clock.

    A step is complete once every stage has sent all of its parts; the oldest incomplete steps are forgotten. Parts
    may come a step late, so those of a step that the previous coordinator committed are dropped without an error.

    Args:
        names: of all stages, for messages and pictures.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._times: dict[int, tuple[float, float]] = {}
        self._parts: dict[int, list[dict[int, Traced]]] = {}

    def committed(self, step: int, begin_s: float, end_s: float) -> None:
        """Note when a step (from 0) began and was committed."""
        self._times[step] = (begin_s, end_s)
        _forget_oldest(self._times)

    def take(self, part: Traced, offsets: Sequence[ClockOffset | None]) -> StepTrace | None:
        """Count a part; returns the whole step once all parts are there.

        Args:
            part: from the worker of its stage.
            offsets: each stage's clock minus the coordinator's; None: unknown.

        Raises:
            RemoteProtocolError: a step that was not committed, a repeated part, impossible numbers.
        """
        name = self._names[part.stage]
        if part.step > max(self._times, default=math.inf):
            raise RemoteProtocolError(f"{name} sent a trace of step {part.step}, which was not committed yet")
        if part.step not in self._times:
            return None
        _check_trace(part, name)
        stages = self._parts.setdefault(part.step, [{} for _ in self._names])
        _forget_oldest(self._parts)
        if part.part in stages[part.stage]:
            raise RemoteProtocolError(f"{name} sent part {part.part} of its trace of step {part.step} twice")
        stages[part.stage][part.part] = part
        if not all(parts and len(parts) == next(iter(parts.values())).num_parts for parts in stages):
            return None
        del self._parts[part.step]
        traces = []
        for stage, (name, parts, offset) in enumerate(zip(self._names, stages, offsets, strict=True)):
            offset_s, error_s = (offset.offset_s, offset.error_s) if offset is not None else (0.0, math.nan)
            spans = [span for number in sorted(parts) for span in _spans(parts[number], offset_s)]
            spans.sort(key=lambda span: span.begin_s)
            traces.append(StageTrace(stage, name, offset_s, error_s, tuple(spans)))
        return StepTrace(part.step + 1, *self._times[part.step], tuple(traces))


def _forget_oldest(by_step: dict[int, Any]) -> None:
    while len(by_step) > KEPT_STEPS:
        del by_step[min(by_step)]


def _check_trace(part: Traced, name: str) -> None:
    columns = (part.lanes, part.categories, part.names, part.frames, part.begins_s, part.ends_s)
    lengths = {len(column) for column in (*columns, part.nbytes, part.queued_s)}
    times = zip(part.begins_s, part.ends_s, strict=False)
    if (
        len(lengths) != 1
        or max(lengths) > MAX_PART
        or not 0 <= part.part < part.num_parts <= MAX_PARTS
        or not all(math.isfinite(begin_s) and begin_s <= end_s < math.inf for begin_s, end_s in times)
    ):
        raise RemoteProtocolError(f"{name} sent a malformed trace of step {part.step}")


def _spans(part: Traced, offset_s: float) -> list[TracedSpan]:
    times = ([time_s - offset_s for time_s in column] for column in (part.begins_s, part.ends_s))
    columns = (part.lanes, part.categories, part.names, *times, part.frames, part.nbytes, part.queued_s)
    return [TracedSpan(*row) for row in zip(*columns, strict=True)]
