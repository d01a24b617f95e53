"""Two decoders of one codec give the same values, to the bit, or refuse with the same words."""

import torch

from tahq.errors import CodecError


def bits_of(values):
    """Values as whole numbers, with one pattern for every NaN."""
    whole = values.clone()
    whole[whole.isnan()] = torch.nan
    return whole.view(torch.int32 if whole.dtype == torch.float32 else torch.int16)


def assert_same_outcome(decode_reference, decode, layout, buf):
    """Both decode `buf` to equal values, or both raise CodecError with the same message."""
    theirs, ours = _outcome(decode_reference, layout, buf), _outcome(decode, layout, buf)
    assert type(theirs) is type(ours)
    assert torch.equal(bits_of(theirs), bits_of(ours)) if isinstance(theirs, torch.Tensor) else theirs == ours


def _outcome(decode, layout, buf):
    try:
        return decode(layout, buf, torch.float32)
    except CodecError as error:
        return str(error)
