"""AQ-SGD's arithmetic in plain torch: the change of a sample's activation, one scale per channel, symmetric codes.

Both ends remember m, the activation last sent for a sample, and update it alike: m ← fp16(m + Q(x − m)).
The quantiser is that of the authors' code: s is a channel's largest magnitude over the micro-batch, in fp16;
q = round(δ/(s + 10^−6)·2^(b−1)), clamped to −2^(b−1) … 2^(b−1) − 1; Q = q/2^(b−1)·s. So the largest positive
change always clips, by one code, and changes far below 10^−6 are lost: no power of two scales the tensor here.

Deviations, where the authors' code gives infinities or lets the two ends drift apart:
- s and m are kept within ±65,504, so that nothing finite becomes infinite;
- δ/(s + 10^−6) is computed in fp32 (the authors add 10^−6 in fp16, where it vanishes above s = 0.004);
- what is decoded is the *rounded* m, the very number that both ends remember (theirs is m before rounding).

Single IEEE operations, none of them fused, so every device gives the same bits.

Shape letters: B samples, S tokens, C channels; F of the samples are sent whole, K = B − F as changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FP16_MAX = torch.finfo(torch.float16).max
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class AqsgdParts:
    """The content of a stream, except for its records.

    `marks`, bool [B, S], are tokens that are not finite; `scale` is fp16 [C], empty if no sample is sent as a change;
    `values`, fp16 [F, S, C], are samples sent whole, `codes`, uint8 [K, S, C], changes.
    """

    marks: torch.Tensor
    scale: torch.Tensor
    values: torch.Tensor
    codes: torch.Tensor


def encode_samples(x: torch.Tensor, is_whole: Sequence[bool], memory: torch.Tensor | None, bits: int) -> AqsgdParts:
    """Quantise fp32 [B, S, C]; a token that is not finite is sent as no change, or as zeros, and marked.

    `memory` is m of the samples that are sent as changes, fp16 [K, S, C]; None stands for zeros.
    """
    marks = ~x.isfinite().all(dim=-1)
    tokens = x.masked_fill(marks.unsqueeze(-1), 0.0)
    whole, changed = (_take(tokens, _rows(is_whole, wanted)) for wanted in (True, False))
    if memory is not None:
        marked = _take(marks, _rows(is_whole, False)).unsqueeze(-1)
        changed = (changed - memory.float()).masked_fill_(marked, 0.0)
    if changed.numel():
        scale, codes = quantize(changed, bits)
    else:
        scale, codes = changed.new_empty(0, dtype=torch.float16), changed.to(torch.uint8)
    return AqsgdParts(marks, scale, to_fp16(whole), codes)


def decode_samples(parts: AqsgdParts, is_whole: Sequence[bool], memory: torch.Tensor | None, bits: int) -> torch.Tensor:
    """The values of all samples as both ends have them afterwards, [B, S, C]: fp16, or fp32 if `memory` is not used."""
    if not parts.codes.numel():
        return parts.values
    change = dequantize(parts.scale, parts.codes, bits)
    changed = change if memory is None else advance(memory, change)
    if not parts.values.numel():
        return changed
    order = torch.tensor([*_rows(is_whole, True), *_rows(is_whole, False)]).argsort().to(changed.device)
    return torch.cat((parts.values, changed))[order]


def _rows(is_whole: Sequence[bool], wanted: bool) -> list[int]:
    return [row for row, whole in enumerate(is_whole) if whole == wanted]


def _take(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of x. All rows, or no rows, are taken without an index, whose copy would wait for the device."""
    if len(rows) in (0, len(x)):
        return x[: len(rows)]
    return x[torch.tensor(rows, device=x.device)]


def to_fp16(x: torch.Tensor) -> torch.Tensor:
    """fp32 to fp16, rounded to nearest even; finite values beyond ±65,504 become ±65,504."""
    return x.clamp(-FP16_MAX, FP16_MAX).half()


def quantize(change: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """s, fp16 [C], and q + 2^(b−1), uint8 [K, S, C], of changes: fp32 [K, S, C], finite, with at least one element.

    Example:
        With b = 4 and one channel, changes −1, 0.5 and 1 have s = 1 and q = −8, 4 and 7 (8 clips).
    """
    scale = to_fp16(change.abs().amax(dim=(0, 1)))
    half = 1 << bits - 1
    codes = (change / (scale.float() + EPSILON)).mul_(half).round_().clamp_(-half, half - 1)
    return scale, codes.add_(half).to(torch.uint8)


def dequantize(scale: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Q = q/2^(b−1)·s, fp32 [K, S, C]: exact, for s has 11 significant bits and q at most 8."""
    half = 1 << bits - 1
    return codes.float().sub_(half).div_(half).mul_(scale.float())


def advance(memory: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """The next m = fp16(m + Q), fp16 [K, S, C]: added in fp32, then rounded."""
    return to_fp16(memory.float() + change)
