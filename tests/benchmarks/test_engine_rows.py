"""Rows of bench_engine, from made-up steps."""

import pytest
from bench_engine import cells
from engine_points import CONGESTION_CONTROL, FP32, PLACES, TAH
from engine_rows import EngineRow, engine_rows, failures

from tahq_netem.sweep.spec import split_wire


def sweep_row(place, wire=TAH, runtime="tahq", schedule="1f1b", step_s=2.0, bound_s=1.9, **changes):
    activations, gradients = split_wire(wire)
    count = place.micro_batches[0]
    point = {
        "runtime": runtime,
        "schedule": schedule,
        "activations": activations,
        "gradients": gradients,
        "stages": place.stages,
        "micro_batch": 4,
        "in_flight": None,
        "rate_bits_per_s": place.rate_bits_per_s,
        "round_trip_s": place.round_trip_s,
        "global_batch": 4 * count,
        "seq_len": 256,
        "congestion_control": CONGESTION_CONTROL,
        "tcp_slow_start_after_idle": False,
    }
    return {
        "status": "done",
        "when": "2026-11-22T08:00:00+00:00",
        "point": point,
        "steps": [{"seconds": step_s * factor} for factor in (0.9, 0.95, 1.0, 1.1, 3.0)],
        "bound_s": bound_s,
        "predicted_step_s": 1.02 * step_s if runtime != "torch" else None,
        "codec_s": None,
        "busy_cores": 0.2,
        "busy_cores_of_others": 0.0,
        "calibration": {"network": {"congestion_control": "reno"}},
    } | changes


def place(name):
    return next(place for place in PLACES if place.name == name)


def test_row_has_median_and_quartiles():
    row = EngineRow(sweep_row(place("100")))
    assert row.step_s == pytest.approx((1.9, 2.0, 2.2))
    assert row.tokens_per_s == pytest.approx(8 * 4 * 256 / 2.0)
    assert (row.micro_batches, row.wire, row.place) == (8, TAH, place("100").key)
    assert row.prediction_cells() == ("2.040", "+2.0%")
    assert cells(row)[3:8] == ["2.000 (1.900–2.200)", "4,096", "1.900", "0.950", "0.950"]


def test_round_trip_to_the_coordinator_is_added_for_tahq_alone():
    far = place("100-50ms")
    ours, theirs = (EngineRow(sweep_row(far, FP32, runtime)) for runtime in ("tahq", "torch"))
    assert ours.share_with_commit == pytest.approx(1.95 / 2.0)
    assert ours.share == theirs.share == theirs.share_with_commit == pytest.approx(0.95)
    assert theirs.prediction_cells() == ("", "")


def test_newest_measurement_of_a_point_counts_whatever_its_depth():
    old = sweep_row(place("100"), step_s=3.0)
    new = sweep_row(place("100"), when="2026-11-22T09:00:00+00:00")
    new["point"]["in_flight"] = [7, 5, 3, 1]
    failed = sweep_row(place("100")) | {"status": "failed", "when": "2026-11-22T10:00:00+00:00"}
    [row] = engine_rows([new, old, failed])
    assert (row.step_s[1], row.depth) == (2.0, (7, 5, 3, 1))


def test_points_that_failed_are_listed_with_their_error():
    failed = sweep_row(place("20"), FP32, "bare") | {"status": "failed", "error": "TooBusyError: 1.5 of 2 cores"}
    [table] = failures([sweep_row(place("100")), failed])
    [row] = table.rows
    assert row == (EngineRow(failed).series, "20 Mbit/s", "TooBusyError: 1.5 of 2 cores")
    assert not list(failures([sweep_row(place("100"))]))
