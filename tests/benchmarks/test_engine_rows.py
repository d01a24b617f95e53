"""Rows, shares and targets of bench_engine, from made-up steps."""

import json

import pytest
from engine_points import CONGESTION_CONTROL, FP32, PLACES, TAH
from engine_rows import MIN_SHARE, as_json, engine_row, engine_rows, find, report, verdicts

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


def verdict(rows, *words):
    [found] = [verdict for verdict in verdicts(rows) if all(word in verdict.target for word in words)]
    return found


def test_row_has_median_and_quartiles_and_what_was_in_force():
    row = engine_row(sweep_row(place("100")))
    assert (row.step_low_s, row.step_s, row.step_high_s) == pytest.approx((1.9, 2.0, 2.2))
    assert row.step_mean_s == pytest.approx(2.0 * 6.95 / 5)
    assert row.tokens_per_s == pytest.approx(8 * 4 * 256 / 2.0)
    assert (row.micro_batches, row.num_steps, row.wire) == (8, 5, TAH)
    assert row.congestion_control == "reno"  # measured beside it, and not what was asked for
    assert row.slow_start_after_idle is False
    assert row.prediction_error == pytest.approx(0.02)


def test_round_trip_to_the_coordinator_is_added_for_tahq_alone():
    far = place("100-50ms")
    ours, theirs = (engine_row(sweep_row(far, FP32, runtime)) for runtime in ("tahq", "torch"))
    assert ours.share_with_commit == pytest.approx(1.95 / 2.0)
    assert ours.share == theirs.share == theirs.share_with_commit == pytest.approx(0.95)
    assert theirs.prediction_error is None


def test_newest_measurement_of_a_point_counts_whatever_its_depth():
    old = sweep_row(place("100"), step_s=3.0)
    new = sweep_row(place("100"), when="2026-11-22T09:00:00+00:00")
    new["point"]["in_flight"] = [7, 5, 3, 1]
    failed = sweep_row(place("100")) | {"status": "failed", "when": "2026-11-22T10:00:00+00:00"}
    [row] = engine_rows([new, old, failed])
    assert (row.step_s, row.depth) == (2.0, (7, 5, 3, 1))


def test_share_is_held_to_its_target():
    good = engine_row(sweep_row(place("100"), bound_s=1.901))
    bad = engine_row(sweep_row(place("100"), bound_s=1.899))
    said = ("4 stages, 100 Mbit/s, 8 micro-batches, tah",)
    assert verdict([good], *said).is_met
    assert not verdict([bad], *said).is_met
    assert "MISSED" in verdict([bad], *said).line()
    assert verdict([], *said).line().endswith("not measured")


def test_best_of_the_schedules_counts_and_is_named():
    rows = [
        engine_row(sweep_row(place("100"), FP32, step_s=2.5, bound_s=1.9)),
        engine_row(sweep_row(place("100"), FP32, schedule="gpipe", bound_s=1.88)),
        engine_row(sweep_row(place("100"), FP32, runtime="bare", bound_s=1.99)),
    ]
    found = verdict(rows, "100 Mbit/s, 8 micro-batches, fp32", "bound")
    assert found.measured == pytest.approx(0.94)
    assert found.is_met
    assert found.note == "gpipe"


def test_target_that_only_the_commit_would_meet_is_missed_and_says_so():
    found = verdict([engine_row(sweep_row(place("100-50ms"), bound_s=1.86))], "50ms, 8 micro-batches, tah")
    assert not found.is_met
    assert found.line().endswith("0.930, MISSED (1f1b; 0.955 with the commit's round trip)")


def test_schedule_that_is_faster_but_further_from_its_own_bound_is_named():
    rows = [
        engine_row(sweep_row(place("100"))),
        engine_row(sweep_row(place("100"), schedule="zero-bubble", step_s=1.6, bound_s=1.4)),
    ]
    found = verdict(rows, "4 stages, 100 Mbit/s, 8 micro-batches, tah")
    assert found.measured == pytest.approx(0.95)
    assert "zero-bubble is faster, 1.250 ×" in found.line()


def test_gpipe_is_beaten_by_so_many_times_or_not():
    gpipe = engine_row(sweep_row(place("100"), FP32, "torch", "gpipe", step_s=3.2))
    stock = engine_row(sweep_row(place("100"), FP32, "torch", "1f1b", step_s=9.9))
    ours = engine_row(sweep_row(place("100"), FP32, step_s=2.0))
    slow = engine_row(sweep_row(place("100"), FP32, step_s=2.1))
    assert verdict([gpipe, stock, ours], "torch GPipe").is_met
    assert not verdict([gpipe, stock, slow], "torch GPipe").is_met
    assert verdict([stock, ours], "torch GPipe").is_met is None


def test_worst_prediction_counts():
    near = engine_row(sweep_row(place("100")))
    far = engine_row(sweep_row(place("300"), predicted_step_s=2.0 * 0.94))
    assert verdict([near], "prediction", "tahq").is_met
    found = verdict([near, far], "prediction", "tahq")
    assert found.measured == pytest.approx(0.06)
    assert not found.is_met


def test_every_point_of_the_issue_has_a_target():
    targets = [verdict.target for verdict in verdicts([])]
    assert len(targets) == len(set(targets)) == 5 * 2 * 2 + 1 + 1 + 2
    assert sum(f"at least {MIN_SHARE[TAH]}" in target for target in targets) == 10
    assert "8 stages, 100 Mbit/s, 150ms, 32 micro-batches, tah: at least 0.92 of the bound" in targets


def test_files_have_all_rows_and_what_failed():
    rows = [engine_row(sweep_row(place("100"))), engine_row(sweep_row(place("100"), FP32, "torch", "gpipe"))]
    failed = sweep_row(place("20"), FP32, "bare") | {"error": "TooBusyError: 1.5 of 2 cores were busy"}
    text = report(rows, "a machine", [failed])
    assert text.count("\n| tahq 1f1b |") == text.count("\n| torch gpipe |") == 1
    assert "bare 1f1b, raw:dtype=fp32, 4 stages, 8 micro-batches, 20 Mbit/s: TooBusyError" in text
    found = json.loads(as_json(rows, "a machine"))
    assert [row["share"] for row in found["rows"]] == [0.95, 0.95]
    assert len(found["targets"]) == len(verdicts(rows))


def test_rows_are_found_by_network_and_wire():
    rows = [engine_row(sweep_row(place("100"), wire)) for wire in (TAH, FP32)]
    assert find(rows, place("100"), 8) == rows
    assert find(rows, place("100"), 8, FP32) == rows[1:]
    assert find(rows, place("100"), 32) == find(rows, place("20"), 8) == []
