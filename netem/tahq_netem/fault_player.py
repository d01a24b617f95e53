"""Plays a timeline of faults on a network, writes down what it did when, and leaves the network as it was.

`FaultPlayer` is told the time and the step by whoever drives it, so that a test can use a clock of its own;
`play` drives one from a thread. However much time goes by between two calls, every fault happens, in order.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from tahq_netem.faults import Conditions, Fault, Timeline, conditions
from tahq_netem.network import Network

STEP_INTERVAL_S: Final = 0.02
"""How often steps are looked at while a fault waits for one."""

_Setting = tuple[Literal["rates", "path", "link"], Any]
"""What of a network is set by one call, and of which host or (source, destination)."""


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """What was done: a fault began or ended, or a reset ended so many connections."""

    at_s: float
    """When it had been done, since the timeline began."""
    step: int | None
    """Steps that were done by then; None: nobody counted."""
    fault: Fault
    change: str
    due_s: float | None = None
    """When it should have been done; None: no time was set for it, but a step, or the end of the timeline."""
    num_connections: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {**asdict(self), "fault": self.fault.model_dump(by_alias=True, exclude_none=True)}


class FaultPlayer:
    """The faults of a timeline, happening to a network.

    Args:
        timeline: what happens.
        network: to whom; as it is now is what it is without faults.
        clock: seconds since the timeline began, asked when something has been done; None: the time that the
            player was told counts.

    Raises:
        ConfigError: the timeline is not for this network.
    """

    def __init__(self, timeline: Timeline, network: Network, clock: Callable[[], float] | None = None) -> None:
        timeline.check(network.plan)
        self.log: list[FaultEvent] = []
        """What was done so far."""
        self._network = network
        self._clock = clock
        self._plan = network.plan
        self._in_force = _settings(conditions(self._plan, []))
        """What the network has; a setting that could not be changed is missing, since nobody knows it."""
        self._waiting = list(timeline.faults)
        self._active: list[tuple[float, Fault]] = []
        """Each with when it ends, in the order of their beginning."""

    @property
    def waits_for_a_step(self) -> bool:
        """Whether a fault is still to come at some step."""
        return any(fault.step is not None for fault in self._waiting)

    @property
    def waiting(self) -> tuple[Fault, ...]:
        """Faults that are still to come."""
        return tuple(self._waiting)

    def next_s(self) -> float:
        """When something is due next; infinite: nothing is, as far as time goes."""
        begins = (fault.at for fault in self._waiting if fault.at is not None)
        ends = (end_s for end_s, _ in self._active)
        return min([*begins, *ends], default=math.inf)

    def advance(self, now_s: float, step: int | None = None) -> None:
        """Make happen what is due.

        Args:
            now_s: since the timeline began.
            step: steps that are done; None: nobody counts.

        Raises:
            TahqError: the network cannot do it.
        """
        while (due_s := self.next_s()) <= now_s:
            self._end(due_s, now_s, step)
            for fault in [fault for fault in self._waiting if fault.at is not None and fault.at <= due_s]:
                self._begin(fault, due_s, now_s, step)
        # A step is known to be done now, which is not before anything that was due by the clock.
        for fault in [fault for fault in self._waiting if _is_reached(fault.step, step)]:
            self._begin(fault, now_s, now_s, step)

    def close(self, now_s: float) -> None:
        """End every fault.

        Args:
            now_s: since the timeline began.

        Raises:
            TahqError: the network cannot do a part of it; all the rest has been undone.
        """
        ended = [fault for _, fault in self._active]
        self._active.clear()
        self._waiting.clear()
        self._apply()
        self.log += [FaultEvent(self._done_s(now_s), None, fault, "undone") for fault in ended]

    def _begin(self, fault: Fault, from_s: float, now_s: float, step: int | None) -> None:
        self._waiting.remove(fault)
        num_connections = None
        if fault.what == "reset":
            num_connections = self._network.reset_tcp(fault.hosts[0])
        elif fault.what == "up":
            self._active = [(end, other) for end, other in self._active if not _ends(fault, other)]
        else:
            self._active.append((math.inf if fault.lasts is None else from_s + fault.lasts, fault))
        self._apply()
        self.log.append(FaultEvent(self._done_s(now_s), step, fault, "began", fault.at, num_connections))

    def _end(self, due_s: float, now_s: float, step: int | None) -> None:
        ended = [fault for end_s, fault in self._active if end_s <= due_s]
        self._active = [(end_s, fault) for end_s, fault in self._active if end_s > due_s]
        self._apply()
        self.log += [FaultEvent(self._done_s(now_s), step, fault, "ended", due_s) for fault in ended]

    def _done_s(self, now_s: float) -> float:
        return now_s if self._clock is None else self._clock()

    def _apply(self) -> None:
        """Give the network what is different from what it has: as much as it takes, then raise the first refusal."""
        wanted = _settings(conditions(self._plan, [fault for _, fault in self._active]))
        errors = []
        for setting in [setting for setting, value in wanted.items() if self._in_force.get(setting) != value]:
            self._in_force.pop(setting, None)
            try:
                _set(self._network, setting, wanted[setting])
            except Exception as error:
                errors.append(error)
            else:
                self._in_force[setting] = wanted[setting]
        if errors:
            raise errors[0]


def _is_reached(wanted: int | None, step: int | None) -> bool:
    return wanted is not None and step is not None and wanted <= step


def _ends(up: Fault, other: Fault) -> bool:
    return other.what == "down" and other.link == up.link


def _settings(current: Conditions) -> dict[_Setting, Any]:
    rates: dict[_Setting, Any] = {("rates", host): shape for host, shape in current.host_shapes.items()}
    paths: dict[_Setting, Any] = {("path", ends): shape for ends, shape in current.paths.items()}
    links: dict[_Setting, Any] = {("link", host): host not in current.cut_off for host in current.host_shapes}
    return rates | paths | links


def _set(network: Network, setting: _Setting, value: Any) -> None:
    match setting:
        case "rates", host:
            network.set_rate(host, up=value.up_bits_per_s, down=value.down_bits_per_s)
        case "path", (source, destination):
            network.set_path(source, destination, value)
        case "link", host:
            network.set_link(host, is_up=value)


@contextmanager
def play(
    timeline: Timeline,
    network: Network,
    *,
    clock: Callable[[], float] = time.monotonic,
    step_source: Callable[[], int] | None = None,
) -> Iterator[FaultPlayer]:
    """The timeline begins now and is played by a thread; at the end of the block every fault is undone.

    Args:
        timeline: what happens.
        network: to whom.
        clock: seconds, from any origin.
        step_source: how many steps are done; needed by faults at a step.

    Raises:
        ConfigError: the timeline is not for this network, or nobody counts its steps.
        Exception: at the end of the block: what the network, or `step_source`, raised when a fault was due or was
            undone. It is a note to the exception that the block itself ended with, if there is one.
    """
    timeline.check(network.plan, has_steps=step_source is not None)
    thread = _PlayingThread(timeline, network, clock, step_source)
    thread.start()
    try:
        yield thread.player
    except BaseException as error:
        _note(error, thread.finish())
        raise
    errors = thread.finish()
    if errors:
        _note(errors[0], errors[1:])
        raise errors[0]


def _note(error: BaseException, others: Iterable[Exception]) -> None:
    for other in others:
        error.add_note(f"the timeline of faults failed, too: {type(other).__name__}: {other}")


class _PlayingThread(threading.Thread):
    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        clock: Callable[[], float],
        step_source: Callable[[], int] | None,
    ) -> None:
        super().__init__(name="faults", daemon=True)
        self.player = FaultPlayer(timeline, network, self._now_s)
        self._errors: list[Exception] = []
        self._clock = clock
        self._start_s = clock()
        self._step_source = step_source
        self._is_over = threading.Event()

    def run(self) -> None:
        try:
            while not self._is_over.is_set():
                step = None if self._step_source is None else self._step_source()
                self.player.advance(self._now_s(), step)
                self._is_over.wait(self._patience_s())
        except Exception as error:
            self._errors.append(error)  # raised again where the block ends

    def finish(self) -> list[Exception]:
        """Play no more and undo what was played; returns what went wrong, the first thing first."""
        self._is_over.set()
        self.join()
        try:
            self.player.close(self._now_s())
        except Exception as error:
            self._errors.append(error)
        return self._errors

    def _now_s(self) -> float:
        return self._clock() - self._start_s

    def _patience_s(self) -> float | None:
        next_s = STEP_INTERVAL_S if self.player.waits_for_a_step else math.inf
        due_s = min(next_s, self.player.next_s() - self._now_s())
        return None if due_s == math.inf else max(0.0, due_s)
