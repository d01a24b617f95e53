"""Each kind of damage is refused with its own reason; and streams that a decoder accepts."""

import itertools

import numpy as np
import pytest
import torch
from support.stream_mutations import mutated

from tahq.errors import CodecError
from tahq.quant import get_codec
from tahq.quant.aqsgd.stream import AqsgdLayout

SHAPE = (3, 5, 13)  # 15 tokens: a bit is left over; 65 codes a sample: seven places are
IDS = [4, 9, 2]


def noise(seed):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def ends():
    """Sender and receiver that have seen samples 4 and 2, and the next stream, in which sample 9 is new."""
    sender, receiver = get_codec("aqsgd"), get_codec("aqsgd")
    x = noise(0)[:2]
    receiver.decode(sender.encode(x, sample_ids=[4, 2]), x.shape, sample_ids=[4, 2])
    return receiver, sender.encode(noise(1), sample_ids=IDS)


LAYOUT = AqsgdLayout.of(get_codec("aqsgd").spec, SHAPE, [False, True, False])
AT = {name: section.start for name, section in LAYOUT.sections.by_name.items()}
END = {name: section.stop for name, section in LAYOUT.sections.by_name.items()}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 2, r"byte 0 \(version\) is 2, expected 1"),
        (1, 2, r"byte 1 \(flags\) is 2, expected 0"),
        (1, 1, "flag for non-finite values does not agree"),
        (2, 8, r"byte 2 \(bits\) is 8, expected 4"),
        (3, 0, r"byte 3 \(records\) is 0, expected 1"),
        (4, 9, "bytes 4 to 15 must be zero"),
        (15, 9, "bytes 5 to 15 must be zero"),
        (AT["records"], 7, "sample 6 where sample 4 is due"),
        (AT["records"] + 8, 2, "sample 4 differently: the sender after 2 visits"),
        (AT["records"] + 12, None, "sample 4 differently"),
        (AT["marks"], 1, "flag for non-finite values does not agree"),
        (END["marks"] - 1, 0x80, "bits behind the marks or the codes"),
        (END["marks"], 1, "padding after a section"),
        (AT["scale"] + 1, 0x7C, "a scale is not finite"),
        (AT["scale"] + 1, 0x7E, "a scale is not finite"),
        (AT["scale"] + 1, 0xBC, "a scale is negative"),
        (END["scale"], 1, "padding after a section"),
        (AT["values"] + 1, 0x7E, "a value is not finite"),
        (AT["values"] + 1, 0xFC, "a value is not finite"),
        (END["planes"] - 1, 0xFF, "bits behind the marks or the codes"),
        (END["planes"], 1, "padding after a section"),
    ],
)
def test_damaged_byte_is_refused(place, value, message):
    receiver, buf = ends()
    assert buf.numel() == LAYOUT.sections.nbytes
    new = int(buf[place]) ^ 1 if value is None else value
    assert buf[place] != new
    buf[place] = new
    with pytest.raises(CodecError, match=message):
        receiver.decode(buf, SHAPE, sample_ids=IDS)


def test_a_marked_token_decodes_to_nan_whatever_its_codes_are():
    receiver, buf = ends()
    buf[1] = 1
    buf[AT["marks"]] = 0b00100001  # token 0 of sample 4, token 0 of sample 9
    got = receiver.decode(buf, SHAPE, sample_ids=IDS)
    assert got.isnan().any(dim=-1).flatten().nonzero().flatten().tolist() == [0, 5]
    assert receiver.state_tensors()["received/visits"].tolist() == [1, 2]  # of 4 and 2; 9 is still new


def test_a_header_alone_is_checked_too():
    codec = get_codec("aqsgd")
    buf = codec.encode(torch.empty(2, 0, 4), sample_ids=[0, 1])
    buf[1] = 1
    with pytest.raises(CodecError, match="without elements is flagged"):
        codec.decode(buf, (2, 0, 4), sample_ids=[0, 1])


@pytest.mark.parametrize("spec", ["aqsgd", "aqsgd:cache=none"])
@pytest.mark.parametrize("shape", [(10**12, 8), (10**12, 10**12, 10**12), (1, 10**12, 8)], ids=str)
def test_a_stream_that_is_too_short_is_refused_before_samples_are_counted_out(spec, shape):
    codec = get_codec(spec)
    buf = codec.encode(torch.ones(2, 8))
    with pytest.raises(CodecError, match="the shape needs"):
        codec.decode(buf, shape)


@pytest.mark.parametrize("spec", ["aqsgd", "aqsgd:cache=none"])
def test_many_samples_without_elements_take_no_memory(spec):
    codec, shape = get_codec(spec), (10**12, 0)
    assert codec.decode(codec.encode(torch.empty(shape)), shape).shape == shape


@pytest.mark.parametrize("ids", [IDS, None], ids=["samples", "anonymous"])
def test_mutated_streams_are_refused_or_decoded_and_poison_nothing(ids):
    receiver, original = ends()
    if ids is None:
        original = receiver.encode(noise(1))
    state = {name: tensor.clone() for name, tensor in receiver.state_tensors().items()}
    sections = [(0, 16), (16, AT["marks"]), (AT["marks"], AT["values"]), (0, original.numel())]
    batches = mutated(original[None].numpy(), sections, np.random.default_rng(3))
    refused, count = 0, 300
    for damaged in itertools.islice(itertools.chain.from_iterable(batches), count):
        receiver.load_state(state.keys(), state.__getitem__, SHAPE[1:])
        buf = torch.from_numpy(damaged.copy())
        try:
            back = receiver.decode(buf, SHAPE, sample_ids=ids)
        except CodecError:
            refused += 1
            after = receiver.state_tensors()
            assert all(torch.equal(state[name], after[name]) for name in state)
        else:
            assert receiver.has_non_finite(buf) == (not back.isfinite().all())
            assert receiver.state_tensors()["received/entries/00000"].isfinite().all()
    assert refused > count / 4
