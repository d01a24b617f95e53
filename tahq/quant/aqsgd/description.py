"""What an AQ-SGD stream holds, for `tahq codec inspect`.

Where its sections lie depends on which samples are sent whole, which its records say.
"""

from collections.abc import Sequence

import torch

from tahq.quant.aqsgd.stream import NO_ID, VERSION, AqsgdLayout, Record, grid, read_records, sections_of, unpack
from tahq.quant.description import FLAGS, Description, HeaderByte, Statistics, step_statistics
from tahq.quant.description import version as version_byte
from tahq.quant.spec import AqsgdSpec
from tahq.quant.stream import Sections
from tahq.quant.tiling import check_shape


def _records(spec: AqsgdSpec, shape: Sequence[int], buf: torch.Tensor) -> tuple[Record, ...]:
    """Of every sample; without a cache there are none, and no sample is sent whole."""
    return read_records(spec, shape, buf) if spec.has_cache else ()


def _layout(spec: AqsgdSpec, shape: Sequence[int], buf: torch.Tensor) -> AqsgdLayout:
    is_whole = [record.visits == 0 for record in _records(spec, shape, buf)]
    num_samples = 0 if 0 in shape else grid(shape)[0]
    return AqsgdLayout.of(spec, shape, is_whole or [False] * num_samples)


def _sections(spec: AqsgdSpec, shape: Sequence[int], buf: torch.Tensor) -> Sections:
    if not spec.has_cache:  # the stream may be of another shape: nothing is made for each sample of this one
        return sections_of(spec, check_shape(shape), num_whole=0)
    return _layout(spec, shape, buf).sections


def _statistics(spec: AqsgdSpec, shape: Sequence[int], buf: torch.Tensor) -> Statistics:
    layout, records = _layout(spec, shape, buf), _records(spec, shape, buf)
    if layout.is_empty:
        return {"samples": layout.grid[0]}
    parts = unpack(layout, buf)
    return {
        "samples": layout.grid[0],
        "samples sent whole": len(layout.rows(whole=True)),
        "samples without an id": sum(record.sample_id == NO_ID for record in records),
        "most visits of a sample": max((record.visits for record in records), default=0),
        "tokens that are not finite": int(parts.marks.sum()),
        **step_statistics(parts.scale.double() / 2 ** (spec.bits - 1)),
    }


AQSGD = Description(
    summary="AQ-SGD: what changed since the sample's last visit, a scale a channel",
    header=(
        version_byte(VERSION),
        FLAGS,
        HeaderByte("bits", 2, 8, "of a code"),
        HeaderByte("records", 0, 1, "1: a record a sample follows"),
    ),
    contents={
        "records": "a sample's id + 1, its visits, a checksum of what is remembered",
        "marks": "a bit a token, 1 = not finite",
        "scale": "fp16 a channel, the largest change",
        "values": "fp16, samples that are sent whole",
        "planes": "codes of the changes of the others, lowest bits first",
    },
    sections=_sections,
    statistics=_statistics,
)
