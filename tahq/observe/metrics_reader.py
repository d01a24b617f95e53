"""Splits of steps, read from metrics.jsonl again, and the medians of several."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, get_args

from tahq.coordinator.observer import LinkRecord, StageRecord, StageSplit, StepRecord, Traffic
from tahq.errors import UserError, file_errors

LINK_COUNTS = ("frames", "payload_bytes", "wire_bytes", "elements")
LINK_SECONDS = ("busy_s", "sending_s", "wire_s", "idle_s")
RECENT_STEPS = 20
"""Steps that the remaining time, and what a step waits for, are estimated from."""

Value = TypeVar("Value")

WRONG = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Raised while a line that is not a step's, or not JSON, is converted."""


def read_lines(metrics: Path, value_of: Callable[[Any], Value], what: str) -> list[Value]:
    """A value of each complete line, in order.

    A last line without a newline is left out: it is being written, or was cut by a kill or a full disk (`metrics.py`).
    `value_of` makes the value of a line's JSON, or raises one of `WRONG`; messages name it as `what`.

    Raises:
        UserError: the file cannot be read, or one of its lines; with its number, from 1.
    """
    with file_errors("read", metrics):
        lines = metrics.read_bytes().split(b"\n")[:-1]
    values = []
    for number, line in enumerate(lines, start=1):
        try:
            values.append(value_of(json.loads(line)))
        except WRONG as error:
            raise UserError(
                f"{metrics}:{number} does not have {what} ({_reason(error)}); was it written by this tahq?"
            ) from error
    return values


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON from character {error.colno} on: {error.msg}"
    return f"no key {error}" if isinstance(error, KeyError) else str(error)


def read_steps(metrics: Path) -> list[StepRecord]:
    """The steps of a metrics.jsonl, in order, as `read_lines` reads them."""
    return read_lines(metrics, step_record, "the split of a step")


def step_record(row: Mapping[str, Any]) -> StepRecord:
    """A line of metrics.jsonl as its record, null losses and norms as NaN; ValueError: an impossible number."""
    stages = tuple(_stage(stage, number) for number, stage in enumerate(row["stages"]))
    step_time_s = _seconds(row["step_time_s"], "step_time_s")
    if step_time_s < 0:
        raise ValueError(f"step_time_s is {step_time_s}")
    return StepRecord(
        step=_whole(row, "step", least=1),
        loss=_number(row["loss"]),
        tokens=_whole(row, "tokens"),
        step_time_s=step_time_s,
        grad_norm=_number(row["grad_norm"]),
        clip_factor=_number(row["clip_factor"]),
        skipped=bool(row["skipped"]),
        evaluating="validation" in row,
        stages=stages,
        links=tuple(_link(link, len(stages)) for link in row["links"]),
        # absent from older files
        lr=_number(row.get("lr", 0.0)),
        computed_tokens=_whole({"computed_tokens": 0, **row}, "computed_tokens"),
        schedule=str(row.get("schedule", "")),
        in_flight=tuple(map(int, row.get("in_flight", ()))),
        router_loss=_number(row["router_loss"]) if "router_loss" in row else None,
        rewards={name: _number(value) for name, value in row.get("rewards", {}).items()},
        loss_scale=_number(row.get("loss_scale", 0.0)),
    )


def _stage(row: Mapping[str, Any], number: int) -> StageRecord:
    if row["stage"] != number:
        raise ValueError(f"stage {row['stage']} is where stage {number} should be")
    values = {field.name: row[field.name] for field in fields(StageSplit)}
    waits = {int(stage): _seconds(s, "wait_s") for stage, s in values.pop("wait_s").items()}
    beside = {name: _seconds(s, "beside_s") for name, s in values.pop("beside_s").items()}
    split = StageSplit(wait_s=waits, beside_s=beside, **{name: _seconds(s, name) for name, s in values.items()})
    timing = {name: _number(s) for name, s in row["timing_s"].items()}
    sizes = {"memory_bytes": 0, "peak_bytes": 0, **row}  # absent from older files
    state, memory, peak = (_whole(sizes, f"{name}_bytes") for name in ("codec_state", "memory", "peak"))
    return StageRecord(number, timing, state, split, memory, peak)


def _link(row: Mapping[str, Any], num_stages: int) -> LinkRecord:
    if row["direction"] not in get_args(Traffic):
        raise ValueError(f"direction {row['direction']!r}")
    counts: dict[str, Any] = {
        name: _whole(row, name, least=int(name in ("frames", "payload_bytes"))) for name in LINK_COUNTS
    }
    seconds: dict[str, Any] = {name: _seconds(row[name], name) for name in LINK_SECONDS}
    return LinkRecord(
        link=_whole(row, "link"),
        sender=_whole(row, "from", most=num_stages - 1),
        receiver=_whole(row, "to", most=num_stages - 1),
        direction=row["direction"],
        codec=str(row.get("codec", "")),
        round_trip_s=_seconds(row.get("round_trip_s", 0.0), "round_trip_s"),
        relayed_bytes=_whole({"relayed_bytes": 0, **row}, "relayed_bytes"),
        **counts,
        **seconds,
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _seconds(value: float | None, name: str) -> float:
    seconds = _number(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{name} is {'null' if value is None else value}; expected seconds")
    return seconds


def _whole(row: Mapping[str, Any], key: str, *, least: int = 0, most: int | None = None) -> int:
    number = int(row[key])
    if number < least:
        raise ValueError(f"{key} is {number}; expected at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{key} is {number}; expected at most {most}")
    return number


def median_step(steps: Iterable[StepRecord]) -> StepRecord:
    """Every figure's median over these steps, one at least; named as the last one.

    Medians do not add up as the parts of each step do.
    """
    steps = list(steps)
    last = steps[-1]
    stages = [[s.stages[index] for s in steps if index < len(s.stages)] for index in range(len(last.stages))]
    links: dict[tuple[int, int, str], list[LinkRecord]] = {}
    for step in steps:
        for link in step.links:
            links.setdefault((link.link, link.sender, link.direction), []).append(link)
    return replace(
        last,
        step_time_s=median(step.step_time_s for step in steps),
        stages=tuple(_median_stage(records) for records in stages),
        links=tuple(_median_link(links[link.link, link.sender, link.direction]) for link in last.links),
    )


def _median_stage(records: Sequence[StageRecord]) -> StageRecord:
    splits = [record.split for record in records]
    values: dict[str, Any] = {}
    for field in fields(StageSplit):
        parts = [getattr(split, field.name) for split in splits]
        values[field.name] = _medians_by_key(parts) if isinstance(parts[0], Mapping) else median(parts)
    timing = _medians_by_key([record.timing for record in records])
    return replace(records[-1], timing=timing, split=StageSplit(**values))


def _medians_by_key(parts: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: median(part.get(key, 0.0) for part in parts) for key in keys}


def _median_link(records: Sequence[LinkRecord]) -> LinkRecord:
    return replace(records[-1], **{name: median(getattr(r, name) for r in records) for name in LINK_SECONDS})
