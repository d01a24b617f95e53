"""docs/dev/netem.md: its table has the keys and defaults of a sweep, and its examples are valid."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from tahq.typed_yaml.positions import parse_yaml
from tahq.units import WRITTEN_BY_HAND
from tahq_netem.network.description import load_profile
from tahq_netem.network.faults import Timeline
from tahq_netem.sweep.points import sweep_points
from tahq_netem.sweep.spec import RuntimeConfig, StepsConfig, SweepConfig, load_sweep

DOC = (Path(__file__).parents[2] / "docs" / "dev" / "netem.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([a-z_.]+)` \| [^|]+ \| (`[^|]*`|\*required\*) \| [^|]+ \|$", re.MULTILINE)
SECTIONS: dict[str, type[BaseModel]] = {"": SweepConfig, "runtimes": RuntimeConfig, "steps": StepsConfig}
LEAST = {
    "": {
        "name": "least",
        "model": {"family": "gpt2", "num_layers": 4, "hidden_size": 64, "num_heads": 2},
        "runtimes": [{"name": "tahq"}],
    },
    "runtimes": {"name": "tahq"},
    "steps": {},
}
"""The required keys of each section."""


def section(title: str) -> str:
    """The text under a heading."""
    start = DOC.index(f"\n## {title}\n")
    return DOC[start : DOC.index("\n## ", start + 1)]


def block(text: str, language: str) -> str:
    """Its first block of code in a language."""
    return re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)[1]


def rows(name: str) -> dict[str, str]:
    """Default cell by key of a section, whose keys stand there as `section.key`."""
    found = dict(ROW.findall(section("Sweeps")))
    prefix = f"{name}." if name else ""
    return {
        key.removeprefix(prefix): default
        for key, default in found.items()
        if key.startswith(prefix) and "." not in key.removeprefix(prefix)
    }


@pytest.mark.parametrize("name", SECTIONS)
def test_table_names_exactly_the_keys_of_a_sweep_in_order(name):
    assert list(rows(name)) == list(SECTIONS[name].model_fields)


@pytest.mark.parametrize("name", SECTIONS)
def test_defaults_in_the_table_are_those_of_a_sweep(name):
    model, least = SECTIONS[name], LEAST[name]
    by_default = model.model_validate(least, context=WRITTEN_BY_HAND)
    for key, default in rows(name).items():
        if model.model_fields[key].is_required():
            assert default == "*required*"
        else:
            said = {**least, key: parse_yaml(default.strip("`")).value}
            assert model.model_validate(said, context=WRITTEN_BY_HAND) == by_default, key


def test_every_row_of_the_table_is_read_by_these_tests():
    lines = [line for line in section("Sweeps").splitlines() if line.startswith("| `")]
    assert len(lines) == sum(len(rows(name)) for name in SECTIONS)


def test_example_is_a_sweep_with_the_documented_number_of_points(tmp_path):
    text = section("Sweeps")
    path = tmp_path / "sweep.yaml"
    path.write_text(block(text, "yaml"), encoding="utf-8")
    assert len(sweep_points(load_sweep(path))) == int(re.search(r"These are (\d+) points", text)[1])


def test_examples_of_faults_and_of_a_profile_are_valid(tmp_path):
    assert len(Timeline.parse(block(section("Faults"), "yaml")).faults) == 4
    compile(block(section("Faults"), "python"), "docs/dev/netem.md", "exec")
    path = tmp_path / "desks.yaml"
    path.write_text(block(section("`tahq-netem run PROFILE -- COMMAND`"), "yaml"), encoding="utf-8")
    assert load_profile(str(path)).host.delay == 0.012
