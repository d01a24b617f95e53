"""Plans of a cluster as runs on a network of namespaces like it: stages that sleep, and the figures of their steps.

A cluster's rates are what TCP carries, so its network's are higher by the share of headers. A path's rate holds in its
own direction, as the planner reads it. *Predicted* is by the planner, with a round trip for the commit; *simulated* by
the simulator of sweeps, with the codecs' times of the run and a stage's path to the coordinator in place of that round
trip. Needs root and a quiet machine.
"""

import argparse
import itertools
import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_points import CONGESTION_CONTROL, SETTLING_FRAMES
from engine_rows import quartiles

from tahq.comm.network_config import HostConfig, NetworkConfig, PairConfig
from tahq.comm.network_model import GOODPUT_SHARE
from tahq.config.cluster import ClusterConfig
from tahq.errors import TahqError
from tahq.pipeline.schedule.schedule import ActionKind
from tahq.plan.cluster_numbers import ClusterNumbers
from tahq.plan.prediction import Prediction, Speed, plan_costs
from tahq.plan.problem import PlanProblem, named
from tahq.plan.search.table import ClusterTable
from tahq_netem.measure.calibration import calibrate
from tahq_netem.network.description import NetworkPlan, plan_network
from tahq_netem.runtimes.session import SessionRequest
from tahq_netem.sweep.measurement import Measurement, check_busy, measure_point, open_network
from tahq_netem.sweep.points import SessionKey
from tahq_netem.sweep.runner import RUNTIMES
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import CodecSeconds, planned_work, predicted_step_s, schedule_with_depth, session_config

WIRE = ("tah", "fixed:bits=6")
COLUMNS = (
    *("choice", "hosts", "layers", "schedule", "depths", "micro-batch", "predicted, s", "simulated, s"),
    *("step, s", "off by", "tokens/s", "busy cores"),
)
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "--dry-run": {"action": "store_true", "help": "only simulate, without codec times"},
    "--steps": {"type": int, "default": 5, "help": "steps that count"},
    "--backend": {"default": "auto", "help": "network backend; see tahq-netem probe"},
    "--max-busy-cores": {"type": float, "help": "a run that keeps more cores busy is not counted"},
}


def network_config(cluster: ClusterNumbers) -> NetworkConfig:
    """The hosts' links and the delays between them; rates of paths are `network_plan`'s."""
    return NetworkConfig(
        hosts={host.name: HostConfig(up=_on_wire(host.up), down=_on_wire(host.down)) for host in cluster.hosts},
        pairs=[
            PairConfig(between=(path.source, path.target), delay=(path.round_trip or 0.0) / 2) for path in cluster.paths
        ],
        congestion_control=CONGESTION_CONTROL,
        tcp_slow_start_after_idle=False,
    )


def network_plan(cluster: ClusterNumbers) -> NetworkPlan:
    """The whole network: a pair of a configuration cannot say that a rate holds one way."""
    plan = plan_network(network_config(cluster))
    for path in cluster.paths:
        ends = path.source, path.target
        plan = plan.with_path(*ends, replace(plan.paths[ends], rate_bits_per_s=_on_wire(path.rate)))
    return plan


def _on_wire(rate: float | None) -> float | None:
    return None if rate is None else rate / GOODPUT_SHARE


class PlannedRun:
    """A plan of a problem, named after its origin, as a session of tahq.

    Raises:
        TahqError: on one host there is no network to measure.
    """

    def __init__(self, choice: str, asked: PlanProblem, prediction: Prediction, options: argparse.Namespace) -> None:
        plan = prediction.plan
        if plan.num_stages < 2:
            raise TahqError("the plan is one host: there is no network to measure")
        self.choice, self.plan, self.predicted_s = choice, plan, prediction.step_s
        self.step_s: float | None = None
        """The median step, once it is measured."""
        self._asked, self._options = asked, options
        self.hosts = named(asked, plan.hosts)
        seconds = plan_costs(ClusterTable(asked), plan, None, Speed()).compute_s
        forward_s, backward_s = (
            tuple(seconds[stage, kind] for stage in range(plan.num_stages)) for kind in (ActionKind.F, ActionKind.B)
        )
        self.times = StageTimes(forward_s, backward_s)
        self.key = SessionKey(
            runtime="tahq",
            schedule=plan.schedule,
            activations=WIRE[0],
            gradients=WIRE[1],
            stages=plan.num_stages,
            micro_batch=plan.micro_batch,
            compute="sleep",
            forward_s=forward_s,
            backward_s=backward_s,
            in_flight=plan.depths or None,
        )
        self.sweep = self._sweep()

    def _sweep(self) -> SweepConfig:
        model, options = self._asked.model, self._options
        return SweepConfig.model_validate(
            {
                "name": "planned",
                # the ends sleep too, so the vocabulary only matters to the loss
                "model": {
                    "family": "gpt2",
                    "num_layers": model.num_layers,
                    "hidden_size": model.hidden_size,
                    "num_heads": model.hidden_size // 64,
                    "vocab_size": 257,
                },
                "seq_len": model.seq_len,
                "global_batch": model.global_batch,
                "micro_batches": [self.plan.micro_batch],
                "stages": [self.plan.num_stages],
                "compute": [{"forward": list(self.times.forward_s), "backward": list(self.times.backward_s)}],
                "runtimes": [{"name": "tahq"}],
                "steps": {
                    "settle": max(2, math.ceil(SETTLING_FRAMES / self.plan.num_micro_batches)),
                    "at_least": options.steps,
                    "at_most": options.steps,
                },
                "backend": options.backend,
                "max_busy_cores": options.max_busy_cores,
            }
        )

    def config(self, folder: Path) -> ClusterConfig:
        """The workers' configuration, with the plan's layers."""
        config = session_config(self.sweep, self.key, folder, self.times)
        pipeline = config.pipeline.model_copy(update={"layers": list(self.plan.layers)})
        return ClusterConfig.model_validate(config.model_copy(update={"pipeline": pipeline}).model_dump())

    def simulated_s(self, codec: CodecSeconds) -> float:
        """Seconds of a step by the simulator of sweeps."""
        plan = self.plan
        schedule = schedule_with_depth(plan.schedule, plan.num_stages, plan.num_micro_batches, plan.depths or None)
        work = planned_work(self.sweep, self.key, self.times)
        return predicted_step_s(schedule, work, network_plan(self._asked.cluster), codec, hosts=self.hosts)

    def row(self) -> list[str]:
        """Measure the run, or only simulate it; cells for `COLUMNS`. What cannot be measured says why."""
        plan = self.plan
        depths = ", ".join(map(str, plan.depths)) or "all"
        how = [", ".join(self.hosts), ", ".join(map(str, plan.layers)), plan.schedule, depths, str(plan.micro_batch)]
        cells = [self.choice, *how, f"{self.predicted_s:.3f}"]
        if self._options.dry_run:
            return [*cells, f"{self.simulated_s(CodecSeconds()):.3f}", "", "", "", ""]
        try:
            return [*cells, *self.figures(self._measure())]
        except TahqError as error:
            return [*cells, "", f"not measured: {error}", "", "", ""]

    def figures(self, measured: Measurement) -> list[str]:
        """Simulated seconds, the median step with quartiles, the prediction's error, tokens/s, and busy cores."""
        low_s, self.step_s, high_s = quartiles([step.seconds for step in measured.steps])
        codec = CodecSeconds.measured(measured.steps, self.plan.num_micro_batches)
        return [
            f"{self.simulated_s(codec or CodecSeconds()):.3f}",
            f"{self.step_s:.3f} ({low_s:.3f}–{high_s:.3f})",
            f"{self.predicted_s / self.step_s - 1:+.1%}",
            f"{self._asked.tokens_per_step() / self.step_s:,.0f}",
            f"{measured.busy.own:.2f} ({measured.busy.others:.2f})",
        ]

    def _measure(self) -> Measurement:
        cluster, work = self._asked.cluster, planned_work(self.sweep, self.key, self.times)
        pairs = [pair for ends in itertools.pairwise(self.hosts) for pair in (ends, ends[::-1])]
        with (
            open_network(network_config(cluster), self.sweep) as network,
            tempfile.TemporaryDirectory(prefix="tahq-bench-") as name,
        ):
            network.set_plan(network_plan(cluster))
            calibrate(network, pairs=pairs, quick=True).check()
            request = SessionRequest(self.config(Path(name)), self.plan.schedule, network, self.hosts, Path(name))
            with RUNTIMES["tahq"](request) as session:
                measured = measure_point(session, self.sweep, network, work, self.times)
        check_busy(measured.busy, self.sweep.max_busy_cores)
        return measured


def outcome(figure: float | None, text: str, *, is_met: bool) -> str:
    """A figure against its target; None: not measured."""
    return "not measured" if figure is None else f"{text}, {'met' if is_met else 'MISSED'}"


def ratio(one: PlannedRun, other: PlannedRun) -> float | None:
    """One run's step over the other's; None if either was not measured."""
    return None if one.step_s is None or other.step_s is None else one.step_s / other.step_s
