"""What a run came to, as text: losses, speed, bytes on the wire, where it was written, how to go on."""

from collections.abc import Iterable
from statistics import median

from tahq.coordinator.observer import LinkRecord, RunEnd, ValidationRecord
from tahq.observe import figures
from tahq.observe.metrics import perplexity
from tahq.observe.run_history import RunHistory
from tahq.units import format_size

AVERAGED_STEPS = 10
"""Steps whose mean loss stands for the start and the end of a run."""
BYTES_FP32, BYTES_FP16 = 4, 2


def summary_text(history: RunHistory, end: RunEnd, *, resume_command: str = "", export_command: str = "") -> str:
    """The summary of a run; empty if it never made a step.

    Args:
        history: what it has said of itself.
        end: how it ended.
        resume_command: what continues it.
        export_command: what makes a Hugging Face folder of it.
    """
    if history.header is None or not history.losses:
        return ""
    rows = [
        ("loss", _losses(history)),
        ("speed", _speed(history)),
        *_bottleneck(history),
        *([("validation", _validation(history.validation))] if history.validation else []),
        *_wire(history),
        *([("skipped", f"{history.num_skipped} of these steps, for NaN or infinity")] if history.num_skipped else []),
        ("written to", f"{history.header.run_folder}{_newest_snapshot(end)}"),
        *([("resume", _resuming(resume_command, end))] if resume_command and end.last_snapshot is not None else []),
        *([("export", export_command)] if export_command and end.last_snapshot is not None else []),
    ]
    return "\n".join([_headline(history, end), *_aligned(rows)])


def _resuming(command: str, end: RunEnd) -> str:
    """How the run is continued; one that has all its steps takes no more of them unless told to."""
    return f"{command}, with training.steps or epochs set to more" if end.steps_done >= end.total_steps else command


def _headline(history: RunHistory, end: RunEnd) -> str:
    name = history.header.name if history.header else "run"
    how = "done" if end.exit_status == 0 else f"ended with status {end.exit_status}"
    took, now = figures.duration(sum(history.step_times_s)), len(history.losses)
    part = "" if now == end.steps_done else f" ({now} of them since it was resumed)"
    return f"run {name} {how}: {end.steps_done} of {end.total_steps} steps{part} in {took}"


def _losses(history: RunHistory) -> str:
    text = f"{figures.loss(history.losses[0])} → {figures.loss(history.losses[-1])} nats a token"
    if len(history.losses) <= AVERAGED_STEPS:
        return text
    first, last = (history.mean_loss(steps) for steps in (slice(AVERAGED_STEPS), slice(-AVERAGED_STEPS, None)))
    return f"{text}; mean of {AVERAGED_STEPS} steps {figures.loss(first)} → {figures.loss(last)}"


def _speed(history: RunHistory) -> str:
    step_s = figures.duration(median(history.step_times_s))
    return f"{figures.tokens_rate(median(history.tokens_per_s))}, {step_s} a step (medians)"


def _bottleneck(history: RunHistory) -> list[tuple[str, str]]:
    diagnosis = history.diagnosis()
    return [("its limit", diagnosis.sentence)] if diagnosis is not None else []


def _validation(record: ValidationRecord) -> str:
    return (
        f"{figures.loss(record.loss)} (perplexity {perplexity(record.loss):.4g}) after step {record.step}; "
        f"without the codec {figures.loss(record.loss_raw)} ({perplexity(record.loss_raw):.4g})"
    )


def _wire(history: RunHistory) -> list[tuple[str, str]]:
    total = history.traffic()
    if not total.elements:
        return []
    directions = [(d, history.traffic(d)) for d in ("activations", "gradients")]
    return [
        ("on the wire", f"{format_size(total.wire_bytes)}; {_against(total)}"),
        *((name, _direction(traffic)) for name, traffic in directions if traffic.elements),
    ]


def _against(total: LinkRecord) -> str:
    sizes = (("fp32", BYTES_FP32 * total.elements), ("fp16", BYTES_FP16 * total.elements))
    return ", ".join(f"{name} {format_size(size)} ({size / total.wire_bytes:.2f}×)" for name, size in sizes)


def _direction(traffic: LinkRecord) -> str:
    return f"{format_size(traffic.payload_bytes)}, {traffic.bits_per_element:.2f} bits an element"


def _newest_snapshot(end: RunEnd) -> str:
    return "" if end.last_snapshot is None else f" (snapshot after step {end.last_snapshot})"


def _aligned(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {name:<12}{text}" for name, text in rows]
