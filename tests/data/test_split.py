"""The split: disjoint, complete, by the data alone; and windows within it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.data.dataset import Region, WindowIndex, split_records, split_tokens

shares = st.floats(0, 0.99)


@given(num_tokens=st.integers(0, 10**10), validation=shares)
def test_regions_are_disjoint_and_cover_everything(num_tokens: int, validation: float) -> None:
    training, held_out = split_tokens(num_tokens, validation)
    regions = sorted((*training, *held_out), key=lambda region: (region.start, region.stop))
    assert regions[0].start == 0
    assert regions[-1].stop == num_tokens
    assert all(left.stop == right.start for left, right in pairwise(regions))


@given(num_tokens=st.integers(0, 10**10), validation=shares)
def test_share_held_out_is_what_was_asked_for(num_tokens: int, validation: float) -> None:
    held_out = sum(region.stop - region.start for region in split_tokens(num_tokens, validation)[1])
    # each of at most 16 stripes rounds its share down, and one more for the rounding of its edges
    assert -32 <= held_out - num_tokens * validation <= 16


def test_small_data_holds_out_its_end_and_large_data_the_end_of_sixteen_stripes() -> None:
    assert [len(split_tokens(n, 0.05)[1]) for n in (100, 2_000_000, 10_000_000, 10**9)] == [1, 1, 7, 16]


def test_zero_validation_trains_on_everything() -> None:
    assert split_tokens(1000, 0.0) == ((Region(0, 1000),), ())


@given(num_tokens=st.integers(2, 300_000), validation=shares, seq_len=st.integers(20, 400))
def test_windows_never_share_a_label_or_an_input_across_the_split(
    num_tokens: int, validation: float, seq_len: int
) -> None:
    seen = np.zeros((2, num_tokens), dtype=np.int64)  # by split: 1 for inputs and 1 for labels
    for uses, regions in zip(seen, split_tokens(num_tokens, validation), strict=True):
        index = WindowIndex(regions, seq_len)
        for start in map(index.start, range(len(index))):
            assert start + seq_len < num_tokens
            uses[start : start + seq_len] += 1
            uses[start + 1 : start + seq_len + 1] += 1
    assert seen.max(initial=0) <= 2  # an input once, a label once
    assert not (seen[0] * seen[1]).any()


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_region_has_windows_of_seq_len_and_one_label(length: int, expected: int) -> None:
    assert Region(5, 5 + length).num_windows(8) == expected


@given(num_records=st.integers(0, 3000), validation=shares)
def test_records_held_out_are_as_many_as_asked_for_and_evenly_spread(num_records: int, validation: float) -> None:
    held_out = split_records(num_records, validation)
    assert len(held_out) == round(num_records * validation)
    if len(held_out):
        gaps = np.diff(np.concatenate([[-1], held_out]))
        assert gaps.min() > 0
        assert gaps.max() - gaps.min() <= 1
        assert held_out[-1] == num_records - 1
