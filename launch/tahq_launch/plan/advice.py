"""What would shorten a run's steps most: changes of its settings, each simulated with what its steps have shown."""

import logging
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tahq.config.cluster import ClusterConfig
from tahq.coordinator.observer import StepRecord
from tahq.coordinator.schedule_choice import LEAST_GAIN, ScheduleChoice
from tahq.observe import figures
from tahq.plan.changes import ChangeKind, best_changes, seconds
from tahq.plan.explanation import faster
from tahq.plan.prediction import fits_memory
from tahq.plan.problem import PipelinePlan, named
from tahq.plan.search.table import ClusterTable
from tahq_launch.plan.schedule_search import measured_run

log = logging.getLogger(__name__)


def advice(config: ClusterConfig, step: StepRecord) -> str:
    """The change that would shorten steps like this one most, with the command for it; empty: not known.

    If no change does, the gain from faster links and hosts. `config` is resolved. Takes up to a few seconds.
    """
    try:
        return _advice(config, step)
    except Exception as error:  # no reason to end a run in another way
        log.warning("no advice on the run's settings", exc_info=error)
        return ""


def _advice(config: ClusterConfig, step: StepRecord) -> str:
    pipeline = config.pipeline
    if pipeline.chunks > 1 or pipeline.replicas > 1:
        return ""
    present = ScheduleChoice(pipeline.first_schedule, tuple(pipeline.depths or ()))
    if step.schedule:
        present = ScheduleChoice(step.schedule, tuple(step.in_flight))
    table, plan = measured_run(config, step, present, [stage.memory_bytes for stage in step.stages])
    now_s = seconds(table, plan)
    whole_s = max(now_s, step.step_time_s)  # what is not simulated counts as unchanged
    adapts = pipeline.schedule == "auto" and pipeline.in_flight is None
    changes = best_changes(table, plan, list(_kinds(config)), adapts_depths=adapts)
    gains = {kind: (now_s - seconds(table, changed)) / whole_s for kind, changed in changes.items()}
    kind = max(gains, key=gains.__getitem__, default=None)
    if kind is None or gains[kind] < LEAST_GAIN:
        return _nothing_helps(table, plan, now_s, whole_s)
    what, command = _in_words(config, table, plan, changes[kind], kind)
    return f"{what} would make steps {figures.share(gains[kind])} shorter: {command}"


def _kinds(config: ClusterConfig) -> Iterator[ChangeKind]:
    """The changes that this run may make and does not make by itself; a sleeping stage's times are set."""
    pipeline = config.pipeline
    if pipeline.stages == 1:
        return
    if pipeline.schedule != "auto" or pipeline.in_flight is not None:
        yield "schedule"
    if config.emulate.sleep is None:
        yield "layers"
        if isinstance(config.hosts, list):
            yield "hosts"
    if config.wire.follow is None:
        yield "codecs"


def _in_words(
    config: ClusterConfig, table: ClusterTable, plan: PipelinePlan, changed: PipelinePlan, kind: ChangeKind
) -> tuple[str, str]:
    """A change, and the command or the edit that makes it; a resumed run takes any of them."""
    if kind == "schedule":
        values: dict[str, Any] = {"pipeline.schedule": "auto"}
        if config.pipeline.in_flight is not None:
            values["pipeline.in_flight"] = "null"
        return f"schedule {ScheduleChoice(changed.schedule, changed.depths)},", _resumed(values)
    if kind == "layers":
        layers = list(changed.layers)
        return f"another division of the layers, {' '.join(map(str, layers))},", _resumed({"pipeline.layers": layers})
    if kind == "hosts":
        order = ", ".join(named(table.problem, changed.hosts))
        return f"the hosts in the order {order}", "change the order of `hosts`, and `--resume`"
    codecs = {name: getattr(changed, name)[0] for name in ("activations", "gradients")}
    values = {f"wire.{name}": codec for name, codec in codecs.items() if codec != getattr(plan, name)[0]}
    return "fewer bits on the links", _resumed(values)


def _resumed(values: dict[str, Any]) -> str:
    words = [word for key, value in values.items() for word in ("--set", f"{key}={value}".replace(" ", ""))]
    return f"`--resume {shlex.join(words)}`"


def _nothing_helps(table: ClusterTable, plan: PipelinePlan, now_s: float, whole_s: float) -> str:
    """The gain from a larger batch, if there is any, and from faster links and hosts."""
    parts = [f"no other setting would make steps {figures.share(LEAST_GAIN)} shorter"]
    model = table.problem.model
    batch = 2 * model.global_batch
    larger = ClusterTable(replace(table.problem, model=replace(model, global_batch=batch)))
    twice = replace(plan, num_micro_batches=2 * plan.num_micro_batches)
    gain = 1 - (seconds(larger, twice) + whole_s - now_s) / (2 * whole_s) if fits_memory(larger, twice) else 0.0
    if gain >= LEAST_GAIN:
        parts.append(
            f"twice as many micro-batches per step, which changes the training, would save {figures.share(gain)} of "
            f"the time per sample: `--set training.global_batch={batch}` in a new run"
        )
    gains = {what: (now_s - seconds(table, plan, speed)) / whole_s for what, speed in faster(plan).items()}
    (first, gain), *others = sorted(gains.items(), key=lambda item: -item[1])
    rest = "".join(f", {what} {figures.share(gain)}" for what, gain in others)
    return "; ".join([*parts, f"{first} would make steps {figures.share(gain)} shorter{rest}"])
