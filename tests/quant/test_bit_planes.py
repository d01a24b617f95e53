import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.quant import bit_planes


def random_codes(*shape, high=256):
    return torch.randint(high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_plane_k_holds_bit_k_of_every_channel():
    codes = random_codes(5, 64)
    planes = bit_planes.to_planes(codes)
    for tile in range(5):
        for k in range(8):
            for channel in range(64):
                bit = int(planes[tile, k, channel // 8]) >> channel % 8 & 1
                assert bit == int(codes[tile, channel]) >> k & 1


@pytest.mark.parametrize("group", [8, 64, 256])
@pytest.mark.parametrize("tiles", [0, 1, 7])
def test_planes_come_back_as_codes(tiles, group):
    codes = random_codes(tiles, group)
    kept = codes.clone()
    filled = bit_planes.empty_planes(tiles, group, codes.device)
    filled.copy_(bit_planes.to_planes(codes))
    assert torch.equal(bit_planes.from_planes(filled), kept)
    assert torch.equal(codes, kept)


@given(
    width=st.integers(1, 8),
    data=st.data(),
)
def test_packed_numbers_are_the_little_endian_integer_of_their_bits(width, data):
    numbers = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=40))
    packed = bit_planes.pack_numbers(torch.tensor(numbers, dtype=torch.uint8), width)
    whole = sum(number << width * place for place, number in enumerate(numbers))
    assert bytes(packed.tolist()) == whole.to_bytes(-(-len(numbers) * width // 8), "little")
    back, left = bit_planes.unpack_numbers(packed, len(numbers), width)
    assert back.tolist() == numbers
    assert left.tolist() == [0] * (-len(numbers) * width % 8)
