"""sweep.yaml: what it takes, and one line for each mistake."""

from pathlib import Path

import pytest
from support.sweeps import small

from tahq.errors import ConfigError
from tahq_netem.sweep.points import sweep_points
from tahq_netem.sweep.spec import load_sweep, split_wire

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
        (
            "schedules: [gpipe, 1f1b]",
            "wires: [tah]",
            ("torch sends only raw:dtype=fp32 or raw:dtype=bf16; got tah",),
        ),
        ("name: torch", "name: deepspeed", ("sweep.yaml:9", "tahq", "torch", "bare")),
        ("compute: {forward: 73ms, backward: 152ms}", "compute: fast", ("sweep.yaml:4", "real", "calibrated")),
        ("stages: 4", "stages: 4\nmicro_batches: [3]", ("global_batch 32", "3")),
        ("stages: 4", "stages: [", ("sweep.yaml:",)),
    ],
)
def test_mistake_is_one_line_that_names_the_place(load, old, new, said):
    with pytest.raises(ConfigError) as caught:
        load(TEXT.replace(old, new))
    assert "\n" not in str(caught.value)
    for part in said:
        assert part in str(caught.value)


def test_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml does not exist; is it a sweep\.yaml\?"):
        load_sweep(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("raw", ("raw:dtype=fp32", "raw:dtype=fp32")),
        ("fixed", ("fixed:bits=8", "fixed:bits=8")),
        ("tah:group=64 / fixed:bits=6", ("tah", "fixed:bits=6")),
        ("aqsgd / fixed:bits=8", ("aqsgd:bits=4", "fixed:bits=8")),
    ],
)
def test_wire_is_written_the_same_however_it_was_given(text, pair):
    assert split_wire(text) == pair


def test_durations_listed_by_stage_need_one_number_of_stages():
    sleep = {"forward": [0.1, 0.2], "backward": [0.2, 0.4]}
    assert small(compute=[sleep]).compute[0].of(1) == (0.2, 0.4)
    with pytest.raises(ValueError, match="need a single number of stages"):
        small(compute=[sleep], stages=[2, 4])


@pytest.mark.parametrize(
    ("name", "num_points"),
    [("four_stages", 7 * 3 * 6), ("four_stages_cubic", 1 * 3 * 4), ("two_stages", 3 * 2 * 3 * 2)],
)
def test_sweeps_that_come_along_are_sound(name, num_points):
    config = load_sweep(RESULTS / f"{name}.yaml")
    assert config.name == name
    assert len(sweep_points(config)) == num_points
