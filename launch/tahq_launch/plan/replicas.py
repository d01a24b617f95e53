"""A run with replicas as the planner sees it: one of them, on hosts as slow as the slowest of each stage.

All replicas have the same layers, schedule and micro-batches, so the slowest decides.
"""

from collections.abc import Sequence
from typing import Any

from tahq.comm.network_config import host_names
from tahq.config.cluster import ClusterConfig
from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, PathNumbers, host_labels
from tahq.quant import get_codec
from tahq.typed_yaml.mistakes import Origins, validated

MOST = 16
"""Most replicas that a plan chooses by itself."""
_SMALLER = {"memory": min, "up": min, "down": min}
"""Of these figures the smaller one is slower; of all others the larger."""


def most_replicas(config: ClusterConfig) -> int:
    """How many replicas a plan may choose where none are set.

    Several for adapters, whose gradients are small beside the activations that cross a cut. Of all weights a sum takes
    long over slow links, so there replicas are the user's choice.
    """
    refused = (
        config.adapter is None or config.hosts == "local",
        "gradients" in config.memory.all_offload,
        config.links.inside != "zmq",
        get_codec(config.wire.activations).is_stateful,
    )
    return 1 if any(refused) else MOST


def one_replica(config: ClusterConfig) -> ClusterConfig:
    """The configuration of the first replica alone, with its part of the batch."""
    replicas, stages = config.pipeline.replicas, config.pipeline.stages
    if replicas == 1:
        return config
    values = config.model_dump(mode="json")
    values["pipeline"]["replicas"] = 1
    values["training"]["global_batch"] //= replicas
    if isinstance(config.hosts, list):
        values["hosts"] = values["hosts"][:stages]
    names = set(host_names(stages))
    emulate = values["emulate"]
    emulate["hosts"] = {name: host for name, host in emulate["hosts"].items() if name in names}
    emulate["pairs"] = [pair for pair in emulate["pairs"] if names.issuperset(pair["between"])]
    return validated(ClusterConfig, values, Origins("one replica"))


def for_all_replicas(planned: ClusterConfig, whole: ClusterConfig) -> ClusterConfig:
    """The plan of one replica for all of them."""
    if whole.pipeline.replicas == 1:
        return planned
    values, own = planned.model_dump(mode="json"), whole.model_dump(mode="json")
    values["pipeline"]["replicas"] = own["pipeline"]["replicas"]
    values["training"]["global_batch"] = own["training"]["global_batch"]
    values["hosts"] = own["hosts"]
    values["emulate"] |= {key: own["emulate"][key] for key in ("hosts", "pairs")}
    return validated(ClusterConfig, values, Origins("the plan for all replicas"))


def slowest_replica(config: ClusterConfig, cluster: ClusterNumbers) -> ClusterNumbers:
    """The figures of one replica, each the slowest of all; replica r has hosts r·P to r·P + P − 1 of the list."""
    num_stages, labels = config.pipeline.stages, host_labels(config.hosts, config.pipeline.num_workers)
    if config.pipeline.replicas == 1:
        return cluster
    by_name = {host.name: host for host in cluster.hosts}
    listed = [by_name[name] for name in labels]
    replicas = [listed[first : first + num_stages] for first in range(0, len(listed), num_stages)]
    hosts = [_slowest(of_stage) for of_stage in zip(*replicas, strict=True)]
    first = [host.name for host in hosts]
    found: dict[tuple[str, str], list[PathNumbers]] = {}
    for replica in replicas:
        name_of = {host.name: name for host, name in zip(replica, first, strict=True)}
        for path in cluster.paths:
            if path.source in name_of and path.target in name_of:
                found.setdefault((name_of[path.source], name_of[path.target]), []).append(path)
    paths = [
        PathNumbers(
            source=source,
            target=target,
            rate=min((path.rate for path in paths if path.rate is not None), default=None),
            round_trip=max((path.round_trip for path in paths if path.round_trip is not None), default=None),
            connections=max(path.connections or 1 for path in paths),
            failure=next((path.failure for path in paths if path.failure is not None), None),
        )
        for (source, target), paths in found.items()
    ]
    return cluster.model_copy(update={"hosts": hosts, "paths": paths})


def _slowest(hosts: Sequence[HostNumbers]) -> HostNumbers:
    merged: dict[str, Any] = _merged([host.model_dump() for host in hosts])
    sizes = set.intersection(*({times.micro_batch for times in host.compute} for host in hosts))
    rows = [[times.model_dump() for times in host.compute if times.micro_batch in sizes] for host in hosts]
    compute = [_merged(of_size) for of_size in zip(*rows, strict=True)]
    return HostNumbers.model_validate({**merged, "compute": compute, "name": hosts[0].name, "site": hosts[0].site})


def _merged(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Key by key the slower figure; None where all are."""
    found: dict[str, Any] = {}
    for key in values[0]:
        given = [each[key] for each in values if key in each and each[key] is not None]
        if given and isinstance(given[0], dict):
            found[key] = _merged(given)
        else:
            found[key] = _SMALLER.get(key, max)(given) if given and not isinstance(given[0], list) else None
    return found
