"""sweep.yaml, its points, the results' file, tables and plots."""

import copy
import json
import re
from pathlib import Path

import pytest
from support.sweeps import World, small

from tahq.errors import ConfigError, UserError
from tahq_netem.sweep.points import by_network_kind, sweep_points
from tahq_netem.sweep.report import draw_plots, plot_results, sweep_report
from tahq_netem.sweep.results import ResultFile, read_results
from tahq_netem.sweep.spec import load_sweep, split_wire

# -- sweep.yaml -----------------------------------------------------------------------------------

TEXT = """\
name: test
model: {family: gpt2, num_layers: 4, hidden_size: 64, num_heads: 2}
stages: 4
compute: {forward: 73ms, backward: 152ms}
rates: [unshaped, 100mbit]
round_trips: [0, 50ms]
runtimes:
  - {name: tahq, wires: ["raw:dtype=fp16", "tah / fixed:bits=6"]}
  - {name: torch, schedules: [gpipe, 1f1b]}
"""
RESULTS = Path(__file__).parents[2] / "netem" / "results"


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load_text(text):
        Path("sweep.yaml").write_text(text)
        return load_sweep(Path("sweep.yaml"))

    return load_text


def test_file_is_read_with_units_and_single_values(load):
    config = load(TEXT)
    assert config.rates == [None, 100e6]
    assert config.round_trips == [0.0, 0.05]
    assert config.stages == [4]
    assert config.compute[0].of(3) == (0.073, 0.152)
    assert len(sweep_points(config)) == 4 * (2 + 2)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rates:", "rate:", ("sweep.yaml:5", "rate", "did you mean rates?")),
        ("100mbit", "100", ("sweep.yaml:5", "needs a unit")),
        ("100mbit", "unshaped", ("is listed twice",)),
        ("stages: 4", "stages: 8", ("8 stages", "num_layers is 4")),
        ("tah /", "tahq /", ("sweep.yaml:8", "tahq")),
        ("fixed:bits=6", "fixed / raw", ("expected one codec, or two",)),
        ("schedules: [gpipe, 1f1b]", "schedules: [1f1b-deep]", ("torch has the schedules gpipe, 1f1b",)),
        ("schedules: [gpipe, 1f1b]", "wires: [tah]", ("torch sends only raw:dtype=fp32 or raw:dtype=bf16; got tah",)),
        ("tah / fixed:bits=6", "auto", ("wire auto is chosen under schedule auto only",)),
        ("name: tahq,", "name: tahq, schedules: auto, in_flight: 4,", ("in_flight is chosen under schedule auto",)),
        ("name: torch", "name: deepspeed", ("sweep.yaml:9", "tahq", "torch", "bare")),
        ("compute: {forward: 73ms, backward: 152ms}", "compute: fast", ("sweep.yaml:4", "real", "calibrated")),
        ("stages: 4", "stages: 4\nmicro_batches: [3]", ("global_batch 32", "3")),
        ("stages: 4", "stages: [", ("sweep.yaml:",)),
        ("stages: 4\ncompute: {forward: 73ms", "stages: [2, 4]\ncompute: {forward: [1s, 2s]", ("single number of",)),
    ],
)
def test_mistake_is_one_line_that_names_the_place(load, old, new, said):
    with pytest.raises(ConfigError) as caught:
        load(TEXT.replace(old, new))
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in said)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("raw", ("raw:dtype=fp32", "raw:dtype=fp32")),
        ("tah:group=64 / fixed:bits=6", ("tah", "fixed:bits=6")),
        ("aqsgd / fixed:bits=8", ("aqsgd:bits=4", "fixed:bits=8")),
    ],
)
def test_wire_is_written_the_same_however_it_was_given(text, pair):
    assert split_wire(text) == pair


@pytest.mark.parametrize(
    ("name", "num_points"),
    [("four_stages", 7 * 3 * 7), ("four_stages_cubic", 1 * 3 * 4), ("two_stages", 3 * 2 * 3 * 2)],
)
def test_sweeps_that_come_along_are_sound(name, num_points):
    assert len(sweep_points(load_sweep(RESULTS / f"{name}.yaml"))) == num_points


# -- points ---------------------------------------------------------------------------------------


def ids(config):
    return [point.id for point in sweep_points(config)]


def test_every_combination_is_there_once_and_networks_are_shared_by_points_that_need_the_same():
    config = small(micro_batches=[1, 2], stages=[2, 4], compute=["real", "calibrated"], round_trips=[0.0, 0.05])
    points = sweep_points(config)
    assert len({(point.session, point.network) for point in points}) == len({*ids(config)}) == len(points) == 2**6
    kinds = by_network_kind(points)
    assert len(kinds) == 4
    for kind in kinds:
        assert len({(point.session.stages, point.network.round_trip_s) for point in kind}) == 1


def test_ids_depend_on_the_measurement_alone():
    # A change here makes users measure everything again: is it meant?
    assert ids(small())[:2] == ["70d09eee647d62e1", "59ffaac2d80d944b"]
    assert set(ids(small(rates=[20e6]))) < set(ids(small(rates=[100e6, 20e6, None], name="other", timeout=5.0)))
    base = set(ids(small()))
    for changes in (
        {"seq_len": 64},
        {"micro_batches": [1, 2]},  # durations are those of the first size
        {"global_batch": 16},
        {"compute": [{"forward": 0.01, "backward": 0.03}]},
        {"congestion_control": "bbr"},
        {"backend": "tun"},
        {"steps": {"at_least": 3, "at_most": 3}},
        {"faults": [{"step": 1, "link": "host0", "what": "rate", "to": "1mbit"}]},
        {"model": {"family": "gpt2", "num_layers": 4, "hidden_size": 128, "num_heads": 2}},
    ):
        assert not base & set(ids(small(**changes)))


def test_ids_change_with_the_profile_behind_a_name(tmp_path):
    path = tmp_path / "line.yaml"
    path.write_text("title: ours\nsource: [us]\nhost: {up: 20mbit, down: 100mbit}\n")
    config = small(profiles=[str(path)])
    before = ids(config)
    path.write_text("title: ours\nsource: [us]\nhost: {up: 20mbit, down: 50mbit}\n")
    assert sum(one != other for one, other in zip(before, ids(config), strict=True)) == 2


def test_sleep_is_scaled_to_micro_batch_and_share_of_the_model():
    config = small(micro_batches=[2, 4], stages=[2, 4])
    naps = {(p.session.stages, p.session.micro_batch): p.session.forward_s for p in sweep_points(config)}
    assert naps == {(2, 2): (0.01,) * 2, (2, 4): (0.02,) * 2, (4, 2): (0.005,) * 4, (4, 4): (0.01,) * 4}


# -- the results' file ----------------------------------------------------------------------------


def row(id, status="done", **more):
    return {"id": id, "status": status, "point": {}, **more}


def test_rows_are_read_back_and_the_newest_of_a_point_counts(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    with ResultFile(path) as file:
        file.append(row("a", "failed", error="no"))
        file.append(row("b"))
        assert not file.is_done("a")
        file.append(row("a"))
        with pytest.raises(ConfigError, match="another sweep"):
            ResultFile(path)
    with path.open("a") as torn:
        torn.write('{"id": "c", "sta')
    with ResultFile(path) as file:
        assert [file.is_done(id) for id in "abc"] == [True, True, False]
        file.append(row("d"))
    assert len(path.read_text().splitlines()) == 4
    assert list(read_results(path)) == ["a", "b", "d"]


@pytest.mark.parametrize("text", ["not json\n", "[1]\n", '{"step": 1}\n'])
def test_file_of_other_content_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:1: not a sweep's result"):
        ResultFile(path)
    assert path.read_text() == text
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        read_results(tmp_path / "none.jsonl")


def test_result_or_table_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "results.jsonl"):
        with pytest.raises(UserError, match="cannot write"):
            ResultFile(path)
        with pytest.raises(UserError, match="cannot write"):
            plot_results([RESULTS / "two_stages.jsonl"], path)


# -- tables and plots -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "results.jsonl"
    World().sweep(small(rates=[20e6, None, 100e6], round_trips=[0.0, 0.05]), path)
    return path.read_text().splitlines()


@pytest.fixture
def rows(measured):
    return list(map(json.loads, measured))


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


def test_failed_points_are_listed_and_real_points_compared_with_sleeping(rows):
    real = copy.deepcopy(rows)
    for each in real:
        each["point"]["compute"] = "real"
        each["tokens_per_s"] /= 0.97
    failed = {**rows[0], "status": "failed", "error": "RuntimeLostError: gone"}
    report = sweep_report([*rows, *real, failed])
    assert report.count("-3.0%") == len(rows)
    assert report.partition("## Not measured")[2].count("RuntimeLostError: gone") == 1
    assert sweep_report([]).startswith("# no results")


def test_congestion_controls_and_sweeps_are_kept_apart(rows):
    others = copy.deepcopy(rows)
    for each in others:
        each["point"]["congestion_control"] = "bbr"
    report = sweep_report([*rows, *others])
    assert len(table_rows(report, "tahq")) == 8
    assert report.count("no delay, cubic") == report.count("no delay, bbr") == 1
    assert "## other: " in sweep_report([*rows, *(each | {"sweep": "other"} for each in others)])


@pytest.mark.acceptance
def test_profiles_are_apart_from_networks_without_delay_and_plots_are_beside_the_table(tmp_path):
    path = tmp_path / "results.jsonl"
    World().sweep(small(profiles=["cable"]), path)
    [table, *plots] = plot_results([path, RESULTS / "two_stages.jsonl"], tmp_path / "made" / "table.md")
    headings = [line.split(", ")[-2] for line in table.read_text().splitlines() if line.startswith("## small")]
    assert headings == ["no delay", "profiles"]
    assert [path.name for path in plots] == ["table-throughput.png", "table-share.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)


@pytest.mark.ci
def test_losses_are_drawn_for_real_compute(rows, tmp_path):
    for each in rows[:2]:
        each["point"]["compute"] = "real"
        each["share_of_bound"] = None
        each["steps"] = [{"step": n, "seconds": 1.0, "loss": 5.0 / n} for n in range(1, 12)]
    names = [path.name for path in draw_plots(rows[:2], tmp_path / "out")]
    assert names == ["out-throughput.png", "out-loss.png"]
