"""The shaping of one stage's host, from `links:` and `hosts:`: the rate and delay that its worker imitates, its caps.

A cap that is a share refers to `links.rate` where the workers imitate it, to the rates of the stage's host under
``hosts: namespaces``, or to a measured rate (`with_measured_rates`).

An order of sending (`links.first`) holds only among frames that wait in the worker; TCP shares an uplink among those
that it already has. So where another order than the default is wanted and the rate is known, the uplink is capped a
little below it, as routers do to keep the queue to themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tahq.comm.config import LEAST_CAP_BITS_PER_S, Hosts, LinksConfig, MachineConfig, cap_bits_per_s
from tahq.comm.link.shaping import Shaping
from tahq.comm.network_config import host_names
from tahq.comm.network_model import GOODPUT_SHARE
from tahq.errors import ConfigError
from tahq.units import write_rate

_ORDERED_CAP = "95%"
"""Cap of an uplink whose order of sending is to be kept."""


@dataclass(frozen=True, slots=True)
class HostRates:
    """A host's rates in bits per second of tahq's own bytes; None: not known."""

    up_bits_per_s: float | None = None
    down_bits_per_s: float | None = None


def host_shaping(links: LinksConfig, hosts: Hosts, stage: int, num_stages: int) -> Shaping:
    """The limits that the worker of a stage enforces between its sessions and its sockets; `links` has no profile.

    Raises:
        ConfigError: a cap is a share, and the host's rate is unknown, or so low that the cap would be below the least.
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
    """The cap that keeps frames waiting in the worker; None: not needed, too low, or of an unknown rate."""
    if links.first == "oldest" or rates.up_bits_per_s is None or (is_imitated and links.rate is not None):
        return None
    bits_per_s = cap_bits_per_s(_ORDERED_CAP, rates.up_bits_per_s)
    return _ORDERED_CAP if bits_per_s is not None and bits_per_s >= LEAST_CAP_BITS_PER_S else None


def _key(name: str, own: MachineConfig | None, stage: int) -> str:
    """The key of the cap that holds for a host."""
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
        got, least = write_rate(float(f"{bits_per_s:.3g}")), write_rate(LEAST_CAP_BITS_PER_S)
        raise ConfigError(f"{key}: {cap} of the rate of stage {stage}'s host is {got}; expected at least {least}")
    return bits_per_s


def with_measured_rates(
    links: LinksConfig, hosts: Sequence[MachineConfig], rates: Sequence[HostRates]
) -> list[MachineConfig]:
    """The machines of a `hosts:` list, with shares of measured rates replaced by rates; other shares stay.

    `HostRates` are goodputs of TCP.

    Raises:
        ConfigError: a share of a rate is below the least cap.
    """
    measured = zip(hosts, rates, strict=True)
    return [_with_measured(links, host, own, stage) for stage, (host, own) in enumerate(measured)]


def _with_measured(links: LinksConfig, host: MachineConfig, rates: HostRates, stage: int) -> MachineConfig:
    caps = {"cap_up": (host.cap_up or links.cap_up or _ordered_cap(links, rates, True), rates.up_bits_per_s)}
    caps |= {"cap_down": (host.cap_down or links.cap_down, rates.down_bits_per_s)}
    known = {
        name: _known(cap, rate, _key(name, host, stage), stage)
        for name, (cap, rate) in caps.items()
        if cap is not None and not (rate is None and isinstance(cap, str))
    }
    return host.model_copy(update=known)
