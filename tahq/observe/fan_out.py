"""Several observers as one. One that cannot write any more is left out; the others are told, and the run goes on."""

from collections.abc import Callable, Sequence

from tahq.coordinator.observer import (
    RunEnd,
    RunHeader,
    RunObserver,
    SnapshotRecord,
    StageStatus,
    StepRecord,
    StepTrace,
    ValidationRecord,
)


class Observers(RunObserver):
    """Passes everything on, in order.

    Args:
        observers: earlier ones may be read by later ones.
    """

    def __init__(self, observers: Sequence[RunObserver]) -> None:
        self._observers = list(observers)

    def opened(self, header: RunHeader) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.opened(header))

    def phase_changed(self, phase: str, detail: str) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.phase_changed(phase, detail))

    def stage_changed(self, status: StageStatus) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.stage_changed(status))

    def stage_left(self, stage: int) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.stage_left(stage))

    def planned(self, start_step: int, total_steps: int) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.planned(start_step, total_steps))

    def step_committed(self, record: StepRecord) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.step_committed(record))

    def step_traced(self, trace: StepTrace) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.step_traced(trace))

    def validated(self, record: ValidationRecord) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.validated(record))

    def snapshot_written(self, record: SnapshotRecord) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.snapshot_written(record))

    def warned(self, text: str) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.warned(text))

    def ended(self, end: RunEnd) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.ended(end))

    def _tell(self, say: Callable[[RunObserver], None]) -> None:
        for observer in tuple(self._observers):
            try:
                say(observer)
            except OSError as error:
                self._observers.remove(observer)
                self.warned(f"{type(observer).__name__} cannot write any more and is left out: {error}")
