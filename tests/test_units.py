import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tahq.units import (
    WRITTEN_BY_HAND,
    Duration,
    Rate,
    Section,
    Size,
    format_rate,
    format_size,
    parse_duration,
    parse_rate,
    parse_size,
    write_duration,
    write_rate,
    write_size,
)


class Quantities(Section):
    rate: Rate | None = None
    delay: Duration = 0.0
    piece: Size = 1024
    count: int = 1
    choice: bool | None = None
    value: float = 1.0


RATES = {"100mbit": 1e8, "1.5gbit": 1.5e9, "300 Mbit/s": 3e8, "9600bit": 9600.0, "1e3kbit": 1e6, 2.5: 2.5}
DURATIONS = {"20ms": 0.02, "1.5s": 1.5, "2min": 120.0, "1h": 3600.0, "50us": 5e-5, 0: 0.0, "0s": 0.0}
SIZES = {"64KiB": 65536, "1MB": 10**6, "1.5kB": 1500, "2GiB": 2**31, 512: 512, "7b": 7}


@pytest.mark.parametrize(("parse", "values"), [(parse_rate, RATES), (parse_duration, DURATIONS), (parse_size, SIZES)])
def test_quantity_is_read_with_its_unit(parse, values):
    assert {text: parse(text) for text in values} == values


@pytest.mark.parametrize(
    ("parse", "message", "values"),
    [
        (parse_rate, "a rate must be", ["fast", "100", "100 mb", "-5mbit", "1,5mbit", "mbit", "", "100 Mbps", "0mbit"]),
        (parse_rate, "needs a unit, such as 100mbit", [100, True, None, [1]]),
        (parse_duration, "a duration must be", [-1.0, math.nan, math.inf, "1e999s", "-1s", "5s/s"]),
        (parse_size, "a size must be", ["1.5b", -1, "0.3kx", "1e999GB", "10gb/s"]),
    ],
    ids=["rate", "rate without unit", "duration", "size"],
)
def test_malformed_quantity_is_refused_with_what_was_got(parse, message, values):
    for value in values:
        with pytest.raises(ValueError, match=message) as caught:
            parse(value)
        assert repr(value) in str(caught.value)


@given(st.floats(min_value=1e-9, max_value=1e15, allow_nan=False), st.integers(0, 2**53))
def test_written_quantity_reads_back_to_the_same_number(number, nbytes):
    assert parse_rate(write_rate(number)) == number
    assert parse_duration(write_duration(number)) == number
    assert parse_size(write_size(nbytes)) == nbytes


def test_quantities_are_written_in_the_shortest_unit_and_shown_with_three_digits():
    assert [write_rate(1e8), write_rate(2.5e9), write_rate(9600.0)] == ["100mbit", "2.5gbit", "9600bit"]
    assert [write_duration(0.02), write_duration(0.0), write_duration(90.0)] == ["20ms", "0s", "90s"]
    assert [write_size(262144), write_size(1000), write_size(1023)] == ["256kib", "1kb", "1023b"]
    sizes = {0: "0 B", 999: "999 B", 1250: "1.25 kB", 1.25e6: "1.25 MB", 2e12: "2000 GB"}
    rates = {95.6e6: "95.6 Mbit/s", 12.0: "12 bit/s", 1.5e9: "1.5 Gbit/s", 999.9e6: "1000 Mbit/s"}
    assert {nbytes: format_size(nbytes) for nbytes in sizes} == sizes
    assert {rate: format_rate(rate) for rate in rates} == rates


def test_section_takes_bare_floats_from_python_only_and_is_dumped_as_numbers_or_by_hand():
    with pytest.raises(ValidationError, match="needs a unit"):
        Quantities.model_validate({"rate": 1e8}, context=WRITTEN_BY_HAND)
    section = Quantities(rate=1e8, delay="20ms", piece="64KiB")
    numbers = section.model_dump(mode="json")
    assert (numbers["rate"], numbers["delay"], numbers["piece"]) == (1e8, 0.02, 65536)
    by_hand = section.model_dump(mode="json", context=WRITTEN_BY_HAND)
    assert (by_hand["rate"], by_hand["delay"], by_hand["piece"]) == ("100mbit", "20ms", "64kib")
    assert Quantities.model_validate(by_hand, context=WRITTEN_BY_HAND) == section


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"valeu": 2}, "Extra inputs"),
        *(({"value": value}, "finite") for value in (math.nan, math.inf)),
        *(({key: True}, "expected a number; got true") for key in ("count", "rate", "piece", "delay")),
    ],
)
def test_section_is_frozen_and_refuses_unknown_keys_infinite_numbers_and_switches(values, message):
    with pytest.raises(ValidationError, match=message):
        Quantities(**values)
    section = Quantities(choice=True)
    with pytest.raises(ValidationError, match="frozen"):
        section.value = 2.0
