"""AQ-SGD's arithmetic in plain torch: the change of a sample's activation, one scale per channel, symmetric codes.

Both ends remember m, the activation that was last sent for a sample, and move it alike: m ← fp16(m + Q(x − m)).
The quantiser is that of the authors' code: s is a channel's largest magnitude over the micro-batch, in fp16;
q = round(δ/(s + 10^−6)·2^(b−1)), kept in −2^(b−1) … 2^(b−1) − 1; Q = q/2^(b−1)·s. So the largest positive
change always clips, by one code, and changes far below 10^−6 are lost: there is no power of two here.

Deviations, where the authors' code gives infinities or lets the two ends drift apart:
- s and m are kept within ±65,504, so that nothing finite becomes infinite;
- δ/(s + 10^−6) is computed in fp32 (the authors add 10^−6 in fp16, where it vanishes above s = 0.004);
- what is decoded is the *rounded* m, the very number that both ends remember (theirs is m before rounding).

Single IEEE operations, none of them fused, so every device gives the same bits.

Shape letters: N samples, S tokens, C channels.
"""

import torch

FP16_MAX = torch.finfo(torch.float16).max
EPSILON = 1e-6


def to_fp16(x: torch.Tensor) -> torch.Tensor:
    """fp32 to fp16, rounded to nearest even, what is finite kept finite: beyond ±65,504 it becomes ±65,504."""
    return x.clamp(-FP16_MAX, FP16_MAX).half()


def quantize(change: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and codes of what changed.

    Args:
        change: fp32 [N, S, C], finite, with at least one element; not written.
        bits: b, 2 to 8.

    Returns:
        s, fp16 [C], and q + 2^(b−1), uint8 [N, S, C].

    Example:
        With b = 4 and one channel, changes −1, 0.5 and 1 have s = 1 and q = −8, 4 and 7 (8 clips).
    """
    scale = to_fp16(change.abs().amax(dim=(0, 1)))
    half = 1 << bits - 1
    codes = (change / (scale.float() + EPSILON)).mul_(half).round_().clamp_(-half, half - 1)
    return scale, codes.add_(half).to(torch.uint8)


def dequantize(scale: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Q = q/2^(b−1)·s, fp32 [N, S, C], of s fp16 [C] and uint8 codes.

    It is exact, for s has 11 significant bits and q at most 8.
    """
    half = 1 << bits - 1
    return codes.float().sub_(half).div_(half).mul_(scale.float())


def advance(memory: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """The next m = fp16(m + Q), fp16 [N, S, C]: added in fp32, then rounded."""
    return to_fp16(memory.float() + change)
