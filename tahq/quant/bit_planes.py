"""Codes of 2 to 8 bits to bit planes and back, eight channels at a time.

Eight codes of one byte each are an 8×8 matrix of bits; transposed, its byte k holds bit k of all
eight, bit j being channel j. The transposition is its own inverse, so the same three steps pack and
unpack, on any device, without a table and without a wasted bit.
"""

import torch

# (distance, mask) of the three rounds of block swaps in an 8×8 bit transposition: 1×1, 2×2, 4×4 blocks.
_ROUNDS = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))


def transpose_bits_(words: torch.Tensor) -> torch.Tensor:
    """Transpose, in place, each int64 taken as an 8×8 matrix of bits (byte i = row i).

    `>>` copies the sign bit into the top 7, 14 or 28 bits, which every mask clears.
    """
    for distance, mask in _ROUNDS:
        swapped = (words >> distance).bitwise_xor_(words).bitwise_and_(mask)
        words.bitwise_xor_(swapped)
        words.bitwise_xor_(swapped.bitwise_left_shift_(distance))
    return words


def to_planes(codes: torch.Tensor) -> torch.Tensor:
    """Bit planes of uint8 codes [T, G]: a view [T, 8, G/8] of fresh memory, plane k holding bit k.

    Bit j of byte i of a plane is channel 8i + j.
    """
    tiles, group = codes.shape
    words = transpose_bits_(codes.clone().view(torch.int64))
    return words.view(torch.uint8).view(tiles, group // 8, 8).transpose(1, 2)


def empty_planes(tiles: int, group: int, device: torch.device) -> torch.Tensor:
    """Planes [T, 8, G/8] of zeros to be filled, in the memory layout that `from_planes` takes."""
    return torch.zeros(tiles, group // 8, 8, dtype=torch.uint8, device=device).transpose(1, 2)


def from_planes(planes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [T, G] of planes as `empty_planes` made them; the planes' memory is overwritten."""
    tiles, _, num_bytes = planes.shape
    words = planes.transpose(1, 2).view(tiles, num_bytes * 8).view(torch.int64)
    return transpose_bits_(words).view(torch.uint8)


def pack_numbers(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 numbers [N] below 2^width, one after the other, least significant bit first: ⌈N·width/8⌉ bytes."""
    places = torch.arange(width, dtype=torch.uint8, device=numbers.device)
    bits = ((numbers.unsqueeze(1) >> places) & 1).flatten()
    whole = torch.nn.functional.pad(bits, (0, -bits.numel() % 8))
    return to_planes(whole.view(-1, 8))[:, 0, 0]


def unpack_numbers(packed: torch.Tensor, count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The uint8 numbers [count] of `pack_numbers`, and the bits (0 or 1) left over in the last byte."""
    planes = empty_planes(packed.numel(), 8, packed.device)
    planes[:, 0, 0] = packed
    bits = from_planes(planes).flatten()
    places = torch.arange(width, dtype=torch.uint8, device=packed.device)
    numbers = (bits[: count * width].view(count, width) << places).sum(dim=1, dtype=torch.uint8)
    return numbers, bits[count * width :]
