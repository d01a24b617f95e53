"""What `links:` and `hosts:` make of the connection of one stage's host: what its worker imitates, and its caps.

A cap that is a share needs a rate to be a share of: `links.rate` where the workers imitate it, the rates of the
stage's host under ``hosts: namespaces``, or one that was measured (`with_measured_rates`).

An order of sending (`links.first`) can be kept only among what waits in the worker. What is handed to TCP at once is
shared out by TCP, so where an order other than the default is wanted and the rate is known, the uplink is capped
a little below it, as routers do that want the queue to be theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tahq.comm.cap import LEAST_CAP_BITS_PER_S, cap_bits_per_s
from tahq.comm.config import HostConfig, Hosts, LinksConfig
from tahq.comm.link.shaping import Shaping
from tahq.comm.network_config import host_names
from tahq.comm.network_model import GOODPUT_SHARE
from tahq.errors import ConfigError
from tahq.units import write_rate

_ORDERED_CAP = "95%"
"""Of an uplink whose order of sending is to be kept."""


@dataclass(frozen=True, slots=True)
class HostRates:
    """What a host can send and receive, in bits a second of tahq's own bytes; None: not known."""

    up_bits_per_s: float | None = None
    down_bits_per_s: float | None = None


def host_shaping(links: LinksConfig, hosts: Hosts, stage: int, num_stages: int) -> Shaping:
    """What the worker of a stage holds back between its sessions and its sockets.

    Args:
        links: without a profile.
        hosts: of the same configuration.
        stage: which.
        num_stages: of how many.

    Raises:
        ConfigError: a cap is a share, and the host's rate is not known, or so low that it comes to less than a cap may.
    """
    rates = _rates(links, hosts, stage, num_stages)
    own = hosts[stage] if isinstance(hosts, list) else None
    is_imitated = hosts != "namespaces"
    cap_up = (own.cap_up if own else None) or links.cap_up or _ordered_cap(links, rates, is_imitated)
    cap_down = (own.cap_down if own else None) or links.cap_down
    return Shaping(
        rate_bits_per_s=links.rate if is_imitated else None,
        delay_s=links.delay if is_imitated else 0.0,
        piece_nbytes=links.piece,
        cap_up_bits_per_s=_known(cap_up, rates.up_bits_per_s, _key("cap_up", own, stage), stage),
        cap_down_bits_per_s=_known(cap_down, rates.down_bits_per_s, _key("cap_down", own, stage), stage),
    )


def _rates(links: LinksConfig, hosts: Hosts, stage: int, num_stages: int) -> HostRates:
    if hosts != "namespaces":
        return HostRates(links.rate, links.rate)
    host = links.network(num_stages).hosts[host_names(num_stages)[stage]]
    return HostRates(host.up and GOODPUT_SHARE * host.up, host.down and GOODPUT_SHARE * host.down)


def _ordered_cap(links: LinksConfig, rates: HostRates, is_imitated: bool) -> str | None:
    """The cap that keeps what waits in the worker; None: none is needed, or can be, or of a rate that nobody knows."""
    if links.first == "oldest" or rates.up_bits_per_s is None or (is_imitated and links.rate is not None):
        return None
    bits_per_s = cap_bits_per_s(_ORDERED_CAP, rates.up_bits_per_s)
    return _ORDERED_CAP if bits_per_s is not None and bits_per_s >= LEAST_CAP_BITS_PER_S else None


def _key(name: str, own: HostConfig | None, stage: int) -> str:
    """Where the cap is written that holds for a host."""
    return f"hosts.{stage}.{name}" if own is not None and getattr(own, name) is not None else f"links.{name}"


def _known(cap: float | str | None, rate_bits_per_s: float | None, key: str, stage: int) -> float | None:
    if cap is None:
        return None
    bits_per_s = cap_bits_per_s(cap, rate_bits_per_s)
    if bits_per_s is None:
        raise ConfigError(
            f"{key}: {cap} is a share of a rate, and that of stage {stage}'s host is not known; measure it with "
            f"tahq measure, or give the cap as a rate, such as 20mbit"
        )
    if bits_per_s < LEAST_CAP_BITS_PER_S:
        came_to = write_rate(float(f"{bits_per_s:.3g}"))
        least = write_rate(LEAST_CAP_BITS_PER_S)
        raise ConfigError(
            f"{key}: {cap} of the rate of stage {stage}'s host comes to {came_to}; a cap must be at least {least}"
        )
    return bits_per_s


def with_measured_rates(
    links: LinksConfig, hosts: Sequence[HostConfig], rates: Sequence[HostRates]
) -> list[HostConfig]:
    """The machines of a `hosts:` list, each with its caps as rates where they were shares of what was measured.

    A host whose rate was not measured keeps its share. `HostRates` are what TCP carries.

    Raises:
        ConfigError: a share comes to less than a cap may be.
    """
    measured = zip(hosts, rates, strict=True)
    return [_with_measured(links, host, own, stage) for stage, (host, own) in enumerate(measured)]


def _with_measured(links: LinksConfig, host: HostConfig, rates: HostRates, stage: int) -> HostConfig:
    caps = {"cap_up": (host.cap_up or links.cap_up or _ordered_cap(links, rates, True), rates.up_bits_per_s)}
    caps |= {"cap_down": (host.cap_down or links.cap_down, rates.down_bits_per_s)}
    known = {
        name: _known(cap, rate, _key(name, host, stage), stage)
        for name, (cap, rate) in caps.items()
        if cap is not None and not (rate is None and isinstance(cap, str))
    }
    return host.model_copy(update=known)
