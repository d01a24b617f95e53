"""Gaussian-optimal quantisers: Lloyd-Max levels of N(0, 1) for 1 to 8 bits, and their distortions.

A quantiser of b bits has 2^(b−1) magnitudes and their negatives. Each magnitude is the mean of the Gaussian over its
cell, and cells meet half-way between magnitudes (S. P. Lloyd, Least squares quantization in PCM, 1982; J. Max, 1960).
The numbers are literals, since a solver's last digits depend on the machine; each is exact in fp32. Both ends must
agree on them to the bit, and streams of version 1 fix them forever.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

MAX_BITS = 8
MAX_MAGNITUDES = 1 << (MAX_BITS - 1)

DISTORTIONS = (0.3633802, 0.1174818, 0.03454776, 0.009501008, 0.002504668, 0.0006442397, 0.0001634782, 4.118508e-05)
"""D_b = E(z − ẑ)² of 1 to 8 bits, for z of variance 1."""

# fmt: off
MAGNITUDES: tuple[tuple[float, ...], ...] = (
    (0.7978846,),
    (0.45278004, 1.5104176),
    (0.24509418, 0.7560053, 1.3439093, 2.1519456),
    (0.12839504, 0.3880483, 0.65675914, 0.94234043, 1.2562312, 1.6180464, 2.0690172, 2.7325895),
    (
        0.06588966, 0.19805183, 0.3313783, 0.4666995, 0.6049336, 0.7471357, 0.8945651, 1.0487833,
        1.2118044, 1.3863404, 1.576228, 1.7872332, 2.0287285, 2.3177395, 2.6911197, 3.2607324,
    ),
    (
        0.033409506, 0.10027829, 0.1672969, 0.23456699, 0.30219284, 0.37028265, 0.43894967, 0.5083138,
        0.578503, 0.6496556, 0.7219219, 0.7954677, 0.8704766, 0.94715494, 1.0257363, 1.1064882,
        1.1897202, 1.2757945, 1.365141, 1.4582764, 1.5558312, 1.6585889, 1.7675419, 1.8839773,
        2.0096111, 2.1468103, 2.2989812, 2.471305, 2.6722739, 2.9174068, 3.240437, 3.7441013,
    ),
    (
        0.01682817, 0.050490864, 0.08417264, 0.11788628, 0.15164465, 0.18546072, 0.21934764, 0.25331873,
        0.28738755, 0.32156795, 0.35587403, 0.3903203, 0.42492166, 0.45969343, 0.49465147, 0.5298122,
        0.56519264, 0.6008105, 0.6366843, 0.6728333, 0.70927787, 0.74603915, 0.78313965, 0.82060295,
        0.8584542, 0.89671993, 0.9354285, 0.97461, 1.0142967, 1.0545232, 1.0953267, 1.1367474,
        1.1788286, 1.2216175, 1.2651651, 1.3095276, 1.3547662, 1.4009485, 1.448149, 1.49645,
        1.5459437, 1.5967331, 1.6489339, 1.702677, 1.7581115, 1.8154078, 1.8747625, 1.9364046,
        2.0006018, 2.0676715, 2.1379933, 2.2120275, 2.2903392, 2.3736343, 2.4628115, 2.5590405,
        2.6638865, 2.7795143, 2.9090471, 3.0572462, 3.231933, 3.4474304, 3.7349367, 4.189694,
    ),
    (
        0.008446193, 0.025339384, 0.042234983, 0.059134603, 0.07603986, 0.092952356, 0.10987372, 0.12680559,
        0.14374956, 0.16070732, 0.17768049, 0.19467075, 0.21167976, 0.2287092, 0.24576078, 0.26283622,
        0.27993724, 0.2970656, 0.31422305, 0.3314114, 0.34863243, 0.365888, 0.38317996, 0.40051022,
        0.41788065, 0.4352932, 0.45274988, 0.47025266, 0.4878036, 0.5054048, 0.5230583, 0.5407663,
        0.55853105, 0.5763547, 0.5942396, 0.6121881, 0.6302026, 0.6482855, 0.6664394, 0.68466675,
        0.70297027, 0.72135264, 0.7398166, 0.75836504, 0.77700084, 0.795727, 0.8145467, 0.833463,
        0.8524793, 0.8715989, 0.8908253, 0.91016203, 0.92961293, 0.9491818, 0.9688726, 0.98868936,
        1.0086365, 1.0287182, 1.0489392, 1.0693042, 1.0898181, 1.110486, 1.1313132, 1.1523054,
        1.1734682, 1.1948076, 1.2163299, 1.2380418, 1.2599499, 1.2820615, 1.304384, 1.3269253,
        1.3496937, 1.3726976, 1.3959464, 1.4194493, 1.4432166, 1.4672587, 1.491587, 1.5162132,
        1.5411496, 1.5664098, 1.5920075, 1.6179578, 1.6442765, 1.6709803, 1.6980875, 1.7256169,
        1.7535894, 1.7820269, 1.8109531, 1.8403933, 1.8703752, 1.900928, 1.9320842, 1.9638784,
        1.9963485, 2.0295358, 2.0634851, 2.0982466, 2.1338742, 2.1704283, 2.2079754, 2.24659,
        2.2863545, 2.3273618, 2.3697171, 2.4135387, 2.4589622, 2.5061426, 2.5552595, 2.6065214,
        2.660174, 2.7165077, 2.7758706, 2.8386858, 2.905473, 2.9768822, 3.053742, 3.1371326,
        3.2285001, 3.3298485, 3.4440718, 3.575588, 3.7316663, 3.9256377, 4.1865954, 4.6035357,
    ),
)
# fmt: on
"""The positive levels of 1 to 8 bits, ascending."""


def magnitude_table() -> NDArray[np.float32]:
    """Row b: the 2^(b−1) magnitudes of b bits, filled up with zeros; [9, 128], row 0 unused."""
    table = np.zeros((MAX_BITS + 1, MAX_MAGNITUDES), np.float32)
    for bits, magnitudes in enumerate(MAGNITUDES, start=1):
        table[bits, : len(magnitudes)] = magnitudes
    return table


def threshold_table() -> NDArray[np.float32]:
    """Row b: the 2^(b−1) − 1 borders between magnitudes of b bits, fp32(l + l′)·½; [9, 127], row 0 unused.

    Rows are filled up with fp32's largest number, which times any step except 0 is above every magnitude.
    """
    table = np.full((MAX_BITS + 1, MAX_MAGNITUDES - 1), np.finfo(np.float32).max, np.float32)
    for bits, magnitudes in enumerate(MAGNITUDES, start=1):
        levels = np.array(magnitudes, np.float32)
        table[bits, : len(magnitudes) - 1] = (levels[:-1] + levels[1:]) * np.float32(0.5)
    return table


def level_table() -> NDArray[np.float32]:
    """Row b: the levels of the codes 0 to 2^b − 1 of b bits, ascending; [9, 256], row 0 and the rest zeros."""
    table = np.zeros((MAX_BITS + 1, 2 * MAX_MAGNITUDES), np.float32)
    for bits, magnitudes in enumerate(MAGNITUDES, start=1):
        levels = np.array(magnitudes, np.float32)
        table[bits, : 2 * len(levels)] = np.concatenate((-levels[::-1], levels))
    return table


@dataclass(frozen=True, slots=True)
class CodedTiles:
    """The content of a stream of `eden` or `wf` with T tiles; coded is x·2^e, e without dimensions.

    `scale`, uint8 [T], has codes of `small_scale`, 255 where a value is not finite; `width`, int32 [T], the bits of
    `codes`, uint8 [T, G]; `mean`, fp16 [M·G], each channel's mean of x·2^e, 0 in padding; None without centring.
    """

    exponent: torch.Tensor
    scale: torch.Tensor
    width: torch.Tensor
    codes: torch.Tensor
    mean: torch.Tensor | None = None


def magnitude_indices(magnitude: torch.Tensor, step: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """m of each value: how many thresholds of its tile's bits, times its tile's step, it exceeds; int32 [T, G].

    Magnitudes are fp32 [T, G], not negative and finite, steps fp32 [T], widths int32 [T]. Where the step is 0, all
    thresholds are: 0 for a value of 0, the last index for others.
    """
    borders = _on(magnitude.device, threshold_table)[width] * step.unsqueeze(-1)
    count = torch.searchsorted(borders, magnitude, out_int32=True)
    return torch.minimum(count, _num_magnitudes(width) - 1)


def magnitudes_of(index: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Level magnitudes fp32 [T, G] of indices m [T, G] in tiles of `width` bits [T]."""
    table = _on(index.device, magnitude_table)
    place = index + table.shape[1] * width.unsqueeze(-1)
    return table.view(-1).index_select(0, place.view(-1)).view(index.shape)


def signed_codes(z: torch.Tensor, index: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """uint8 codes [T, G] of values z whose magnitudes have these indices."""
    half = _num_magnitudes(width)
    return torch.where(z >= 0, half + index, half - 1 - index).to(torch.uint8)


def levels_of(codes: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Signed levels fp32 [T, G] of uint8 codes [T, G] in tiles of `width` bits [T]."""
    table = _on(codes.device, level_table)
    place = codes.to(torch.int32) + table.shape[1] * width.unsqueeze(-1)
    return table.view(-1).index_select(0, place.view(-1)).view(codes.shape)


def _num_magnitudes(width: torch.Tensor) -> torch.Tensor:
    """2^(b−1), int32 [T, 1]."""
    return (torch.ones_like(width) << width - 1).unsqueeze(-1)


@cache
def _on(device: torch.device, make: Callable[[], NDArray[np.float32]]) -> torch.Tensor:
    """A table on a device, to which it is copied once: a copy from host memory synchronises."""
    return torch.from_numpy(make()).to(device)
