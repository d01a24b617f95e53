"""The numbers that `tahq plan` reckons with: from a file, or made up from cluster.yaml where there is none."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tahq.config.cluster import ClusterConfig
from tahq.errors import ConfigError
from tahq.models.costs import counted_costs
from tahq.models.model_spec import ModelSpec
from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, LayerTimes, PathNumbers, host_labels
from tahq.typed_yaml.section_file import read_section_file
from tahq.units import format_rate
from tahq.worker.assembly import block_ranges
from tahq_launch.plan.dry_run import computes_in_bf16
from tahq_launch.plan.step_traffic import link_speeds
from tahq_netem.network.description import plan_network

ASSUMED_MULTIPLY_ADDS_PER_S = {"cpu": 5e10, "cuda": 5e13}
"""What a host is taken to compute where nothing says how fast it is."""


_MAX_VALUES = 1_500_000
"""Of a file: what `tahq measure` writes of some 500 hosts, each path between two. Of more, list the paths of sites."""


@dataclass(frozen=True, slots=True)
class KnownNumbers:
    """Numbers of a cluster, and a line for each kind that says where it is from."""

    cluster: ClusterNumbers
    origins: tuple[str, ...]


def read_numbers(path: Path) -> KnownNumbers:
    """Read a file of numbers, as `tahq measure` writes it.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not make sense; one line with file and line.
    """
    file = read_section_file(path, "hosts", "`tahq measure` writes such files", _MAX_VALUES)
    cluster = file.check(ClusterNumbers)
    return KnownNumbers(cluster, (f"all numbers: {path}" + (f" ({cluster.source})" if cluster.source else ""),))


def check_names(config: ClusterConfig, cluster: ClusterNumbers, source: Path) -> None:
    """Compare the numbers' hosts with those that cluster.yaml lists.

    Raises:
        ConfigError: a host that only one of the two knows.
    """
    if isinstance(config.hosts, str):
        return
    listed = host_labels(config.hosts, config.pipeline.stages)
    known = [host.name for host in cluster.hosts]
    unknown = [name for name in known if name not in listed]
    if unknown:
        raise ConfigError(f"{source}: no host {unknown[0]} in cluster.yaml, which lists {', '.join(listed)}")
    missing = [name for name in listed if name not in known]
    if missing:
        raise ConfigError(f"{source} has no numbers of host {missing[0]}; measure it, or take it out of hosts")


def estimated_numbers(config: ClusterConfig, spec: ModelSpec) -> KnownNumbers:
    """Numbers from `links`, and from `model.sleep` or counted multiply-adds at an assumed speed.

    Args:
        config: resolved.
        spec: its model.
    """
    speeds, labels = link_speeds(config), host_labels(config.hosts, config.pipeline.stages)
    rates = [(_finite(up), _finite(down)) for up, down in zip(speeds.up, speeds.down, strict=True)]
    times, origin = _slept_times(config, spec) if config.model.sleep else _counted_times(config, spec)
    hosts = [
        HostNumbers(name=name, up=up, down=down, compute=[own])
        for name, (up, down), own in zip(labels, rates, times, strict=True)
    ]
    shaped = config.hosts == "namespaces"
    cluster = ClusterNumbers(
        hosts=hosts,
        paths=list(_network_paths(config)) if shaped else [],
        round_trip=2 * config.links.delay,
        source="estimated from cluster.yaml",
    )
    links = "links: of the network of namespaces, less TCP/IP's share" if shaped else "links: rate and delay"
    no_limits = "memory: not known, so no limit" + ("" if speeds.is_shaped else "; links: nothing said, so no limit")
    return KnownNumbers(cluster, (f"compute: {origin}", f"rates and latencies: cluster.yaml's {links}", no_limits))


def _finite(rate: float) -> float | None:
    return rate if rate < float("inf") else None


def _slept_times(config: ClusterConfig, spec: ModelSpec) -> tuple[list[LayerTimes], str]:
    sleep = config.model.sleep
    assert sleep is not None, "asked for only where there is one"
    ranges, stages = block_ranges(config, spec), config.pipeline.stages
    rows = []
    for stage in range(stages):
        layers = sum(map(len, ranges[stage::stages]))
        forward, backward = (seconds / layers for seconds in sleep.of(stage))
        rows.append(LayerTimes(micro_batch=config.training.micro_batch, block_forward=forward, block_backward=backward))
    return rows, "cluster.yaml's model.sleep, a stage's divided by its layers"


def _counted_times(config: ClusterConfig, spec: ModelSpec) -> tuple[list[LayerTimes], str]:
    costs = counted_costs(spec, config.data.seq_len)
    kinds = [device_kind(config, stage) for stage in range(config.pipeline.stages)]
    tokens = config.training.micro_batch * config.data.seq_len
    rows = []
    for kind in kinds:
        second = tokens / ASSUMED_MULTIPLY_ADDS_PER_S[kind]
        block, head = second * sum(costs.blocks) / len(costs.blocks), second * costs.head
        rows.append(
            LayerTimes(
                micro_batch=config.training.micro_batch,
                block_forward=block,
                block_backward=2 * block,
                last_forward=head,
                last_backward=2 * head,
            )
        )
    assumed = ", ".join(f"{ASSUMED_MULTIPLY_ADDS_PER_S[kind]:.0e} a second on {kind}" for kind in dict.fromkeys(kinds))
    return rows, f"multiply-adds counted, ASSUMED to be {assumed}; `tahq measure` times them"


def device_kind(config: ClusterConfig, stage: int) -> str:
    """cpu or cuda: what a stage would compute on; `auto` is taken for a CPU unless this machine has CUDA."""
    import torch

    named = config.hosts[stage].device if isinstance(config.hosts, list) and stage < len(config.hosts) else "auto"
    device = named if named != "auto" else config.run.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device.partition(":")[0]


def computes_bf16(config: ClusterConfig) -> bool:
    """Whether stages compute under bf16 autocast."""
    return computes_in_bf16(config.training.precision, device_kind(config, 0))


def _network_paths(config: ClusterConfig) -> Iterator[PathNumbers]:
    speeds = link_speeds(config)
    network = plan_network(config.links.network(config.pipeline.stages))
    stage_of = {host: stage for stage, host in enumerate(network.hosts)}
    delays = {ends: shape.delay_s for ends, shape in network.paths.items()}
    usual = {2 * config.links.delay}
    for (source, target), delay_s in delays.items():
        rate = speeds.caps.get((stage_of[source], stage_of[target]))
        round_trip = delay_s + delays[target, source]
        if rate is not None or round_trip not in usual:
            yield PathNumbers(source=source, target=target, rate=rate, round_trip=round_trip)


def described_rate(bits_per_s: float) -> str:
    """For tables; empty where nothing limits."""
    return format_rate(bits_per_s) if bits_per_s < float("inf") else "–"
