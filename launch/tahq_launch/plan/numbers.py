"""The planner's numbers of hosts and paths: from a file, or estimated from cluster.yaml."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import block_ranges
from tahq.errors import ConfigError
from tahq.models.costs import counted_costs
from tahq.models.model_spec import ModelSpec
from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, LayerTimes, PathNumbers, host_labels
from tahq.typed_yaml.mistakes import read_section
from tahq_launch.plan.step_traffic import LinkSpeeds, link_speeds
from tahq_netem.network.description import plan_network

ASSUMED_MULTIPLY_ADDS_PER_S = {"cpu": 5e10, "cuda": 5e13}
"""Assumed speed of a host that was not measured."""

_MAX_VALUES = 1_500_000
"""`tahq measure` writes this many for some 500 hosts, each path between two. For more, list the paths of sites."""


def read_numbers(path: Path) -> ClusterNumbers:
    """Read a file of numbers, as `tahq measure` writes it; ConfigError if it is not one."""
    hint = "`tahq measure` writes such files"
    return read_section(ClusterNumbers, path, "hosts", hint, max_values=_MAX_VALUES)


def check_names(config: ClusterConfig, cluster: ClusterNumbers, source: Path) -> None:
    """Refuse numbers of other hosts than those listed in cluster.yaml; ConfigError names the host."""
    if isinstance(config.hosts, str):
        return
    listed = host_labels(config.hosts, config.pipeline.num_workers)
    known = [host.name for host in cluster.hosts]
    unknown = [name for name in known if name not in listed]
    if unknown:
        raise ConfigError(f"{source}: no host {unknown[0]} in cluster.yaml, which lists {', '.join(listed)}")
    missing = [name for name in listed if name not in known]
    if missing:
        raise ConfigError(f"{source} has no numbers for host {missing[0]}; measure it, or remove it from hosts")


def estimated_numbers(config: ClusterConfig, spec: ModelSpec) -> tuple[ClusterNumbers, tuple[str, ...]]:
    """Numbers from a resolved `emulate` or counted multiply-adds at an assumed speed.

    Also returns a line on the origin of each kind.
    """
    speeds, labels = link_speeds(config), host_labels(config.hosts, config.pipeline.num_workers)
    times, origin = _slept_times(config, spec) if config.emulate.sleep else _counted_times(config, spec)
    hosts = [
        HostNumbers(name=name, up=_finite(up), down=_finite(down), compute=[own])
        for name, up, down, own in zip(labels, speeds.up, speeds.down, times, strict=True)
    ]
    in_namespaces = config.hosts == "namespaces"
    cluster = ClusterNumbers(
        hosts=hosts,
        paths=list(_network_paths(config, speeds)) if in_namespaces else [],
        round_trip=2 * config.emulate.delay,
        source="estimated from cluster.yaml",
    )
    links = "emulate, minus TCP/IP headers" if in_namespaces else "emulate.rate and emulate.delay"
    no_limits = "memory: unknown, so no limit" + ("" if speeds.is_shaped else "; links: not configured, so no limit")
    return cluster, (f"compute: {origin}", f"rates and latencies: cluster.yaml's {links}", no_limits)


def _finite(rate: float) -> float | None:
    return rate if rate < math.inf else None


def _slept_times(config: ClusterConfig, spec: ModelSpec) -> tuple[list[LayerTimes], str]:
    sleep, ranges, stages = config.emulate.sleep, block_ranges(config, spec), config.pipeline.stages
    assert sleep is not None, "the caller checked"
    rows = []
    for stage in [*range(stages)] * config.pipeline.replicas:
        layers = sum(map(len, ranges[stage::stages]))
        forward, backward = (seconds / layers for seconds in sleep.of(stage))
        rows.append(LayerTimes(micro_batch=config.training.micro_batch, block_forward=forward, block_backward=backward))
    return rows, "cluster.yaml's emulate.sleep, divided by the layers of each stage"


def _counted_times(config: ClusterConfig, spec: ModelSpec) -> tuple[list[LayerTimes], str]:
    costs = counted_costs(spec, config.data.seq_len)
    kinds = [stage_device(config, stage).type for stage in range(config.pipeline.num_workers)]
    tokens, num_forwards = config.training.rows * config.data.seq_len, config.training.num_forwards
    rows = []
    for kind in kinds:
        scale = tokens / ASSUMED_MULTIPLY_ADDS_PER_S[kind]
        block, head = scale * sum(costs.blocks) / len(costs.blocks), scale * costs.head
        rows.append(
            LayerTimes(
                micro_batch=config.training.micro_batch,
                block_forward=num_forwards * block,
                block_backward=2 * block,
                last_forward=num_forwards * head,
                last_backward=2 * head,
            )
        )
    speeds = [f"{ASSUMED_MULTIPLY_ADDS_PER_S[kind]:.0e} per second on {kind}" for kind in dict.fromkeys(kinds)]
    assumed = ", ".join(speeds)
    return rows, f"multiply-adds counted, ASSUMED to be {assumed}; `tahq measure` times them"


def stage_device(config: ClusterConfig, stage: int) -> torch.device:
    """The device that a stage would compute on; `auto` is resolved by this machine's devices."""
    own = config.hosts[stage].device if isinstance(config.hosts, list) else "auto"
    name = own if own != "auto" else config.run.device
    if name == "auto":  # as `compute_device` chooses
        name = f"cuda:{stage % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda:0" if name == "cuda" else name)


def _network_paths(config: ClusterConfig, speeds: LinkSpeeds) -> Iterator[PathNumbers]:
    """The paths whose rate or round trip differs from the hosts' and the network's."""
    network = plan_network(config.emulate.network(config.pipeline.num_workers))
    stage_of = {host: stage for stage, host in enumerate(network.hosts)}
    for (source, target), shape in network.paths.items():
        rate = speeds.caps.get((stage_of[source], stage_of[target]))
        round_trip = shape.delay_s + network.paths[target, source].delay_s
        if rate is not None or round_trip != 2 * config.emulate.delay:
            yield PathNumbers(source=source, target=target, rate=rate, round_trip=round_trip)
