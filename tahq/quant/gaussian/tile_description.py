"""What the streams of `eden` and `wf` hold, for `tahq codec inspect`: one description each, of the same parts."""

from collections.abc import Sequence

import torch

from tahq.quant.description import FLAGS, LOG2_GROUP, Description, HeaderByte, Statistics, exponent, step_statistics
from tahq.quant.description import version as version_byte
from tahq.quant.eden import stream as eden_stream
from tahq.quant.eden.stream import EdenLayout
from tahq.quant.gaussian.quantizer import CodedTiles
from tahq.quant.gaussian.small_scale import NOT_FINITE, value_of
from tahq.quant.gaussian.tile_stream import MIN_EXPONENT, VERSION
from tahq.quant.spec import EdenSpec, WfSpec
from tahq.quant.stream import Sections
from tahq.quant.wf import stream as wf_stream
from tahq.quant.wf.stream import WfLayout

_CENTER = HeaderByte("center", 0, 1, "1: the means of channels are in the stream")
_SCALE = {"scale": "u8 a tile, a float of 3 bits of mantissa; 255 = not finite"}
_WIDTH = {"width": "3 bits a tile, the bits of its codes less one"}
_MEAN = {"mean": "fp16 a channel, of x·2^e over all tokens"}
_CODES = {"codes": "tile by tile, as many planes as its width"}


def _eden_sections(spec: EdenSpec, shape: Sequence[int], buf: torch.Tensor) -> Sections:
    return EdenLayout.of(spec, shape).sections


def _eden_statistics(spec: EdenSpec, shape: Sequence[int], buf: torch.Tensor) -> Statistics:
    return _tile_statistics(eden_stream.unpack(EdenLayout.of(spec, shape), buf))


def _wf_sections(spec: WfSpec, shape: Sequence[int], buf: torch.Tensor) -> Sections:
    return WfLayout.of(spec, shape).sections


def _wf_statistics(spec: WfSpec, shape: Sequence[int], buf: torch.Tensor) -> Statistics:
    wf = wf_stream.unpack(WfLayout.of(spec, shape), buf)
    if wf.mean is None or not wf.mean.numel():
        return _tile_statistics(wf.tiles)
    largest = torch.ldexp(wf.mean.double().abs().amax(), -wf.tiles.exponent)
    return {**_tile_statistics(wf.tiles), "largest mean of a channel": float(largest)}


def _tile_statistics(tiles: CodedTiles) -> Statistics:
    is_finite = tiles.scale != NOT_FINITE
    steps = torch.ldexp(value_of(tiles.scale[is_finite]).double(), -tiles.exponent)
    return {
        "tiles": tiles.scale.numel(),
        "tiles that are not finite": int((~is_finite).sum()),
        "tiles of zeros": int((tiles.scale == 0).sum()),
        **_width_statistics(tiles.width),
        **step_statistics(steps),
    }


def _width_statistics(width: torch.Tensor) -> Statistics:
    if not width.numel():
        return {}
    return {
        "fewest bits of a code": int(width.min()),
        "bits of a code on average": float(width.double().mean()),
        "most bits of a code": int(width.max()),
    }


EDEN = Description(
    summary="randomised Hadamard, Gaussian-optimal levels, unbiased; for gradients",
    header=(version_byte(VERSION), FLAGS, LOG2_GROUP, exponent(MIN_EXPONENT)),
    contents={**_SCALE, **_WIDTH, **_CODES},
    sections=_eden_sections,
    statistics=_eden_statistics,
)
WF = Description(
    summary="Hadamard, bits where they take away most error of a token; for activations",
    header=(version_byte(VERSION), FLAGS, LOG2_GROUP, _CENTER, exponent(MIN_EXPONENT)),
    contents={**_SCALE, **_WIDTH, **_MEAN, **_CODES},
    sections=_wf_sections,
    statistics=_wf_statistics,
)
