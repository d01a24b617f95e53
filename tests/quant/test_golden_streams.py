"""Streams from when their version was fixed: new code must write the same bytes and read the same values."""

import hashlib

import pytest
import torch
from support.codec_backends import device_of, every_backend
from support.golden_cases import CASES, whole_number_values

from tahq.quant import get_codec
from tahq.quant.tah import reference as tah_reference
from tahq.quant.tah.stream import TahLayout

KEY = 0x0123456789ABCDEF


def written(spec, shape, stream, values):
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    rows = [bytes(stream[i : i + 16].tolist()).hex(" ") for i in range(0, stream.numel(), 16)]
    return "\n".join([f"spec {spec}", f"shape {list(shape)}", f"sha256 of the decoded fp32 values {digest}", *rows, ""])


def check(name, backend, device, golden):
    spec, shape = CASES[name]
    codec = get_codec(spec, backend=backend)
    x = whole_number_values(shape, not_finite="not_finite" in name).to(device)
    stream = codec.encode(x, key=KEY)
    values = codec.decode(stream, shape, key=KEY).cpu()
    values[values.isnan()] = torch.nan  # one pattern for all, whatever the machine propagates
    golden(f"streams/{name}.txt", written(codec.spec, shape, stream.cpu(), values))


@every_backend
@pytest.mark.parametrize("name", CASES)
def test_stream_and_decoded_values_are_golden(name, backend, golden):
    check(name, backend, device_of(backend), golden)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_reference_on_cuda_is_golden(name, golden):
    check(name, "reference", torch.device("cuda"), golden)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("tah") and name != "tah_empty"])
def test_entropies_in_the_golden_inputs_are_equal_or_apart(name):
    """So that every backend must select the same tiles, however it sums."""
    spec, shape = CASES[name]
    layout = TahLayout.of(get_codec(spec).spec, shape)
    tiles = layout.tiling.split(whole_number_values(shape, not_finite=False))
    entropies = tah_reference.entropy_(tiles.abs().reshape(layout.num_allocs, -1)).view(shape[0], -1)
    gaps = entropies.sort(dim=1).values.diff(dim=1)
    assert ((gaps == 0) | (gaps > 1e-5)).all()
