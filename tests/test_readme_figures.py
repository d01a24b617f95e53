"""README's measured figures are those of the result files that docs/dev/readme-figures.md names."""

import re
from pathlib import Path

import pytest

from tahq.config.file import load_config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/dev/readme-figures.md").read_text(encoding="utf-8")
ROWS = [re.split(r"(?<!\\)\|", line.strip("|")) for line in PAGE.splitlines() if ".md |" in line]
NUMBER = r"\d[\d,]*(?:\.\d+)?"


@pytest.mark.parametrize(("figures", "file", "places", "commit"), ROWS, ids=[row[1].strip() for row in ROWS])
def test_file_has_the_figure_and_readme_says_it(figures, file, places, commit):
    result = (ROOT / "benchmarks/results" / file.strip()).read_text(encoding="utf-8")
    assert file.strip() in README or "stage_memory" in file  # of docs/reference/models.md, which README links
    for number in re.findall(NUMBER, figures):
        assert number in README
    for place in places.split(";"):
        assert re.sub(r" \(.*", "", place.strip()).replace("\\|", "|") in result
    if "not recorded" not in commit:
        assert f"Commit {commit.strip()[:7]}" in result


def test_every_measured_figure_of_readme_is_listed():
    known = set(re.findall(NUMBER, " ".join(row[0] for row in ROWS)))
    measured = re.findall(rf"({NUMBER})(?= (?:times|nats|GiB|tokens/s))|\| ({NUMBER}) (?=\|)", README)
    shares = re.findall(rf"((?:{NUMBER},? )+(?:and )?{NUMBER}) %", README)
    found = {number for pair in measured for number in pair if number} | set(re.findall(NUMBER, " ".join(shares)))
    assert len(found) > 10
    assert found <= known


def test_readme_is_about_more_than_measurements():
    words = sum(len(line.split()) for line in README.splitlines() if "benchmarks/results/" in line)
    assert 0 < words < len(README.split()) / 4


def test_example_of_readme_is_a_configuration_of_at_most_twelve_lines(tmp_path):
    text = README.partition("```yaml\n")[2].partition("```")[0]
    assert len(text.splitlines()) <= 12
    (tmp_path / "cluster.yaml").write_text(text, encoding="utf-8")
    assert load_config(tmp_path / "cluster.yaml").pipeline.stages == 3


def test_every_result_names_its_commit():
    files = [path for folder in ("benchmarks", "netem") for path in (ROOT / folder / "results").glob("*.md")]
    named = re.compile(r"[Cc]ommit (?:[0-9a-f]{7}|not recorded; the file is of [0-9a-f]{7})")
    assert len(files) > 50
    assert [path.name for path in files if not named.search(path.read_text(encoding="utf-8"))] == []
