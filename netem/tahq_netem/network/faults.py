"""Faults on a timeline: a link that is down for a time, a rate that changes, a burst of loss, a connection reset.

A timeline is a list that a user writes, such as ``- {at: 10s, link: host1, what: down, for: 2s}``. `link` is a host
(its whole link, its rate both ways, the delay and loss of everything it sends), or ``[source, destination]`` for one
direction. Without `for` a fault lasts to the end; `up` ends a `down`.

The state of a network is a pure function of its plan and the active faults, later faults on top of earlier ones. So
overlapping faults may end in any order, and without an active fault the network is as planned. `fault_player` applies
it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from tahq.errors import ConfigError
from tahq.typed_yaml.mistakes import Origins, validated
from tahq.typed_yaml.positions import YamlError, parse_yaml
from tahq.units import WRITTEN_BY_HAND, Duration, Section, parse_duration, parse_rate
from tahq_netem.network.description import HostShape, NetworkPlan, PathShape, known_host

What = Literal["down", "up", "rate", "loss", "delay", "reset"]
"""Kind of fault."""

_EXAMPLES: Final = {"rate": "10mbit", "loss": "0.05", "delay": "200ms"}
"""Of the kinds that have a value."""
_READERS: Final[dict[str, Callable[[object], float]]] = {"rate": parse_rate, "delay": parse_duration}


class NetworkFault(Section):
    """A fault of a link at a time or a step, for some time."""

    model_config = ConfigDict(populate_by_name=True)

    at: Duration | None = None
    """Since the timeline began; or `step`."""
    step: Annotated[int, Field(ge=0)] | None = None
    """When this many steps are done; or `at`."""
    link: str | tuple[str, str]
    """A host, or [source, destination]."""
    what: What
    to: float | str | None = None
    """The new `rate`, `loss` or `delay`: 10mbit, 0.05, 200ms."""
    lasts: Duration | None = Field(default=None, alias="for")
    """How long; null: to the end."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if (self.at is None) == (self.step is None):
            raise ValueError("a fault happens at a time or at a step: give exactly one of `at` and `step`")
        if self.what == "reset" and not isinstance(self.link, str):
            raise ValueError("reset ends the connections of a host; give one host as `link`")
        if self.what in ("up", "reset") and self.lasts is not None:
            raise ValueError(f"{self.what} has no duration; leave `for` out")
        if self.what not in _EXAMPLES:
            if self.to is not None:
                raise ValueError(f"{self.what} takes no `to`")
        elif self.to is None:
            raise ValueError(f"{self.what} needs `to`, such as {_EXAMPLES[self.what]}")
        else:
            _ = self.value  # raises where it cannot be read
        return self

    @property
    def value(self) -> float:
        """`to` in bit/s, seconds, or as a share."""
        if self.what in _READERS and isinstance(self.to, str):
            return _READERS[self.what](self.to)
        if self.what in _READERS:
            raise ValueError(f"a {self.what} needs a unit, such as {_EXAMPLES[self.what]}; got {self.to!r}")
        if isinstance(self.to, float | int) and 0 <= self.to <= 1:
            return float(self.to)
        raise ValueError(f"a loss is a share of packets, 0 to 1; got {self.to!r}")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that `link` names."""
        return (self.link,) if isinstance(self.link, str) else self.link


class Timeline(Section):
    """The faults of a run."""

    faults: list[NetworkFault] = Field(default_factory=list)

    @classmethod
    def parse(cls, text: str, source: str = "faults") -> "Timeline":
        """Read YAML with a list of faults, or with such a list under the key `faults`.

        Raises:
            ConfigError: it makes no sense; one line that names `source` and line.
        """
        try:
            document = parse_yaml(text)
        except YamlError as error:
            raise ConfigError(f"{source}:{error.line}: {error}") from error
        values, lines = document.value, dict(document.lines)
        if isinstance(values, list):
            values, lines = {"faults": values}, {("faults", *where): line for where, line in lines.items()}
        return validated(cls, values, Origins(source, lines), WRITTEN_BY_HAND)

    @classmethod
    def load(cls, path: Path) -> "Timeline":
        """Read a timeline from a file.

        Raises:
            ConfigError: it cannot be read, or makes no sense.
        """
        try:
            return cls.parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error

    def check(self, plan: NetworkPlan, *, has_steps: bool = True) -> None:
        """Raise ConfigError for faults that this network cannot have, or that wait for steps where none are counted."""
        if not has_steps and any(fault.step is not None for fault in self.faults):
            raise ConfigError(
                "the timeline has faults at steps, but steps are not counted here; give them a time with `at`"
            )
        for fault in self.faults:
            for host in fault.hosts:
                known_host(host, plan.hosts)
            conditions(plan, [fault])


Setting = tuple[str, ...]
"""("rate", host), ("path", source, destination) or ("link", host)."""


def conditions(plan: NetworkPlan, active: Sequence[NetworkFault]) -> dict[Setting, Any]:
    """The network's settings under these faults, applied to the plan in this order.

    Returns:
        A HostShape for each rate, a PathShape for each path, and for each link whether it is up.
    """
    current: dict[Setting, Any] = {("rate", host): shape for host, shape in plan.host_shapes.items()}
    current |= {("path", *ends): shape for ends, shape in plan.paths.items()}
    current |= {("link", host): True for host in plan.hosts}
    for fault in active:
        current |= _changes(current, fault)
    return current


def _changes(current: dict[Setting, Any], fault: NetworkFault) -> dict[Setting, Any]:
    if fault.what in ("up", "reset"):
        return {}
    if isinstance(fault.link, str) and fault.what == "down":
        return {("link", fault.link): False}
    if isinstance(fault.link, str) and fault.what == "rate":
        return {("rate", fault.link): HostShape(fault.value, fault.value)}
    paths = [setting for setting in current if setting[0] == "path" and fault.link in (setting[1], setting[1:])]
    return {setting: _on_path(current[setting], fault) for setting in paths}


def _on_path(shape: PathShape, fault: NetworkFault) -> PathShape:
    match fault.what:
        case "rate":
            return replace(shape, rate_bits_per_s=fault.value)
        case "delay":
            return replace(shape, delay_s=fault.value)
        case _:
            return replace(shape, loss=1.0 if fault.what == "down" else fault.value)
