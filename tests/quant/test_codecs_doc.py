"""docs/reference/codecs.md has a section for every codec, and names only specs and commands that there are."""

import re
from pathlib import Path

from tahq.quant import CodecSpec
from tahq.quant.inspection import codec_summaries

DOC = (Path(__file__).parents[2] / "docs" / "reference" / "codecs.md").read_text(encoding="utf-8")


def test_every_codec_has_a_section():
    assert {*re.findall(r"^## `(\w+)`$", DOC, re.M)} == codec_summaries().keys()


def test_every_spec_in_the_text_is_one():
    names = "|".join(codec_summaries())
    specs = re.findall(rf"[`\"]((?:{names}):[^`\"\s]+)[`\"]", DOC)
    assert len(specs) >= 2
    assert all(CodecSpec.parse(spec) for spec in specs)


def test_parameters_named_in_a_codecs_section_are_its_own():
    for name, text in re.findall(r"^## `(\w+)`\n(.*?)(?=^## )", DOC, re.M | re.S):
        known = CodecSpec.parse(name).parameters().keys()
        assert {*re.findall(r"`(\w+)=", text)} <= known, name
