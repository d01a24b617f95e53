"""Plays a timeline of faults on a network, logs what it did when, and restores the network at the end.

`FaultPlayer` is given the time and the step, so that tests can use their own clock; `play` drives one from a thread.
However much time passes between two calls, every fault happens, in order.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from tahq_netem.backends.network import Network
from tahq_netem.network.faults import NetworkFault, Setting, Timeline, conditions

STEP_INTERVAL_S: Final = 0.02
"""How often steps are looked at while a fault waits for one."""


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """A fault began, ended or was undone."""

    at_s: float
    """When that was complete, since the timeline began."""
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
    """Applies the faults of a timeline to a network, whose present plan is restored at the end.

    `clock` gives the seconds since the timeline began, for the log; None: the time given to `advance`.
    """

    def __init__(self, timeline: Timeline, network: Network, clock: Callable[[], float] | None = None) -> None:
        timeline.check(network.plan)
        self.log: list[FaultEvent] = []
        self.waiting = list(timeline.faults)
        """Faults that have not begun."""
        self._active: list[tuple[float, NetworkFault]] = []
        """Each with its end, in the order of their beginning."""
        self._network = network
        self._clock = clock
        self._plan = network.plan
        self._in_force = conditions(self._plan, [])
        """The network's settings; a setting whose change failed is missing, since its state is unknown."""

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
            self.log += [FaultEvent(self._done_s(now_s), step, fault, "ended", due_s) for fault in ended]
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
        self.log += [FaultEvent(self._done_s(now_s), None, fault, "undone") for fault in ended]

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
        self.log.append(FaultEvent(self._done_s(now_s), step, fault, "began", fault.at, num_connections))

    def _done_s(self, now_s: float) -> float:
        return now_s if self._clock is None else self._clock()

    def _apply(self) -> None:
        """Change the settings that differ, as many as the network accepts, then raise the first error."""
        wanted = conditions(self._plan, [fault for _, fault in self._active])
        errors = []
        for setting, value in wanted.items():
            if self._in_force.get(setting) == value:
                continue
            self._in_force.pop(setting, None)
            try:
                _set(self._network, setting, value)
            except Exception as error:
                errors.append(error)
            else:
                self._in_force[setting] = value
        if errors:
            raise errors[0]


def _set(network: Network, setting: Setting, value: Any) -> None:
    match setting:
        case "rate", host:
            network.set_rate(host, up=value.up_bits_per_s, down=value.down_bits_per_s)
        case "path", source, destination:
            network.set_path(source, destination, value)
        case "link", host:
            network.set_link(host, is_up=value)


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
    player = FaultPlayer(timeline, network, lambda: time.monotonic() - start_s)
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
