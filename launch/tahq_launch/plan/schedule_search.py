"""The schedule and depths that make a run's steps shortest, from what its steps have shown (`pipeline.schedule: auto`).

Hosts, layers, micro-batches and codecs stay as they are.
"""

from collections.abc import Sequence

from tahq.config.cluster import ClusterConfig
from tahq.coordinator.observer import StepRecord
from tahq.coordinator.schedule_choice import Choose, Proposal, ScheduleChoice
from tahq.observe.metrics_reader import median_step
from tahq.plan.changes import best_schedule
from tahq.plan.prediction import predict
from tahq.plan.search.search import Simulations
from tahq_launch.plan.measured_run import measured_run

_BUDGET_ACTIONS = 50_000
"""Actions after which no more plans are simulated: a second or two beside the run."""


def schedule_search(config: ClusterConfig) -> Choose | None:
    """The search for a resolved configuration; None: its schedule is fixed, or there is nothing to choose."""
    pipeline, training = config.pipeline, config.training
    if pipeline.schedule != "auto" or pipeline.stages == 1 or training.num_micro_batches == 1:
        return None

    def choose(steps: Sequence[StepRecord], present: ScheduleChoice, memory: Sequence[int]) -> Proposal:
        table, plan = measured_run(config, median_step(steps), present, memory)
        chosen = best_schedule(Simulations(table, _BUDGET_ACTIONS), plan, fixed_depths=pipeline.depths is not None)
        step_s, present_s = (predict(table, each).step_s for each in (chosen, plan))
        return Proposal(ScheduleChoice(chosen.schedule, chosen.depths), step_s, present_s)

    return choose
