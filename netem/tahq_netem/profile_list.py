"""`tahq-netem profiles`: what each profile stands for, and where its figures are from."""

from collections.abc import Iterator

from tahq.units import format_rate
from tahq_netem.description import HostConfig, PairConfig
from tahq_netem.profiles import Profile, load_profile, profile_names


def profile_lines() -> list[str]:
    """A paragraph for each profile."""
    return "\n\n".join("\n".join(_paragraph(name, load_profile(name))) for name in profile_names()).splitlines()


def _paragraph(name: str, profile: Profile) -> Iterator[str]:
    yield f"{name}: {profile.title}"
    if profile.host is not None:
        yield f"  {_host(profile.host)}"
    for site, host in profile.sites.items():
        yield f"  {site}: {_host(host)}"
    for pair in profile.pairs:
        yield f"  between {' and '.join(pair.between)}: {_pair(pair)}"
    for source in profile.source:
        yield f"    {source}"


def _host(host: HostConfig) -> str:
    return ", ".join([f"up {_rate(host.up)}", f"down {_rate(host.down)}", *_path(host)])


def _pair(pair: PairConfig) -> str:
    return ", ".join([*([f"rate {_rate(pair.rate)}"] if pair.rate is not None else []), *_path(pair)])


def _path(path: HostConfig | PairConfig) -> Iterator[str]:
    if path.delay is not None:
        yield f"delay {1000 * path.delay:g} ms one-way"
    if path.jitter:
        yield f"jitter ± {1000 * path.jitter:g} ms"
    if path.loss:
        yield f"loss {100 * path.loss:g} %"
    if path.reorder:
        yield f"reordered {100 * path.reorder:g} %"


def _rate(bits_per_s: float | None) -> str:
    return format_rate(bits_per_s) if bits_per_s is not None else "not shaped"
