"""docs/reference/configuration.md names every key of the models, with its default, and no other."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from tahq.comm.config import MachineConfig
from tahq.comm.network_config import HostChanges, PairConfig
from tahq.config.cluster import ClusterConfig
from tahq.memory.config import (
    AdamW8bitConfig,
    AdamWBf16Config,
    AgoqConfig,
    CoatConfig,
    Fp8AdamWConfig,
    Fp8Config,
    QGaLoreConfig,
)
from tahq.quant.config import FollowConfig, GuardConfig
from tahq.typed_yaml.positions import parse_yaml
from tahq.units import WRITTEN_BY_HAND

DOC = (Path(__file__).parents[1] / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| (`[^|]*`|\*required\*) \| ([^|]+) \|$", re.MULTILINE)
SECTIONS: dict[str, type[BaseModel]] = {
    name: MachineConfig if name == "hosts" else field.annotation for name, field in ClusterConfig.model_fields.items()
} | {
    "training.fp8_adamw": Fp8AdamWConfig,
    "training.fp8": Fp8Config,
    "memory.agoq": AgoqConfig,
    "memory.coat": CoatConfig,
    "training.adamw8bit": AdamW8bitConfig,
    "training.adamw_bf16": AdamWBf16Config,
    "training.qgalore": QGaLoreConfig,
    "wire.follow": FollowConfig,
    "wire.follow.guard": GuardConfig,
    "links.hosts": HostChanges,
    "links.pairs": PairConfig,
}


def rows(section: str) -> dict[str, str]:
    """Default cell by key of a section's table."""
    start = DOC.index(f"\n## {section}\n")
    end = DOC.find("\n## ", start + 1)
    return {key: default for key, _, default, _ in ROW.findall(DOC[start : end if end > 0 else None])}


@pytest.mark.parametrize("section", SECTIONS)
def test_section_documents_exactly_its_keys_in_order_with_their_defaults(section):
    model, documented = SECTIONS[section], rows(section)
    assert list(documented) == list(model.model_fields)
    optional = {name for name, field in model.model_fields.items() if not field.is_required()}
    written = model.model_construct().model_dump(mode="json", context=WRITTEN_BY_HAND, include=optional)
    assert {key: parse_yaml(documented[key].strip("`")).value for key in optional} == written
    assert {documented[key] for key in model.model_fields.keys() - optional} <= {"*required*"}


def test_every_row_is_read_by_these_tests():
    lines = [line for line in DOC.splitlines() if line.startswith("| `")]
    assert len(lines) == sum(len(rows(section)) for section in SECTIONS)


@pytest.mark.parametrize("example", re.findall(r"Example: `(.+?)`(?: or `(.+?)`)?$", DOC, re.MULTILINE))
def test_examples_name_only_known_keys(example):
    for text in filter(None, example):
        ((section, value),) = parse_yaml(text).value.items()
        for keys in _entries(section, value):
            assert set(keys) <= set(SECTIONS[section].model_fields)


def _entries(section, value):
    """What has the section's keys: the value itself, or each of many."""
    if section == "links.pairs":
        return value
    return value.values() if section == "links.hosts" else [value]
