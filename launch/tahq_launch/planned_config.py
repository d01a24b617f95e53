"""A cluster.yaml with a plan put in: the hosts in their order, layers, schedule, depths, micro-batch and codecs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from tahq.config.cluster import ClusterConfig
from tahq.errors import ConfigError, UserError
from tahq.plan.cluster_numbers import host_labels
from tahq.plan.prediction import chunk_layers
from tahq.plan.problem import PipelinePlan, PlanProblem, named
from tahq.plan.search.stages import StageCosts
from tahq.plan.search.table import ClusterTable
from tahq.typed_yaml.mistakes import Origins, one_line
from tahq_launch.measured_links import needed_connections


@dataclass(frozen=True, slots=True)
class PlannedConfig:
    """A configuration, and what of the plan it cannot say."""

    config: ClusterConfig
    notes: tuple[str, ...]


def planned_config(config: ClusterConfig, table: ClusterTable, plan: PipelinePlan) -> PlannedConfig:
    """Put a plan into a configuration.

    Args:
        config: resolved; its profile, if any, put in place.
        table: the cluster that was planned for.
        plan: one pipeline.

    Raises:
        UserError: the plan's hosts are not the configuration's.
        ConfigError: the configuration with the plan in it makes no sense.
    """
    values = config.model_dump(mode="json")
    values["training"]["micro_batch"] = plan.micro_batch
    values["pipeline"] |= {
        "stages": plan.num_stages,
        "schedule": plan.schedule,
        "in_flight": list(plan.depths) or None,
        "chunks": plan.chunks_per_stage,
        "layers": list(chunk_layers(plan)),
    }
    needed = needed_connections(table.problem.cluster, named(table.problem, plan.hosts))
    values["links"] |= {"first": str(plan.first), "connections": max(config.links.connections, needed)}
    notes = _put_codecs(values, table.problem, plan)
    _put_hosts(config, values, table.problem, plan)
    _put_sleep(values, table, plan)
    try:
        return PlannedConfig(ClusterConfig.model_validate(values), tuple(notes))
    except ValidationError as error:
        raise ConfigError(
            one_line(error, values, ClusterConfig, Origins("the planned configuration", {}, {}))
        ) from error


def _put_codecs(values: dict[str, Any], problem: PlanProblem, plan: PipelinePlan) -> list[str]:
    """One codec a direction: where links differ, the one of fewest bits, with which no link is slower than planned."""
    notes = []
    for direction, codecs in (("activations", plan.activations), ("gradients", plan.gradients)):
        if not codecs:
            continue
        fewest = min(codecs, key=lambda codec: problem.frame_nbytes(codec, plan.micro_batch))
        values["wire"][direction] = fewest
        if set(codecs) != {fewest}:
            others = ", ".join(codec for codec in dict.fromkeys(codecs) if codec != fewest)
            notes.append(
                f"wire.{direction} is {fewest} on all links: cluster.yaml has one codec a direction, not {others} too"
            )
    return notes


def _put_hosts(config: ClusterConfig, values: dict[str, Any], problem: PlanProblem, plan: PipelinePlan) -> None:
    labels = host_labels(config.hosts, config.pipeline.stages)
    names = named(problem, plan.hosts)
    strange = [name for name in names if name not in labels]
    if strange and config.hosts != "local":
        raise UserError(f"--write: the plan has host {strange[0]}, cluster.yaml has {', '.join(labels)}")
    order = [labels.index(name) for name in names] if not strange else []
    if isinstance(config.hosts, list):
        values["hosts"] = [values["hosts"][index] for index in order]
    if config.hosts == "namespaces":
        _put_network(config, values, order)


def _put_network(config: ClusterConfig, values: dict[str, Any], order: Sequence[int]) -> None:
    """host0 runs stage 0, so hosts of namespaces change their names, and pairs with them."""
    hosts = values["links"]["hosts"]
    new_name = {f"host{index}": f"host{stage}" for stage, index in enumerate(order)}
    old_names = set(host_labels("namespaces", config.pipeline.stages))
    renamed = {new: hosts[old] for old, new in new_name.items() if old in hosts}
    values["links"]["hosts"] = dict(sorted(renamed.items(), key=lambda item: int(item[0].removeprefix("host"))))
    sites = {host.get("site") for host in renamed.values()}
    pairs = []
    for pair in values["links"]["pairs"]:
        between = [new_name.get(name, name) if name in old_names else name for name in pair["between"]]
        kept = all(name in new_name if name in old_names else name in sites for name in pair["between"])
        pairs += [{**pair, "between": between}] if kept else []
    values["links"]["pairs"] = pairs


def _put_sleep(values: dict[str, Any], table: ClusterTable, plan: PipelinePlan) -> None:
    """Stages that sleep do so for as long as the plan has them compute."""
    if values["model"]["sleep"] is None:
        return
    times = StageCosts.of(table, plan).times(np.array(plan.layers, dtype=float))
    for key, seconds in (("forward", times.forward), ("backward", times.backward)):
        values["model"]["sleep"][key] = [round(float(each), 9) for each in seconds]
