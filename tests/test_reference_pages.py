"""The reference pages are what .ci/reference.py writes, and every key of cluster.yaml has a description."""

import inspect
import re

import pytest
from reference import CONFIGURATION, pages, sections

from tahq.typed_yaml.positions import parse_yaml

SECTIONS = dict(sections())


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_page_is_what_the_code_says(path, pytestconfig):
    written = pages()[path]
    if pytestconfig.getoption("--rewrite-golden"):
        path.write_text(written, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == written, "write it again: python .ci/reference.py"


@pytest.mark.parametrize(("section", "model"), SECTIONS.items(), ids=SECTIONS)
def test_every_key_has_a_description(section, model):
    missing = [key for key, field in model.model_fields.items() if not field.description]
    where = f"{inspect.getsourcefile(model)}, class {model.__name__}"
    assert not missing, f"{section}.{missing[0]} needs a description: a docstring below the field in {where}"
    assert model.__doc__, f"{section} needs a docstring, the introduction of its table: {where}"


def test_a_union_of_a_word_and_machines_is_a_section():
    assert {"hosts", "emulate.pairs", "wire.follow.guard"} <= SECTIONS.keys()


EXAMPLES = re.findall(r"^Example: (.+)$", CONFIGURATION.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("example", [text for line in EXAMPLES for text in re.findall("`([^`]+)`", line)])
def test_examples_name_only_known_keys(example):
    ((section, value),) = parse_yaml(example).value.items()
    for keys in _entries(section, value):
        assert set(keys) <= set(SECTIONS[section].model_fields)


def _entries(section, value):
    """What has the section's keys: the value itself, or each of many."""
    if section in ("emulate.pairs", "hosts"):
        return value
    return value.values() if section == "emulate.hosts" else [value]
