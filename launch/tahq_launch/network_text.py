"""The network of ``hosts: namespaces`` as text, for `--dry-run`."""

from collections.abc import Mapping, Sequence

from tahq.comm.network_config import HostConfig, NetworkConfig, PairConfig
from tahq.config.cluster import ClusterConfig
from tahq.units import format_rate
from tahq_launch.tables import plain_table

_BACKENDS = {
    "auto": "the kernel's netem if it has one, else a TUN wire",
    "kernel": "the kernel's netem",
    "tun": "a TUN wire",
}


def describe_network(config: ClusterConfig) -> str:
    """Hosts, exceptions and backend; empty unless ``hosts: namespaces``.

    Args:
        config: without a profile, as `resolve_for_run` returns it.
    """
    if config.hosts != "namespaces":
        return ""
    network = config.links.network(config.pipeline.stages)
    parts = [_title(network), _hosts(network.hosts)]
    if network.pairs:
        parts += ["  exceptions", _pairs(network.pairs)]
    parts.append("  the coordinator is not shaped; its delay to each host is that host's own")
    return "\n".join(parts)


def _title(network: NetworkConfig) -> str:
    control = network.congestion_control or "cubic"
    if network.tcp_slow_start_after_idle is not None:
        control += f", {'with' if network.tcp_slow_start_after_idle else 'without'} slow start after pauses"
    return (
        f"Network of {len(network.hosts)} hosts, made by {_BACKENDS[network.backend]}; TCP is {control}.\n"
        "It is measured before the workers start (network.json)"
    )


def _hosts(hosts: Mapping[str, HostConfig]) -> str:
    titles = ["host", "stage", "up", "down", "delay", "jitter", "loss", "reorder", "site"]
    rows = [
        [name, str(stage), _rate(host.up), _rate(host.down), *_path(host), host.site or ""]
        for stage, (name, host) in enumerate(hosts.items())
    ]
    return _table(titles, rows, left=(0, 8))


def _pairs(pairs: Sequence[PairConfig]) -> str:
    titles = ["between", "rate", "delay", "jitter", "loss", "reorder"]
    rows = [[" and ".join(pair.between), _rate(pair.rate) if pair.rate else "", *_path(pair)] for pair in pairs]
    return _table(titles, rows, left=(0,))


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """A table without the columns that are empty or zero everywhere."""
    kept = [index for index in range(len(titles)) if any(row[index] not in ("", "0", "0 ms", "0 %") for row in rows)]
    cells = [[row[index] for index in kept] for row in rows]
    places = [place for place, index in enumerate(kept) if index in left]
    return plain_table([titles[index] for index in kept], cells, left=places)


def _path(path: HostConfig | PairConfig) -> list[str]:
    times = [_milliseconds(path.delay), _milliseconds(path.jitter)]
    return [*times, _percent(path.loss), _percent(path.reorder)]


def _rate(bits_per_s: float | None) -> str:
    return format_rate(bits_per_s) if bits_per_s is not None else "not shaped"


def _milliseconds(seconds: float | None) -> str:
    return f"{1000 * seconds:g} ms" if seconds is not None else ""


def _percent(share: float | None) -> str:
    return f"{100 * share:g} %" if share is not None else ""
