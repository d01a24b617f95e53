"""What `tahq-launch` chooses before a run's first step, with `pipeline.balance: measured`, the default.

The workers are started once to measure: only free memory if the cache has the other figures, and not at all where that
is known without them. Then the planner chooses what cluster.yaml leaves open: hosts and their order, layers,
micro-batch, codecs, first schedule and, for adapters, replicas. In the resulting configuration all of it is set.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config, yaml_flow
from tahq.config.stage_estimate import memory_lines, with_memory_choices
from tahq.coordinator.observer import StepRecord
from tahq.coordinator.schedule_choice import MEMORY_SHARE
from tahq.errors import UserError
from tahq.memory.config import Gradients
from tahq.models.model_spec import ModelSpec
from tahq.observe.metrics_reader import median_step
from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers
from tahq.plan.planner import NothingFitsError, Planned, plan
from tahq.plan.problem import PlanProblem, named
from tahq.plan.search.codecs import LADDER
from tahq.plan.search.stages import StageCosts
from tahq.quant import CodecSpec
from tahq.quant.quality import FLOOR, expected_gap
from tahq.typed_yaml.mistakes import Origins, validated
from tahq.worker.assembly import resolved_spec
from tahq_launch.command_line import announce, progress_of
from tahq_launch.plan.command import interpolated_times, planned_config
from tahq_launch.plan.first_numbers import (
    StoppedError,
    completed,
    first_numbers,
    measures_paths,
    open_micro_batches,
    with_share,
)
from tahq_launch.plan.problem import PlanChoices, problem_of
from tahq_launch.plan.replicas import for_all_replicas, most_replicas, one_replica, slowest_replica
from tahq_launch.plan.step_traffic import link_speeds
from tahq_launch.start.launcher import launch, with_forks
from tahq_launch.start.prepared_run import StartRequest, expected_gap_lines, stages_by_hand, startable_config
from tahq_launch.start.resolution import resolve_for_run

log = logging.getLogger(__name__)

NO_LONGER, MATTERS = 1.5, 0.05
"""Figures that a stage's compute differs from by this factor, and by this share of what all stages compute, are
measured again at the next start: a stage of one block takes longer than a block between others, and no plan changes
for it."""
_NOT_MEASURED = (
    "not measured yet: before its first step a run measures the workers and chooses what is not set, so the figures "
    "below may change"
)
_CHANGES: tuple[Mapping[str, Any], ...] = (
    {"training.optimizer": "adamw_bf16"},
    {"training.optimizer": "adamw8bit"},
    {"memory.activations": "agoq"},
    {"memory.activations": "agoq", "training.optimizer": "adamw8bit"},
    {
        "training.optimizer": "adamw_bf16",
        "training.adamw_bf16": {"weights": "bf16"},
        "memory.gradients": "bf16",
        "memory.residual": "bf16",
    },
)
"""Changes of the arithmetic that save memory, those that change least first; offered where no exact option fits."""


@dataclass(frozen=True, slots=True)
class FirstPlan:
    """A configuration without open choices, and lines that say what was chosen, and why.

    `compute_s` are the seconds that each stage was expected to compute in a step, from the figures in `cached`.
    `joins_again`: workers that were started by hand have just measured. `figures`: what it was planned with.
    """

    config: ClusterConfig
    lines: tuple[str, ...]
    compute_s: tuple[float, ...] = ()
    cached: Path | None = None
    joins_again: bool = False
    figures: ClusterNumbers | None = None

    def watch(self, steps: Sequence[StepRecord]) -> None:
        """Drop the figures from the cache if these steps contradict them."""
        measured_s = [stage.split.compute_s for stage in median_step(steps).stages]
        for stage, (expected, found) in enumerate(zip(self.compute_s, measured_s, strict=True)):
            differs = not 1 / NO_LONGER < found / expected < NO_LONGER
            if self.cached is not None and differs and abs(found - expected) > MATTERS * sum(self.compute_s):
                log.info(
                    "stage %d computes for %.3g s per step, %.3g s by its measurement: the next start measures again",
                    *(stage, found, expected),
                )
                self.cached.unlink(missing_ok=True)
                return


def run_planned(start: StartRequest) -> int:
    """Choose what a new run leaves open, and run it: the exit status of the run, or of a stopped measurement."""
    with with_forks(start) as start:
        try:
            return launch(start if start.resume else planned_start(start))
        except StoppedError as stopped:
            return stopped.exit_status


def planned_start(start: StartRequest, *, measures: bool = True) -> StartRequest:
    """The start of a new run with everything chosen; unchanged if nothing is open.

    Raises:
        UserError: a mistake in the configuration, or the run's folder holds another run.
        StoppedError: a worker was lost, or the user stopped the measurement.
    """
    given = startable_config(start) if measures else load_config(start.config_path, start.all_overrides)
    found = first_plan(given, start, measures=measures)
    lines = found.lines if found is not None else (_NOT_MEASURED,) if given.pipeline.is_open else ()
    for line in (*lines, *([""] if lines and not measures else [])):
        announce(line)
    if found is None:
        return start
    watch = found.watch if found.compute_s else None
    return replace(start, planned=found.config, figures=found.figures, watch=watch, joins_again=found.joins_again)


def first_plan(given: ClusterConfig, start: StartRequest, *, measures: bool = True) -> FirstPlan | None:
    """Choose what a configuration leaves open; None: nothing is open, or this run is not planned.

    Args:
        given: the configuration as read, so that it is known which keys are set.
        start: the command line, for the workers that measure.
        measures: False: only with figures that are known already (for `--dry-run`).
    """
    if not given.pipeline.is_open:
        return None
    config = resolve_for_run(given)
    spec = resolved_spec(config, None)
    by_hand = stages_by_hand(config, starts_workers=start.starts_workers)  # each keeps the stage of its command line
    # invited machines get the stage that the plan gives their key
    keeps_order = start.keeps_order or (by_hand and not start.joined)
    may_reorder = config.hosts != "local" and not keeps_order and config.pipeline.replicas == 1
    has_paths = measures_paths(config, by_hand)
    is_loopback = not has_paths and not link_speeds(config).is_shaped

    def left_open(measured: ClusterNumbers) -> _Open:
        cluster = completed(config, spec, measured, has_paths=has_paths, is_loopback=is_loopback)
        slowest = slowest_replica(config, cluster)
        return _Open(given, one_replica(config), spec, slowest, cluster, may_reorder, is_loopback)

    def needs_codecs(measured: ClusterNumbers) -> bool:
        return left_open(measured).needs_codecs()

    found = first_numbers(given, config, start, needs_codecs, measures=measures)
    if found is None:
        return None
    if by_hand and found.address:
        config = _bound_to(config, found.address)
    origin = found.origin
    whole, choices = config, left_open(found.cluster)
    try:
        config, planned = choices.planned()
    except NothingFitsError:
        config, planned = choices.tightly_planned()
        origin += f"; warning: with {MEMORY_SHARE:.0%} of the memory nothing fits, this takes more"
    found_plan = _chosen(given, config, spec, planned, origin)
    return replace(
        found_plan,
        compute_s=_compute_s(planned, config),
        config=for_all_replicas(found_plan.config, whole),
        cached=found.cached,
        joins_again=bool(by_hand and found.address),
        figures=choices.figures,
    )


def _is_raw(codec: str) -> bool:
    return CodecSpec.parse(codec).name == "raw"


def _is_set(section: Any, key: str) -> bool:
    return key in section.model_fields_set


def _codecs(given: ClusterConfig) -> dict[str, tuple[str, ...]]:
    """The codecs to choose from by direction, from the most faithful to the floor."""
    found = {}
    for direction, spec in given.wire.specs().items():
        names: tuple[str, ...] = (spec,)
        if not _is_set(given.wire, direction) and given.wire.follow is None:
            ladder = [str(CodecSpec.parse(rung)) for rung in LADDER[direction]]
            floor = str(CodecSpec.parse(getattr(FLOOR, direction)))
            names = (*ladder[: ladder.index(floor) if floor in ladder else None], floor)
        found[direction] = tuple(dict.fromkeys(str(CodecSpec.parse(name)) for name in names))
    return found


# -- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Open:
    """What is planned: `config` is `given` resolved; `cluster` has the figures of one replica, `figures` of all.

    `is_loopback`: the links are within this machine, and not shaped.
    """

    given: ClusterConfig
    config: ClusterConfig
    spec: ModelSpec
    cluster: ClusterNumbers
    figures: ClusterNumbers
    may_reorder: bool
    is_loopback: bool

    def needs_codecs(self) -> bool:
        """Whether codecs other than `raw` were not timed, and a plan would use one if it took no time."""
        if not all(map(_is_raw, (codec for host in self.cluster.hosts for codec in host.codecs))):
            return False
        codecs = self.codecs().values()
        if not any(len(names) > 1 for names in codecs):
            return not all(_is_raw(name) for names in codecs for name in names)
        try:
            best = self.planned()[1].slowest.plan
        except NothingFitsError:
            return True
        return not all(map(_is_raw, (*best.activations, *best.gradients)))

    def codecs(self) -> dict[str, tuple[str, ...]]:
        """The codecs to choose from; within a machine only the most faithful."""
        last = 1 if self.is_loopback else None
        return {direction: names[:last] for direction, names in _codecs(self.given).items()}

    def problem(self, gradients: Gradients) -> PlanProblem:
        """What the planner is asked, with gradients kept so."""
        given, config = self.given, _with(self.config, "memory", gradients=gradients)
        schedules = () if config.pipeline.schedule == "auto" else (config.pipeline.schedule,)
        if not schedules and config.pipeline.depths is not None:
            schedules = ("1f1b",)  # which takes any depths
        by_stage = given.pipeline.in_flight, given.memory.agoq.bits, given.memory.recompute
        is_listed = any(isinstance(each, list | tuple) for each in (*by_stage, *given.memory.offload))
        may_leave_out = self.may_reorder and not is_listed and not _is_set(given.pipeline, "stages")
        may_replicate = may_leave_out and not _is_set(given.pipeline, "replicas")
        choices = PlanChoices(schedules=schedules, max_replicas=most_replicas(given) if may_replicate else 1)
        problem = problem_of(config, self.spec, self.cluster, choices, given.optimizer_shares)
        sizes = _measured_sizes(self.cluster.hosts) & set(open_micro_batches(given))
        sizes = sizes or {config.training.micro_batch}  # whose times are interpolated
        codecs = self.codecs()
        return replace(
            problem,
            model=problem.model.with_sizes(sizes),
            activations=codecs["activations"],
            gradients=codecs["gradients"],
            num_stages=None if may_leave_out else config.pipeline.stages,
            in_order=not self.may_reorder,
            firsts=problem.firsts if not _is_set(given.links, "first") else (config.links.first,),
        )

    def planned(self) -> tuple[ClusterConfig, Planned]:
        """The plan, and the configuration with the gradients that it is for: in 8 bits only where nothing else fits.

        Raises:
            NothingFitsError: none fits.
        """
        *others, last = _gradients(self.given)
        for gradients in others:
            with suppress(NothingFitsError):
                return self._planned_with(gradients)
        return self._planned_with(last)

    def _planned_with(self, gradients: Gradients) -> tuple[ClusterConfig, Planned]:
        found = plan(self.problem(gradients), progress=progress_of("planning"))
        return _with(self.config, "memory", gradients=gradients), found

    def tightly_planned(self) -> tuple[ClusterConfig, Planned]:
        """`planned` with all of the memory; UserError, with the first change that would help, if that is too little."""
        try:
            return replace(self, cluster=with_share(self.cluster, 1 / MEMORY_SHARE)).planned()
        except NothingFitsError as error:
            for change in _CHANGES:
                with suppress(NothingFitsError, ValidationError):
                    changed = _changed(self.given, change), _changed(self.config, change)
                    replace(self, given=changed[0], config=changed[1]).planned()
                    text = ", ".join(f"{key}: {yaml_flow(value)}" for key, value in change.items())
                    raise UserError(f"{error}; with {text}, which change what is computed, it fits") from None
            raise UserError(f"{error}; use more hosts, or hosts with more memory") from None


def _gradients(given: ClusterConfig) -> tuple[Gradients, ...]:
    """What may be chosen for `memory.gradients`, the first choice first."""
    if given.memory.gradients != "auto":
        return (given.memory.gradients,)
    stays_fp32 = given.training.is_fused or "gradients" in given.memory.all_offload
    return ("fp32",) if stays_fp32 else ("fp32", "fp8")


def _with(config: ClusterConfig, section: str, **changes: Any) -> ClusterConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def _bound_to(config: ClusterConfig, address: str) -> ClusterConfig:
    """The configuration with the port that workers are about to dial again."""
    bind = f"{config.run.bind.rpartition(':')[0]}:{address.rpartition(':')[2]}"
    return _with(config, "run", bind=bind)


def _measured_sizes(hosts: Sequence[HostNumbers]) -> set[int]:
    return set.intersection(*({times.micro_batch for times in host.compute} for host in hosts))


def _changed(config: ClusterConfig, change: Mapping[str, Any]) -> ClusterConfig:
    """The configuration with other values of some keys; ValidationError: they do not combine with the rest."""
    values = config.model_dump(mode="json", exclude_unset=True)
    for key, value in change.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    return ClusterConfig.model_validate(values)


def _chosen(given: ClusterConfig, config: ClusterConfig, spec: ModelSpec, planned: Planned, origin: str) -> FirstPlan:
    shown, table = planned.slowest, planned.table
    best, hosts = shown.plan, [host for each in planned.pipelines for host in each.hosts]
    done, notes = planned_config(config, table, best, hosts)
    values = done.model_dump(mode="json")
    depths = values["pipeline"]["in_flight"] if given.pipeline.in_flight is None else None
    if given.pipeline.in_flight is not None:
        values["pipeline"]["in_flight"] = given.pipeline.in_flight
    if given.pipeline.schedule == "auto":
        first = {"schedule": best.schedule, "in_flight": depths}
        values["pipeline"] |= {"schedule": "auto", "in_flight": given.pipeline.in_flight, "first": first}
    has = np.min([table.memory[list(each.hosts)] for each in planned.pipelines], axis=0)
    spare = has - np.array(shown.memory_nbytes)
    final = with_memory_choices(
        validated(ClusterConfig, values, Origins("the planned configuration")), spec, spare.tolist()
    )
    return FirstPlan(final, tuple(_lines(given, final, planned, origin, notes)))


def _compute_s(planned: Planned, config: ClusterConfig) -> tuple[float, ...]:
    """Seconds that each stage computes in a step; none where stages wait for each other's GPU or cores."""
    best = planned.slowest.plan
    shares_cores = isinstance(config.hosts, str) and config.pipeline.num_workers > len(os.sched_getaffinity(0))
    if shares_cores or any(host.device for host in planned.table.problem.cluster.hosts):
        return ()
    times = StageCosts.of(planned.table, best).times_of(best)
    return tuple(float(each) for each in best.num_micro_batches * (times.forward + times.backward))


def _lines(
    given: ClusterConfig, final: ClusterConfig, planned: Planned, origin: str, notes: Sequence[str]
) -> Iterator[str]:
    table, chosen = planned.table, planned.slowest.plan
    problem, replicas = table.problem, planned.replicas
    yield f"planned for {planned.tokens_per_s:,.0f} tokens/s; speeds {origin}"
    names = [named(problem, each.hosts) for each in planned.pipelines]
    left_out = [host.name for host in problem.cluster.hosts if host.name not in {*chain(*names)}]
    if not problem.in_order:
        shown = " | ".join(map(" ".join, names))
        without = f", without {', '.join(left_out)}, which would make it slower" if left_out else ""
        yield f"  hosts {shown}{without} (pipeline.stages, pipeline.layers)"
    if replicas is not None:
        sums = f"which sum gradients for {replicas.all_reduce_s:.2g} s per step"
        alone = f"as one pipeline {planned.best.tokens_per_s:,.0f} tokens/s"
        yield f"  {len(names)} replicas, {sums}; {alone} (pipeline.replicas)"
    for one, other in chain(*(pairwise(each.hosts) for each in planned.pipelines)):
        if table.relayed[one, other]:
            ends = " and ".join(named(problem, (one, other)))
            yield f"  the link between {ends} is relayed through the coordinator's machine (run.relay)"
    if chosen.num_stages > 1:
        yield f"  layers {' '.join(map(str, chosen.layers))} (pipeline.layers)"
    if not _is_set(given.training, "micro_batch"):
        yield f"  {chosen.num_micro_batches} micro-batches of {chosen.micro_batch} (training.micro_batch)"
    yield from _schedule_line(given, planned)
    if chosen.first != given.links.first:
        yield f"  {chosen.first} go first on an uplink (links.first)"
    if given.memory.gradients != final.memory.gradients == "fp8":
        yield "  gradients in 8 bits: in fp32 no plan fits (memory.gradients)"
    yield from memory_lines(final, given)
    is_open = any(len(names) > 1 for names in _codecs(given).values())
    if is_open and chosen.activations:
        codecs = " and ".join(CodecSpec.parse(spec).brief() for spec in final.wire.specs().values())
        yield f"  codecs {codecs}: the most bits that do not slow it down (wire.activations, wire.gradients)"
        if gap := expected_gap(final.wire.activations, final.wire.gradients):
            yield f"  {gap}"
    else:
        yield from expected_gap_lines(final)
    for note in (*interpolated_times(planned), *(() if is_open else notes)):
        yield f"  {note}"


def _schedule_line(given: ClusterConfig, planned: Planned) -> Iterator[str]:
    """What is chosen of the schedule and its depths; nothing of a single stage."""
    best, set_to = planned.slowest, given.pipeline
    chosen = {}
    if set_to.schedule == "auto":
        chosen["pipeline.schedule"] = f"schedule {best.plan.schedule} at first"
    if set_to.in_flight is None:
        chosen["pipeline.in_flight"] = f"in flight {' '.join(map(str, best.in_flight))}"
    if chosen and best.plan.num_stages > 1:
        yield f"  {', '.join(chosen.values())} ({', '.join(chosen)})"
