"""Faults on a timeline: a link that is down for a time, a rate that changes, a burst of loss, a connection reset.

A timeline is a list that a user writes, such as ``- {at: 10s, link: host1, what: down, for: 2s}``. `link` is a host
(its whole link, its rate both ways, the delay and loss of everything it sends), or ``[source, destination]`` for one
direction. Without `for` a fault lasts to the end; `up` ends a `down`.

The state of a network is a pure function of its plan and the active faults, later faults on top of earlier ones. So
overlapping faults may end in any order, and without an active fault the network is as planned. A `FaultPlayer` applies
it; it is given the time and the step, so that tests can use their own clock, and `play` drives one from a thread.
However much time passes between two calls, every fault happens, in order.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from tahq.errors import ConfigError
from tahq.typed_yaml.mistakes import Origins, read_document, validated
from tahq.typed_yaml.positions import Document, YamlError, parse_yaml
from tahq.units import WRITTEN_BY_HAND, Duration, Section, parse_duration, parse_rate
from tahq_netem.backends.network import Network
from tahq_netem.network.description import HostShape, NetworkPlan, PathShape, known_host

STEP_INTERVAL_S: Final = 0.02
"""How often steps are looked at while a fault waits for one."""

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
            return cls._checked(parse_yaml(text), source)
        except YamlError as error:
            raise ConfigError(f"{source}:{error.line}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> "Timeline":
        """Read a timeline from a file.

        Raises:
            ConfigError: it cannot be read, or makes no sense.
        """
        return cls._checked(read_document(path), str(path))

    @classmethod
    def _checked(cls, document: Document, source: str) -> "Timeline":
        values, lines = document.value, dict(document.lines)
        if isinstance(values, list):
            values, lines = {"faults": values}, {("faults", *where): line for where, line in lines.items()}
        return validated(cls, values, Origins(source, lines), WRITTEN_BY_HAND)

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


def conditions(plan: NetworkPlan, active: Sequence[NetworkFault]) -> tuple[NetworkPlan, frozenset[str]]:
    """The plan under these faults, applied in this order, and the hosts whose link is down."""
    down = set()
    for fault in active:
        if fault.what == "down" and isinstance(fault.link, str):
            down.add(fault.link)
        elif fault.what == "rate" and isinstance(fault.link, str):
            plan = plan.with_rates(fault.link, HostShape(fault.value, fault.value))
        elif fault.what not in ("up", "reset"):
            affected = [ends for ends in plan.paths if fault.link in (ends[0], ends)]
            plan = replace(plan, paths={**plan.paths, **{ends: _on_path(plan.paths[ends], fault) for ends in affected}})
    return plan, frozenset(down)


def _on_path(shape: PathShape, fault: NetworkFault) -> PathShape:
    match fault.what:
        case "rate":
            return replace(shape, rate_bits_per_s=fault.value)
        case "delay":
            return replace(shape, delay_s=fault.value)
        case _:
            return replace(shape, loss=1.0 if fault.what == "down" else fault.value)


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """A fault began, ended or was undone."""

    at_s: float
    """When the change was made, since the timeline began."""
    step: int | None
    """Steps done by then; None: steps are not counted."""
    fault: NetworkFault
    change: str
    due_s: float | None = None
    """When it was due; None: at a step, or at the end of the timeline."""
    num_connections: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {**asdict(self), "fault": self.fault.model_dump(by_alias=True, exclude_none=True)}


class FaultPlayer:
    """Applies the faults of a timeline to a network, whose present plan is restored at the end."""

    def __init__(self, timeline: Timeline, network: Network) -> None:
        timeline.check(network.plan)
        self.log: list[FaultEvent] = []
        self.waiting = list(timeline.faults)
        """Faults that have not begun."""
        self._active: list[tuple[float, NetworkFault]] = []
        """Each with its end, in the order of their beginning."""
        self._network = network
        self._plan = network.plan
        self._down: frozenset[str] = frozenset()
        """Hosts whose link is down now."""

    def next_s(self) -> float:
        """When something is due next; infinite if nothing is due by time."""
        begins = (fault.at for fault in self.waiting if fault.at is not None)
        ends = (end_s for end_s, _ in self._active)
        return min([*begins, *ends], default=math.inf)

    def advance(self, now_s: float, step: int | None = None) -> None:
        """Begin and end what is due at `now_s`, since the timeline began, or at this step; None: not counted."""
        while (due_s := self.next_s()) <= now_s:
            ended = [fault for end_s, fault in self._active if end_s <= due_s]
            self._active = [(end_s, fault) for end_s, fault in self._active if end_s > due_s]
            self._apply()
            self.log += [FaultEvent(now_s, step, fault, "ended", due_s) for fault in ended]
            for fault in [fault for fault in self.waiting if fault.at is not None and fault.at <= due_s]:
                self._begin(fault, due_s, now_s, step)
        # The step is known now, so not before anything that was due by the clock.
        for fault in list(self.waiting):
            if step is not None and fault.step is not None and fault.step <= step:
                self._begin(fault, now_s, now_s, step)

    def close(self, now_s: float) -> None:
        """End every fault; if a part cannot be undone, everything else is, and then the error is raised."""
        ended = [fault for _, fault in self._active]
        self._active.clear()
        self.waiting.clear()
        self._apply()
        self.log += [FaultEvent(now_s, None, fault, "undone") for fault in ended]

    def _begin(self, fault: NetworkFault, from_s: float, now_s: float, step: int | None) -> None:
        self.waiting.remove(fault)
        num_connections = None
        if fault.what == "reset":
            num_connections = self._network.reset_tcp(fault.hosts[0])
        elif fault.what == "up":
            self._active = [
                (end, other) for end, other in self._active if (other.what, other.link) != ("down", fault.link)
            ]
        else:
            self._active.append((math.inf if fault.lasts is None else from_s + fault.lasts, fault))
        self._apply()
        self.log.append(FaultEvent(now_s, step, fault, "began", fault.at, num_connections))

    def _apply(self) -> None:
        """Change what differs, as much as the network accepts, then raise the first error."""
        plan, down = conditions(self._plan, [fault for _, fault in self._active])
        errors = []
        for host in sorted(down ^ self._down):
            try:
                self._network.set_link(host, is_up=host not in down)
                self._down ^= {host}
            except Exception as error:
                errors.append(error)
        try:
            if self._network.plan != plan:
                self._network.set_plan(plan)
        except Exception as error:
            errors.append(error)
        if errors:
            raise errors[0]


@contextmanager
def play(
    timeline: Timeline, network: Network, *, step_source: Callable[[], int] | None = None
) -> Iterator[FaultPlayer]:
    """Play a timeline from a thread, beginning now; at the end of the block every fault is undone.

    Faults at a step need a `step_source`, which returns the number of steps done. At the end of the block the first
    error of the network or of `step_source` is raised; if the block itself raised, it gets a note instead.
    """
    timeline.check(network.plan, has_steps=step_source is not None)
    start_s = time.monotonic()
    player = FaultPlayer(timeline, network)
    is_over = threading.Event()
    errors: list[Exception] = []

    def run() -> None:
        try:
            while not is_over.is_set():
                step = None if step_source is None else step_source()
                player.advance(time.monotonic() - start_s, step)
                due_s = min(player.next_s() - (time.monotonic() - start_s), threading.TIMEOUT_MAX)
                waits_for_a_step = any(fault.step is not None for fault in player.waiting)
                is_over.wait(min(due_s, STEP_INTERVAL_S) if waits_for_a_step else due_s)
        except Exception as error:
            errors.append(error)  # raised again at the end of the block

    def finish() -> list[Exception]:
        """Stop playing and undo every fault; return the errors, the first one first."""
        is_over.set()
        thread.join()
        try:
            player.close(time.monotonic() - start_s)
        except Exception as error:
            errors.append(error)
        return errors

    thread = threading.Thread(target=run, name="faults", daemon=True)
    thread.start()
    try:
        yield player
    except BaseException as error:
        _add_notes(error, finish())
        raise
    if finish():
        _add_notes(errors[0], errors[1:])
        raise errors[0]


def _add_notes(error: BaseException, others: list[Exception]) -> None:
    for other in others:
        error.add_note(f"the timeline of faults failed, too: {type(other).__name__}: {other}")
