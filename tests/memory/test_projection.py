"""The basis in INT4: packing, what it is off by, and what it takes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.memory.galore.subspace import FullProjection, Int4Projection, new_projection, pack, unpack

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 15), min_size=1, max_size=70))
def test_codes_are_packed_two_a_byte_and_come_back(codes):
    tensor = torch.tensor(codes, dtype=torch.uint8)
    packed = pack(tensor)
    assert packed.numel() == (len(codes) + 1) // 2
    assert unpack(packed, len(codes)).tolist() == codes


def test_the_first_of_two_has_the_low_half():
    assert pack(torch.tensor([1, 2, 3], dtype=torch.uint8)).tolist() == [0x21, 0x03]


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 85), (16, 64), (33, 129)])
def test_every_element_is_within_half_a_step(shape):
    basis = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    projection = Int4Projection(shape, CPU)
    projection.assign(basis)
    flat, error = basis.flatten(), (projection.decoded(torch.float32) - basis).flatten().abs()
    for first in range(0, flat.numel(), 256):
        group = flat[first : first + 256].double()
        width = float(group.max().clamp(min=0) - group.min().clamp(max=0))
        # the step is up to 2⁻⁷ larger than a fifteenth for being rounded up to bf16
        assert float(error[first : first + 256].max()) <= width / 15 * 0.5 * (1 + 2**-7) + 1e-6


def test_a_basis_takes_half_a_byte_a_number_and_three_for_256():
    projection = new_projection("int4", (64, 256), CPU)
    assert sum(tensor.nbytes for tensor in projection.tensors().values()) == 64 * 128 + 3 * 64


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_unquantised_bases_are_kept_as_they_are(kind):
    basis = torch.randn(4, 9).bfloat16().float()
    projection = new_projection(kind, (4, 9), CPU)
    assert isinstance(projection, FullProjection)
    projection.assign(basis)
    assert torch.equal(projection.decoded(torch.float32), basis)
