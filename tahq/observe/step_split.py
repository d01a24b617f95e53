"""Splits of steps, read from metrics.jsonl again, and the medians of several."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from tahq.coordinator.observer import LinkRecord, StageRecord, StepRecord
from tahq.coordinator.stage_split import StageSplit
from tahq.errors import UserError


def read_steps(metrics: Path) -> list[StepRecord]:
    """The steps of a metrics.jsonl, in order.

    Raises:
        UserError: it cannot be read, or was written by a version that did not split steps.
    """
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines()
        return [step_record(json.loads(line)) for line in lines]
    except OSError as error:
        raise UserError(f"cannot read {metrics}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{metrics}: a line has no split of its step ({error!r}); was it written by this tahq?"
        ) from error


def step_record(row: Mapping[str, Any]) -> StepRecord:
    """A line of metrics.jsonl as the record that it was made of; null is NaN."""
    return StepRecord(
        step=int(row["step"]),
        loss=_number(row["loss"]),
        tokens=int(row["tokens"]),
        step_time_s=_number(row["step_time_s"]),
        grad_norm=_number(row["grad_norm"]),
        clip_factor=_number(row["clip_factor"]),
        skipped=bool(row["skipped"]),
        evaluating="validation" in row,
        stages=tuple(_stage(stage) for stage in row["stages"]),
        links=tuple(_link(link) for link in row["links"]),
    )


def _stage(row: Mapping[str, Any]) -> StageRecord:
    values = {field.name: row[field.name] for field in fields(StageSplit)}
    waits = {int(stage): _number(s) for stage, s in values.pop("wait_s").items()}
    beside = {name: _number(s) for name, s in values.pop("beside_s").items()}
    split = StageSplit(wait_s=waits, beside_s=beside, **{name: _number(s) for name, s in values.items()})
    timing = {name: _number(s) for name, s in row["timing_s"].items()}
    return StageRecord(int(row["stage"]), timing, int(row["codec_state_bytes"]), split)


def _link(row: Mapping[str, Any]) -> LinkRecord:
    return LinkRecord(
        link=int(row["link"]),
        sender=int(row["from"]),
        receiver=int(row["to"]),
        direction=row["direction"],
        frames=int(row["frames"]),
        payload_bytes=int(row["payload_bytes"]),
        wire_bytes=int(row["wire_bytes"]),
        elements=int(row["elements"]),
        busy_s=_number(row["busy_s"]),
        sending_s=_number(row["sending_s"]),
        wire_s=_number(row["wire_s"]),
        idle_s=_number(row["idle_s"]),
        codec=str(row.get("codec", "")),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


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
        by_key = isinstance(parts[0], Mapping)
        values[field.name] = _medians_by_key(parts) if by_key else median(parts)
    timing = _medians_by_key([record.timing for record in records])
    return replace(records[-1], timing=timing, split=StageSplit(**values))


def _medians_by_key(parts: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: median(part.get(key, 0.0) for part in parts) for key in keys}


def _median_link(records: Sequence[LinkRecord]) -> LinkRecord:
    def middle(figure: Callable[[LinkRecord], float]) -> float:
        return median(map(figure, records))

    return replace(
        records[-1],
        busy_s=middle(lambda r: r.busy_s),
        sending_s=middle(lambda r: r.sending_s),
        wire_s=middle(lambda r: r.wire_s),
        idle_s=middle(lambda r: r.idle_s),
    )
