"""Plays a timeline of faults on a network, logs what it did when, and restores the network at the end.

`FaultPlayer` is given the time and the step, so that tests can use their own clock; `play` drives one from a thread.
However much time passes between two calls, every fault happens, in order.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from tahq_netem.backends.network import Network
from tahq_netem.network.faults import Conditions, Fault, Timeline, conditions

STEP_INTERVAL_S: Final = 0.02
"""How often steps are looked at while a fault waits for one."""

_Setting = tuple[Literal["rates", "path", "link"], Any]
"""What one call sets, of which host or (source, destination)."""


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """A fault began, ended or was undone."""

    at_s: float
    """When that was complete, since the timeline began."""
    step: int | None
    """Steps done by then; None: steps are not counted."""
    fault: Fault
    change: str
    due_s: float | None = None
    """When it was due; None: at a step, or at the end of the timeline."""
    num_connections: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {**asdict(self), "fault": self.fault.model_dump(by_alias=True, exclude_none=True)}


class FaultPlayer:
    """Applies the faults of a timeline to a network.

    Args:
        timeline: the faults.
        network: the network; its present plan is restored at the end.
        clock: seconds since the timeline began, for the log; None: the time given to `advance`.

    Raises:
        ConfigError: the timeline is not for this network.
    """

    def __init__(self, timeline: Timeline, network: Network, clock: Callable[[], float] | None = None) -> None:
        timeline.check(network.plan)
        self.log: list[FaultEvent] = []
        """The events so far."""
        self._network = network
        self._clock = clock
        self._plan = network.plan
        self._in_force = _settings(conditions(self._plan, []))
        """The network's settings; a setting whose change failed is missing, since its state is unknown."""
        self._waiting = list(timeline.faults)
        self._active: list[tuple[float, Fault]] = []
        """Each with its end, in the order of their beginning."""

    @property
    def waits_for_a_step(self) -> bool:
        """Whether a fault waits for a step."""
        return any(fault.step is not None for fault in self._waiting)

    @property
    def waiting(self) -> tuple[Fault, ...]:
        """Faults that have not begun."""
        return tuple(self._waiting)

    def next_s(self) -> float:
        """When something is due next; infinite if nothing is due by time."""
        begins = (fault.at for fault in self._waiting if fault.at is not None)
        ends = (end_s for end_s, _ in self._active)
        return min([*begins, *ends], default=math.inf)

    def advance(self, now_s: float, step: int | None = None) -> None:
        """Begin and end what is due.

        Args:
            now_s: since the timeline began.
            step: steps done so far; None: steps are not counted.

        Raises:
            TahqError: the network cannot do it.
        """
        while (due_s := self.next_s()) <= now_s:
            self._end(due_s, now_s, step)
            for fault in [fault for fault in self._waiting if fault.at is not None and fault.at <= due_s]:
                self._begin(fault, due_s, now_s, step)
        # The step is known now, so not before anything that was due by the clock.
        for fault in [fault for fault in self._waiting if _is_reached(fault.step, step)]:
            self._begin(fault, now_s, now_s, step)

    def close(self, now_s: float) -> None:
        """End every fault.

        Args:
            now_s: since the timeline began.

        Raises:
            TahqError: a part could not be undone; everything else was.
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
        """Change the settings that differ, as many as the network accepts, then raise the first error."""
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
    """Play a timeline from a thread, beginning now; at the end of the block every fault is undone.

    Args:
        timeline: the faults.
        network: the network.
        clock: seconds, from any origin.
        step_source: returns the number of steps done; needed by faults at a step.

    Raises:
        ConfigError: the timeline does not fit this network, or needs a `step_source`.
        Exception: at the end of the block, the first error of the network or of `step_source`. If the block itself
            raised, it is added to that exception as a note.
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
            self._errors.append(error)  # raised again at the end of the block

    def finish(self) -> list[Exception]:
        """Stop playing and undo every fault; return the errors, the first one first."""
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
