"""The schedule and depths that make a run's steps shortest, from what its steps have shown (`pipeline.schedule: auto`).

Hosts, layers, micro-batches and codecs stay as they are. Compute and coding times are measured ones. Rates and
latencies are those of `emulate` where it limits them; where it does not, a rate is what the link was seen to carry.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import block_ranges, with_memory_choices
from tahq.coordinator.observer import LinkRecord, StageRecord, StepRecord
from tahq.coordinator.schedule_choice import Choose, Proposal, ScheduleChoice
from tahq.models.costs import counted_costs
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.observe.metrics_reader import median_step
from tahq.plan.changes import best_schedule
from tahq.plan.cluster_numbers import ClusterNumbers, CodecTimes, HostNumbers, LayerTimes, PathNumbers
from tahq.plan.prediction import predict
from tahq.plan.problem import PipelinePlan, PlanProblem
from tahq.plan.search.search import Simulations
from tahq.plan.search.table import ClusterTable
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan.numbers import estimated_numbers, stage_device
from tahq_launch.plan.problem import PlanChoices, given_plan, problem_of

_SEEN = 0.02
"""Share of a step that a link must have been busy for its rate to be known."""
_BUDGET_ACTIONS = 50_000
"""Actions after which no more plans are simulated: a second or two beside the run."""


def schedule_search(config: ClusterConfig) -> Choose | None:
    """The search for a resolved configuration; None: its schedule is fixed, or there is nothing to choose."""
    pipeline, training = config.pipeline, config.training
    if pipeline.schedule != "auto" or pipeline.stages == 1 or pipeline.replicas > 1 or training.num_micro_batches == 1:
        return None

    def choose(steps: Sequence[StepRecord], present: ScheduleChoice, memory: Sequence[int]) -> Proposal:
        table, plan = measured_run(config, median_step(steps), present, memory)
        simulations = Simulations(table, _BUDGET_ACTIONS, in_pieces=True)
        chosen = best_schedule(simulations, plan, fixed_depths=pipeline.depths is not None)
        step_s, present_s = (predict(table, each).step_s for each in (chosen, plan))
        return Proposal(ScheduleChoice(chosen.schedule, chosen.depths), step_s, present_s)

    return choose


def measured_run(
    config: ClusterConfig, step: StepRecord, present: ScheduleChoice, memory: Sequence[int]
) -> tuple[ClusterTable, PipelinePlan]:
    """The problem of a resolved configuration without chunks, and the run as its plan.

    `step` has been measured under `present`; `memory` is in bytes by stage, 0: unknown.
    """
    spec = resolved_spec(config, None)
    config = with_memory_choices(config, spec)  # a run keeps what its stages recompute and offload
    problem = problem_of(config, spec, _measured(config, spec, step, memory), PlanChoices())
    return ClusterTable(problem), _running(config, problem, step, present)


def _running(config: ClusterConfig, problem: PlanProblem, step: StepRecord, present: ScheduleChoice) -> PipelinePlan:
    """The run as a plan."""
    plan = given_plan(config, problem)
    assert plan is not None, "a resolved configuration without chunks, and numbers of its own hosts"
    codecs = {(link.link, link.direction): link.codec for link in step.links if link.codec}
    cuts = range(plan.num_stages - 1)
    depths = present.depths or tuple(range(plan.num_stages, 0, -1))
    return replace(
        plan,
        schedule=present.schedule,
        depths=() if present.schedule == "gpipe" else depths,
        activations=tuple(codecs.get((cut, "activations"), plan.activations[cut]) for cut in cuts),
        gradients=tuple(codecs.get((cut, "gradients"), plan.gradients[cut]) for cut in cuts),
    )


def _measured(config: ClusterConfig, spec: ModelSpec, step: StepRecord, memory: Sequence[int]) -> ClusterNumbers:
    """What the step has shown of hosts and paths."""
    configured, _ = estimated_numbers(config, spec)
    costs = counted_costs(spec, config.data.seq_len)
    head = 0.0 if config.emulate.sleep else costs.head * len(costs.blocks) / sum(costs.blocks)
    ranges, sharing = block_ranges(config, spec), _stages_by_gpu(config)
    hosts = []
    for stage, host in enumerate(configured.hosts):
        device = next((name for name, stages in sharing.items() if stage in stages), None)
        shown = [(step.stages[each], ranges[each]) for each in (sharing[device] if device else [stage])]
        compute = _layer_times(config, step.step_time_s, shown, spec.first_trainable, head)
        changes = {"memory": memory[stage] or None, "device": device, "compute": [compute]}
        hosts.append(host.model_copy(update=changes | {"codecs": _codec_times(step, stage)}))
    return configured.model_copy(update={"hosts": hosts, "paths": list(_paths(configured, hosts, step.links))})


def _stages_by_gpu(config: ClusterConfig) -> dict[str, list[int]]:
    """The stages that share a GPU of this machine, by its name."""
    if not isinstance(config.hosts, str) or config.emulate.sleep is not None:
        return {}
    stages = range(config.pipeline.stages)
    names = [str(stage_device(config, stage)) for stage in stages]
    shared = {name for name in names if name.startswith("cuda") and names.count(name) > 1}
    return {name: [stage for stage in stages if names[stage] == name] for name in shared}


def _layer_times(
    config: ClusterConfig,
    step_s: float,
    shown: Sequence[tuple[StageRecord, BlockRange]],
    first_trainable: int,
    head: float,
) -> LayerTimes:
    """Seconds of a block of these stages, and of the head, which takes as long as `head` blocks.

    They add up to what the stages have measured; the embedding counts as their blocks'. They are one stage, or those
    that share a GPU: their times have those in which it was another's, but it computed no longer than the step.
    """
    count, splits = config.training.num_micro_batches, [stage.split for stage, _ in shown]
    whole, trained = (
        count * sum(layers) + count * head * any(blocks.last for _, blocks in shown)
        for layers in zip(*((len(blocks), blocks.num_trained(first_trainable)) for _, blocks in shown), strict=True)
    )
    alone = min(1.0, step_s / max(1e-9, sum(split.compute_s for split in splits))) if len(shown) > 1 else 1.0
    forward = max(1e-9, alone * sum(split.forward_s for split in splits) / whole)
    backward = alone * sum(split.backward_s for split in splits) / trained if trained else 2 * forward
    parts = [stage.timing.get("input_gradient") for stage, _ in shown]
    input_s = alone * sum(part or 0.0 for part in parts)
    return LayerTimes(
        micro_batch=config.training.micro_batch,
        block_forward=forward,
        block_backward=backward,
        block_input_gradient=None if None in parts or not trained else min(backward, input_s / trained),
        last_forward=head * forward,
        last_backward=head * backward,
    )


def _codec_times(step: StepRecord, stage: int) -> dict[str, CodecTimes]:
    split = step.stages[stage].split
    sent = sum(link.elements for link in step.links if link.sender == stage)
    received = sum(link.elements for link in step.links if link.receiver == stage)
    encode_s = split.encode_s + split.beside_s.get("encode", 0.0)
    decode_s = split.decode_s + split.beside_s.get("decode", 0.0)
    times = CodecTimes(
        encode_per_element=encode_s / sent if sent else 0.0, decode_per_element=decode_s / received if received else 0.0
    )
    return {link.codec: times for link in step.links if link.codec and stage in (link.sender, link.receiver)}


def _paths(
    configured: ClusterNumbers, hosts: Sequence[HostNumbers], links: Sequence[LinkRecord]
) -> Iterator[PathNumbers]:
    """The configured paths, with rates and round trips that were seen where nothing is configured."""
    known = {(path.source, path.target): path for path in configured.paths}
    for link in links:
        source, target = hosts[link.sender], hosts[link.receiver]
        path = known.get((source.name, target.name), PathNumbers(source=source.name, target=target.name))
        is_free = source.up is None and target.down is None and path.rate is None
        if is_free and link.wire_s > _SEEN * (link.busy_s + link.idle_s):
            path = path.model_copy(update={"rate": 8 * link.wire_bytes / link.wire_s})
        if path.round_trip is None and configured.round_trip == 0 and link.round_trip_s > 0:
            path = path.model_copy(update={"round_trip": link.round_trip_s})
        known[source.name, target.name] = path
    yield from known.values()
