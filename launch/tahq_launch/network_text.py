"""The network of ``hosts: namespaces`` as text, for `--dry-run`."""

from collections.abc import Sequence

from tahq.comm.network_config import HostConfig, PairConfig
from tahq.config.cluster import ClusterConfig
from tahq.units import format_rate
from tahq_launch.command_line import plain_table

_BACKENDS = {
    "auto": "the kernel's netem if available, else a TUN device",
    "kernel": "the kernel's netem",
    "tun": "a TUN device",
}


def describe_network(config: ClusterConfig) -> str:
    """Hosts, exceptions and backend of a configuration without a profile; empty unless ``hosts: namespaces``."""
    if config.hosts != "namespaces":
        return ""
    network = config.links.network(config.pipeline.stages)
    control = network.congestion_control or "cubic"
    if network.tcp_slow_start_after_idle is not None:
        control += f", {'with' if network.tcp_slow_start_after_idle else 'without'} slow start after pauses"
    hosts = [
        [name, str(stage), _rate(host.up), _rate(host.down), *_path(host), host.site or ""]
        for stage, (name, host) in enumerate(network.hosts.items())
    ]
    lines = [
        f"Network of {len(network.hosts)} hosts, made by {_BACKENDS[network.backend]}; TCP is {control}.",
        "It is measured before the workers start (network.json)",
        _table(["host", "stage", "up", "down", "delay", "jitter", "loss", "reorder", "site"], hosts, left=(0, 8)),
    ]
    if network.pairs:
        pairs = [[" and ".join(p.between), _rate(p.rate) if p.rate else "", *_path(p)] for p in network.pairs]
        lines.append("  exceptions")
        lines.append(_table(["between", "rate", "delay", "jitter", "loss", "reorder"], pairs, left=(0,)))
    return "\n".join([*lines, "  the coordinator is not shaped; its delay to each host is that host's own"])


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """A table without the columns that are empty or zero everywhere."""
    kept = [index for index in range(len(titles)) if any(row[index] not in ("", "0", "0 ms", "0 %") for row in rows)]
    cells = [[row[index] for index in kept] for row in rows]
    return plain_table([titles[index] for index in kept], cells, [kept.index(i) for i in left if i in kept])


def _path(path: HostConfig | PairConfig) -> list[str]:
    times = [f"{1000 * seconds:g} ms" if seconds is not None else "" for seconds in (path.delay, path.jitter)]
    return times + [f"{100 * share:g} %" if share is not None else "" for share in (path.loss, path.reorder)]


def _rate(bits_per_s: float | None) -> str:
    return format_rate(bits_per_s) if bits_per_s is not None else "not shaped"
