"""Tables and plots say what the rows say, and no more."""

import copy
import re
from pathlib import Path

import pytest
from support.sweeps import World, small

from tahq_netem.sweep.report import draw_plots, plot_results, sweep_report
from tahq_netem.sweep.results import read_results, setting_of

EARLIER = Path(__file__).with_name("earlier_results.jsonl")
"""Its points don't say which congestion control was asked for."""


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "results.jsonl"
    World().sweep(small(rates=[20e6, None, 100e6], round_trips=[0.0, 0.05]), path)
    return list(read_results(path).values())


def table_rows(report, first):
    return [re.split(r"\s*\|\s*", line.strip("| ")) for line in report.splitlines() if line.startswith(f"| {first}")]


def test_table_has_a_row_per_wire_and_networks_from_fast_to_slow(rows):
    report = sweep_report(rows)
    heads = table_rows(report, "runtime")
    assert heads == [["runtime", "wire", "bits", "unshaped", "100 Mbit/s", "20 Mbit/s"]] * 2
    body = table_rows(report, "tahq")
    assert len(body) == 4
    assert [cell.split(" ")[0] for cell in body[0][3:]] == ["256", "128", "43"]
    # 1000 and 2000 bytes for 8 · 32 · 64 numbers
    assert body[0][2] == "0.49 + 0.98"
    assert "no delay" in report
    assert "round trip 50ms" in report


def test_failed_points_are_listed_with_their_reason(rows):
    rows[0] = {**rows[0], "status": "failed", "error": "RuntimeLostError: gone"}
    report = sweep_report(rows)
    assert "## Not measured" in report
    assert report.count("RuntimeLostError: gone") == 1
    assert sweep_report([]).startswith("# no results")


def test_real_and_sleeping_points_are_compared(rows):
    real = copy.deepcopy(rows)
    for row in real:
        row["point"]["compute"] = "real"
        row["tokens_per_s"] /= 0.97
    report = sweep_report([*rows, *real])
    assert report.count("-3.0%") == len(rows)


def test_congestion_controls_and_sweeps_are_kept_apart(rows):
    others = copy.deepcopy(rows)
    for row in others:
        row["point"]["congestion_control"] = "bbr"
        row["tokens_per_s"] *= 2
    report = sweep_report([*rows, *others])
    assert len(table_rows(report, "tahq")) == 8
    assert report.count("no delay, cubic") == report.count("no delay, bbr") == 1
    for row in others:
        row["point"]["congestion_control"] = "cubic"
        row["sweep"] = "other"
    assert "## other: " in sweep_report([*rows, *others])


def test_profiles_are_apart_from_networks_without_delay_and_plots_are_beside_the_table(tmp_path):
    path = tmp_path / "results.jsonl"
    World().sweep(small(profiles=["cable"]), path)
    [table, *plots] = plot_results([path], tmp_path / "made" / "table.md")
    headings = [line.split(", ")[-2] for line in table.read_text().splitlines() if line.startswith("## small")]
    assert headings == ["no delay", "profiles"]
    assert [path.name for path in plots] == ["table-throughput.png", "table-share.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)


def test_congestion_control_of_earlier_results_is_what_was_in_force_or_unknown(rows):
    for row in rows:
        del row["point"]["congestion_control"]
    rows[0]["calibration"] = None
    assert setting_of(rows[0]).congestion_control == "unknown"
    rows[1]["calibration"] = {"network": {"backend": "tun", "congestion_control": "bbr"}}
    assert setting_of(rows[1]).congestion_control == "bbr"


def test_committed_results_of_an_earlier_version_can_still_be_plotted(tmp_path):
    [table, *pictures] = plot_results([EARLIER], tmp_path / "table.md")
    assert "cubic" in table.read_text()
    assert [path.name for path in pictures] == ["table-throughput.png"]


def test_losses_are_drawn_for_real_compute(rows, tmp_path):
    real = copy.deepcopy(rows[:2])
    for row in real:
        row["point"]["compute"] = "real"
        row["share_of_bound"] = None
        row["steps"] = [{"step": n, "seconds": 1.0, "loss": 5.0 / n} for n in range(1, 12)]
    names = [path.name for path in draw_plots(real, tmp_path / "out")]
    assert names == ["out-throughput.png", "out-loss.png"]
