"""The planner's small clusters as problems that can be trained: slowed, with codecs that take time, and as networks.

Nothing here measures. A cluster's rates are what TCP carries, so its network's are higher by what headers take.
"""

import math
from dataclasses import replace
from typing import Any

from bench_planner import model, small_cluster
from engine_points import CONGESTION_CONTROL, SETTLING_FRAMES

from tahq.comm.config import LinksConfig
from tahq.comm.network_config import HostConfig, NetworkConfig, PairConfig
from tahq.comm.network_model import GOODPUT_SHARE
from tahq.errors import TahqError
from tahq.pipeline.schedule.schedule import ActionKind
from tahq.plan.cluster_numbers import ClusterNumbers, CodecTimes, HostNumbers, LayerTimes, PathNumbers
from tahq.plan.prediction import Speed, plan_costs
from tahq.plan.problem import PipelinePlan, PlanProblem
from tahq.plan.search.table import ClusterTable
from tahq_netem.network.description import NetworkPlan, plan_network
from tahq_netem.sweep.points import SessionKey
from tahq_netem.sweep.prediction import CodecSeconds
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.stage_times import StageTimes

NUM_LAYERS, GLOBAL_BATCH = 12, 8
SCHEDULES = ("1f1b", "gpipe", "zero-bubble")
WIRE = ("tah", "fixed:bits=6")
CODEC_TIMES = {
    "tah": CodecTimes(encode_per_element=9.34e-3 / 3_276_800, decode_per_element=2.65e-3 / 3_276_800),
    "fixed:bits=6": CodecTimes(encode_per_element=6.71e-3 / 3_276_800, decode_per_element=3.87e-3 / 3_276_800),
}
"""By results/codec_cpu_epyc2_202611.md: a tensor of 3,276,800 float32 on one thread of an EPYC, backend cpu."""
_SECONDS = (
    *("block_forward", "block_backward", "block_input_gradient"),
    *("first_forward", "first_backward", "last_forward", "last_backward"),
)


def problem(seed: int, scale: float) -> PlanProblem:
    """What bench_planner asks of this cluster, slowed, with one codec a direction and frames in pieces."""
    return PlanProblem(
        model(NUM_LAYERS, GLOBAL_BATCH),
        slowed(small_cluster(seed), scale),
        activations=(WIRE[0],),
        gradients=(WIRE[1],),
        schedules=SCHEDULES,
        piece_nbytes=LinksConfig().piece,
    )


def slowed(cluster: ClusterNumbers, scale: float) -> ClusterNumbers:
    """Compute takes `scale` times as long, rates are as much lower, round trips stay; every host codes alike."""

    def times(of: LayerTimes) -> LayerTimes:
        known = {name: getattr(of, name) for name in _SECONDS}
        return of.model_copy(update={name: scale * value for name, value in known.items() if value is not None})

    def host(of: HostNumbers) -> HostNumbers:
        rates = {"up": _divided(of.up, scale), "down": _divided(of.down, scale)}
        return of.model_copy(update={**rates, "compute": [times(each) for each in of.compute], "codecs": CODEC_TIMES})

    def path(of: PathNumbers) -> PathNumbers:
        return of.model_copy(update={"rate": _divided(of.rate, scale)})

    hosts, paths = [host(each) for each in cluster.hosts], [path(each) for each in cluster.paths]
    return cluster.model_copy(update={"hosts": hosts, "paths": paths})


def _divided(rate: float | None, by: float) -> float | None:
    return None if rate is None else rate / by


def network_config(cluster: ClusterNumbers) -> NetworkConfig:
    """The hosts' links and the delays between them; caps of paths are `network_plan`'s."""
    return NetworkConfig(
        hosts={host.name: HostConfig(up=_on_wire(host.up), down=_on_wire(host.down)) for host in cluster.hosts},
        pairs=[
            PairConfig(between=(path.source, path.target), delay=(path.round_trip or 0.0) / 2) for path in cluster.paths
        ],
        congestion_control=CONGESTION_CONTROL,
        tcp_slow_start_after_idle=False,
    )


def network_plan(cluster: ClusterNumbers) -> NetworkPlan:
    """The whole network: a path's rate holds in its own direction alone, which a pair of a configuration cannot say."""
    plan = plan_network(network_config(cluster))
    for path in cluster.paths:
        ends = path.source, path.target
        plan = plan.with_path(*ends, replace(plan.paths[ends], rate_bits_per_s=_on_wire(path.rate)))
    return plan


def _on_wire(rate: float | None) -> float | None:
    return _divided(rate, GOODPUT_SHARE)


def stage_times(asked: PlanProblem, plan: PipelinePlan) -> StageTimes:
    """Seconds that each stage sleeps: the planner's own, the model's ends included."""
    seconds = plan_costs(ClusterTable(asked), plan, None, Speed()).compute_s
    stages = range(plan.num_stages)
    return StageTimes(
        tuple(seconds[stage, ActionKind.F] for stage in stages), tuple(seconds[stage, ActionKind.B] for stage in stages)
    )


def codec_seconds(asked: PlanProblem, plan: PipelinePlan) -> CodecSeconds:
    """What the planner takes coding a micro-batch to be."""
    out, back = (CODEC_TIMES[spec] for spec in WIRE)
    each = (out.encode_per_element, out.decode_per_element, back.encode_per_element, back.decode_per_element)
    return CodecSeconds(*(asked.num_elements(plan.micro_batch) * seconds for seconds in each))


def session_key(asked: PlanProblem, plan: PipelinePlan) -> SessionKey:
    """The session that trains so.

    Raises:
        TahqError: on one host there is no network.
    """
    if plan.num_stages < 2:
        raise TahqError("the plan is one host: there is no network to measure")
    times = stage_times(asked, plan)
    return SessionKey(
        runtime="tahq",
        schedule=plan.schedule,
        activations=WIRE[0],
        gradients=WIRE[1],
        stages=plan.num_stages,
        micro_batch=plan.micro_batch,
        compute="sleep",
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        in_flight=plan.depths or None,
    )


def sweep(asked: PlanProblem, plan: PipelinePlan, *, num_steps: int, settle: int | None, **others: Any) -> SweepConfig:
    """What the session's configuration and its measurement are made from.

    Args:
        asked: the problem.
        plan: an answer.
        num_steps: that count.
        settle: steps that go by before; None: until `SETTLING_FRAMES` of each link and direction have passed.
        others: `backend` and `max_busy_cores`.
    """
    if settle is None:
        settle = max(2, math.ceil(SETTLING_FRAMES / plan.num_micro_batches))
    times = stage_times(asked, plan)
    # Ends sleep too, so the vocabulary matters to nothing but the loss, which is real: it is a small one.
    model_of_run = {"family": "gpt2", "num_layers": NUM_LAYERS, "num_heads": 12, "vocab_size": 257}
    return SweepConfig.model_validate(
        {
            "name": "planner",
            "model": {**model_of_run, "hidden_size": asked.model.hidden_size},
            "seq_len": asked.model.seq_len,
            "global_batch": asked.model.global_batch,
            "micro_batches": [plan.micro_batch],
            "stages": [plan.num_stages],
            "compute": [{"forward": list(times.forward_s), "backward": list(times.backward_s)}],
            "runtimes": [{"name": "tahq"}],
            "steps": {"settle": settle, "at_least": num_steps, "at_most": num_steps},
            **others,
        }
    )
