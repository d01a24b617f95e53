"""tahq.typed_yaml.positions: what YAML means here, and where it stands."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.typed_yaml.positions import YamlError, parse_yaml, plain_scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-3", 1e-3), ("1.0e-3", 1e-3), (".5", 0.5), ("1e3", 1000.0), ("-.inf", -math.inf), ("9" * 5000, math.inf)),
        *(("012", 12), ("0o17", 15), ("0x1F", 31), ("-7", -7)),
        *(("true", True), ("False", False), ("~", None), ("", None)),
        *((text, text) for text in ("off", "no", "y", "12:30", "2024-01-01", "1f1b", "1_000", "100mbit")),
    ],
)
def test_plain_scalar_follows_the_core_schema_of_yaml_1_2(text, value):
    got = plain_scalar(text)
    assert (got, type(got)) == (value, type(value))
    assert math.isnan(plain_scalar(".nan"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: '1e-3'", {"a": "1e-3"}),
        ('a: "true"', {"a": "true"}),
        ("a: |\n  5\n", {"a": "5\n"}),
        ("1: a\ntrue: b\nnull: c", {"1": "a", "true": "b", "null": "c"}),
        ("# only a comment\n", None),
        ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
    ],
)
def test_quoted_text_blocks_keys_and_aliases(text, value):
    assert parse_yaml(text).value == value


def test_lines_are_those_of_keys_and_list_items():
    document = parse_yaml("a: 1\n\nb:\n  c:\n    5\n  d: [6,\n    7]\n")
    assert document.lines == {
        (): 1, ("a",): 1, ("b",): 3, ("b", "c"): 4, ("b", "d"): 6, ("b", "d", 0): 6, ("b", "d", 1): 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: 2\na: 3", 3, "a is given twice; the first is in line 1"),
        ("a:\n\tb: 1", 2, "a tab cannot indent"),
        ("a: 1\nb: [1, 2", 2, "not valid YAML"),
        ("a: 1\nb: &x [*x]", 2, "contain itself"),
        ("a: *nowhere", 1, "undefined alias"),
        ("a: !!python/object:os.system x", 1, "not supported"),
        ("b: &b {c: 1}\na: {<<: *b}", 2, "merge keys"),
        ("a: 1\n[1, 2]: 3", 2, "a key must be text"),
        ("a: 1\n---\nb: 2", 2, "expected a single document"),
        ("a: 1\nb: \x07", 2, "U+0007"),
        ("[" * 1500, 1, "nested too deeply"),
    ],
)
def test_malformed_yaml_is_refused_with_its_line(text, line, message):
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    assert caught.value.line == line
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_aliases_cannot_grow_without_bound():
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(YamlError, match="more than 100000 values"):
        parse_yaml("\n".join(levels))
    with pytest.raises(YamlError, match="more than 20 values"):
        parse_yaml("\n".join(levels[:2]), max_values=20)


@given(st.text())
def test_any_text_is_read_or_refused_with_a_line(text):
    line_ends = sum(map(text.count, "\n\r\x85\u2028\u2029"))
    try:
        lines = [parse_yaml(text).lines.get((), 1)]
    except YamlError as error:
        lines = [error.line]
    # PyYAML ends a text that lacks one with a line end of its own.
    assert all(1 <= line <= line_ends + 2 for line in lines)
