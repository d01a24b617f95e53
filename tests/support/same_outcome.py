"""Two decoders of one codec give the same values, to the bit, or refuse with the same words."""

import torch

from tahq.errors import CodecError
from tahq.quant import get_codec


def bits_of(values):
    """Values as whole numbers, with one pattern for every NaN."""
    whole = values.clone()
    whole[whole.isnan()] = torch.nan
    return whole.view(torch.int32 if whole.dtype == torch.float32 else torch.int16)


def assert_same_outcome(spec, shape, buf):
    """The `cpu` backend decodes `buf` to the reference's values, or raises CodecError with the same message."""
    theirs, ours = (_outcome(get_codec(spec, backend=backend), shape, buf) for backend in ("reference", "cpu"))
    assert type(theirs) is type(ours)
    assert torch.equal(bits_of(theirs), bits_of(ours)) if isinstance(theirs, torch.Tensor) else theirs == ours


def _outcome(codec, shape, buf):
    try:
        return codec.decode(buf, shape)
    except CodecError as error:
        return str(error)
