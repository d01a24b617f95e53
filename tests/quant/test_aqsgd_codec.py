"""Both ends of a cut under AQ-SGD stay equal to the bit in any order of visits, and report it if they do not."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.errors import CodecError, SnapshotError
from tahq.quant import get_codec
from tahq.quant.aqsgd import reference as aqsgd_reference
from tahq.quant.aqsgd.codec import AqsgdCodec
from tahq.quant.aqsgd.stream import AqsgdLayout, Record, read_records

S, C = 3, 20
NUM_SAMPLES = 12


def noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def micro_batch(ids, seed=0, spread=0.1):
    """Activations [B, S, C] of these samples: fixed values per sample, a little different for each seed."""
    return torch.stack([noise(1000 + i, S, C) for i in ids]) + spread * noise(seed, len(ids), S, C)


class Cut:
    """A sender and a receiver, and what crossed between them."""

    def __init__(self, spec="aqsgd"):
        self.sender, self.receiver = get_codec(spec), get_codec(spec)
        self.streams = []

    def send(self, x, ids):
        self.streams.append(self.sender.encode(x, sample_ids=ids))
        return self.receiver.decode(self.streams[-1], x.shape, x.dtype, sample_ids=ids)

    def visit(self, ids, seed=0):
        return self.send(micro_batch(ids, seed), ids)

    @property
    def memories(self):
        """What either end remembers, by names without the end's."""
        ends = (self.sender.state_tensors(), self.receiver.state_tensors())
        return tuple({name.partition("/")[2]: tensor.clone() for name, tensor in end.items()} for end in ends)

    def assert_agreed(self):
        sent, received = self.memories
        assert sent.keys() == received.keys()
        assert all(torch.equal(sent[name], received[name]) for name in sent)

    def remembered(self, sample_id):
        _, received = self.memories
        place = received["ids"].tolist().index(sample_id)
        return received["entries/00000"][place]


class Model:
    """AQ-SGD as its definition has it, one sample at a time, in a dict."""

    def __init__(self, bits):
        self.bits = bits
        self.memory = {}

    def visit(self, x, ids):
        known = [row for row, i in enumerate(ids) if i in self.memory]
        out = {row: aqsgd_reference.to_fp16(x[row]) for row in range(len(ids)) if row not in known}
        if known:
            m = torch.stack([self.memory[ids[row]] for row in known])
            coded = aqsgd_reference.quantize(x[known] - m.float(), self.bits)
            after = aqsgd_reference.advance(m, aqsgd_reference.dequantize(*coded, self.bits))
            out |= dict(zip(known, after, strict=True))
        self.memory |= {i: out[row] for row, i in enumerate(ids)}
        return torch.stack([out[row] for row in range(len(ids))])


@given(
    visits=st.lists(st.lists(st.integers(0, NUM_SAMPLES - 1), min_size=1, max_size=5), min_size=1, max_size=12),
    bits=st.integers(2, 8),
    cache=st.sampled_from(["memory", "file"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_order_of_visits_gives_what_the_definition_says_at_both_ends(visits, bits, cache, dtype):
    cut, model = Cut(f"aqsgd:bits={bits},cache={cache}"), Model(bits)
    for step, ids in enumerate(visits):
        x = micro_batch(ids, step).to(dtype)
        assert torch.equal(cut.send(x, ids), model.visit(x.float(), ids).to(dtype))
    cut.assert_agreed()
    assert {i: cut.remembered(i).tolist() for i in model.memory} == {i: m.tolist() for i, m in model.memory.items()}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("visited", [False, True])
def test_a_sample_that_is_not_finite_poisons_nothing(bad, visited):
    cut, clean = Cut(), Cut()
    for pair in (cut, clean):
        pair.visit([0, 1, 2] if visited else [1, 2])
    x = micro_batch([0, 1], seed=1)
    spoiled = x.clone()
    spoiled[0, 1, 3] = bad
    got = cut.send(spoiled, [0, 1])
    assert cut.sender.has_non_finite(cut.streams[-1])
    assert got[0, 1].isnan().all()
    assert got[[0, 0, 1, 1, 1], [0, 2, 0, 1, 2]].isfinite().all()
    assert cut.memories[0]["ids"].tolist() == clean.memories[0]["ids"].tolist()
    assert cut.memories[0]["visits"].tolist() == ([1, 2, 1] if visited else [2, 1])
    if visited:
        assert torch.equal(cut.remembered(0), clean.remembered(0))
    assert not cut.visit([0, 1, 2], seed=2).isnan().any()
    assert not cut.sender.has_non_finite(cut.streams[-1])
    cut.assert_agreed()


def test_without_sample_ids_samples_are_sent_whole_and_nothing_is_remembered():
    cut = Cut()
    cut.visit([0, 1])
    before = cut.memories
    x = micro_batch([0, 1], seed=1)
    assert torch.equal(cut.send(x, None), x.half().float())
    for kept, now in zip(before, cut.memories, strict=True):
        assert all(torch.equal(kept[name], now[name]) for name in kept)
    assert read_records(cut.sender.spec, x.shape, cut.streams[-1]) == (Record(),) * 2


def test_without_a_cache_ids_do_not_matter():
    codec, x = get_codec("aqsgd:cache=none"), micro_batch([0, 1])
    assert not codec.is_stateful
    streams = [codec.encode(x), codec.encode(x, sample_ids=[0, 1]), codec.encode(x, sample_ids=[7, 7])]
    assert all(torch.equal(stream, streams[0]) for stream in streams)
    assert streams[0].numel() == codec.encoded_nbytes(x.shape) == codec.revisit_nbytes(x.shape)
    assert codec.state_nbytes == 0 == codec.predicted_state_nbytes(x.shape, 100)
    scale, codes = aqsgd_reference.quantize(x, 4)
    assert torch.equal(codec.decode(streams[0], x.shape), aqsgd_reference.dequantize(scale, codes, 4))


@pytest.mark.parametrize("visits", [0, 1])
def test_a_visit_that_one_end_missed_is_noticed_at_the_next(visits):
    cut = Cut()
    if visits:
        cut.visit([0, 5])
    cut.sender.encode(micro_batch([5], seed=1), sample_ids=[5])
    message = rf"sample 5 differently: the sender after {visits + 1} visits .* this end after {visits} visits"
    with pytest.raises(CodecError, match=message):
        cut.visit([0, 5] if visits else [5], seed=2)


def test_a_memory_that_changed_is_noticed_by_its_checksum():
    cut = Cut()
    cut.visit([0, 1])
    cut.receiver.state_tensors()["received/entries/00000"][1, 2, 3] += 0.01
    assert cut.visit([0], seed=1) is not None
    with pytest.raises(CodecError, match=r"sample 1 differently: the sender after 1 visits .* resume the run"):
        cut.visit([1], seed=1)


@pytest.mark.parametrize(
    ("sent", "due", "message"),
    [
        ([0, 2], [0, 1], "stream of sample 2 where sample 1 is due"),
        ([1, 0], [0, 1], "stream of sample 1 where sample 0 is due"),
        (None, [0, 1], "a sample without an id where sample 0 is due"),
        ([0, 1], None, "sample 0 where a sample without an id is due"),
    ],
)
def test_a_stream_of_other_samples_than_are_due_is_refused(sent, due, message):
    cut, x = Cut(), micro_batch([0, 1])
    stream = cut.sender.encode(x, sample_ids=sent)
    with pytest.raises(CodecError, match=message):
        cut.receiver.decode(stream, x.shape, sample_ids=due)


@pytest.mark.parametrize("ids", [[0], [0, 1, 2], [0, -1], [0, 2**63], []])
def test_there_is_an_id_for_each_sample(ids):
    with pytest.raises(CodecError, match="2 samples need as many sample ids"):
        get_codec("aqsgd").encode(micro_batch([0, 1]), sample_ids=ids)


def test_samples_of_another_shape_are_refused():
    codec = get_codec("aqsgd")
    codec.encode(noise(0, 2, 3, 8), sample_ids=[0, 1])
    with pytest.raises(CodecError, match=r"remembers samples of shape \[3, 8\], got one of \[3, 9\]"):
        codec.encode(noise(0, 2, 3, 9), sample_ids=[0, 1])


@given(
    st.integers(0, 200), st.integers(0, 3), st.integers(0, 9), st.integers(2, 8), st.sampled_from(["memory", "none"])
)
def test_the_longest_stream_is_found_among_the_last_few_splits(samples, tokens, channels, bits, cache):
    codec, shape = get_codec(f"aqsgd:bits={bits},cache={cache}"), (samples, tokens, channels)
    splits = range(samples + 1 if cache == "memory" else 1)
    longest = max(
        AqsgdLayout.of(codec.spec, shape, [True] * whole + [False] * (samples - whole)).sections.nbytes
        for whole in splits
    )
    assert codec.encoded_nbytes(shape) == longest


def test_memory_and_bits_are_those_of_the_paper():
    cut = Cut()
    for start in range(0, NUM_SAMPLES, 4):
        cut.visit(range(start, start + 4))
    cut.visit(range(4), seed=1)
    assert cut.streams[-1].numel() == cut.sender.revisit_nbytes((4, S, C))
    expected = NUM_SAMPLES * S * C * 2
    assert cut.sender.state_nbytes == cut.receiver.state_nbytes == expected
    assert cut.sender.predicted_state_nbytes((4, S, C), NUM_SAMPLES) == expected
    # GPT-2 XL, 1,024 tokens × 1,600 channels: 6.55 MB per sample for both ends; 4 bits and a scale per channel later
    assert 2 * cut.sender.predicted_state_nbytes((1, 1024, 1600), 1) == 6_553_600
    bits = 8 * cut.sender.revisit_nbytes((2, 1024, 1600)) / (2 * 1024 * 1600)
    assert bits == pytest.approx(4 + 16 / 2048, abs=1e-3)


def saved(codec: AqsgdCodec):
    return {name: tensor.clone() for name, tensor in codec.state_tensors().items()}


@pytest.mark.parametrize(("old", "new"), [("memory", "memory"), ("memory", "file"), ("file", "memory")])
def test_a_cut_goes_on_from_saved_state_as_if_it_had_never_stopped(old, new):
    whole, before, after = Cut(f"aqsgd:cache={old}"), Cut(f"aqsgd:cache={old}"), Cut(f"aqsgd:cache={new}")
    for seed, ids in enumerate([[0, 1], [2, 0], [3, 3]]):
        whole.visit(ids, seed)
        before.visit(ids, seed)
    for source, target in ((before.sender, after.sender), (before.receiver, after.receiver)):
        state = saved(source)
        assert target.load_state(state.keys(), state.__getitem__, (S, C))
    for seed, ids in enumerate([[0, 3], [4, 2], [1, 0]], start=10):
        assert torch.equal(after.visit(ids, seed), whole.visit(ids, seed))
        assert torch.equal(after.streams[-1], whole.streams[-1])
    ours, theirs = saved(after.sender), saved(whole.sender)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_state_of_samples_of_another_length_is_left():
    cut, other = Cut(), get_codec("aqsgd")
    cut.visit([0, 1])
    state = saved(cut.sender)
    assert not other.load_state(state.keys(), state.__getitem__, (S + 1, C))
    assert not other.load_state([], state.__getitem__, (S, C))
    assert other.state_nbytes == 0
    other.encode(noise(0, 1, S + 1, C), sample_ids=[0])


@pytest.mark.parametrize("damage", ["ids", "visits", "entries/00000"])
def test_state_whose_parts_do_not_fit_is_refused(damage):
    cut, other = Cut(), get_codec("aqsgd")
    cut.visit([0, 1])
    state = saved(cut.sender)
    state[f"sent/{damage}"] = state[f"sent/{damage}"][:1]
    with pytest.raises(SnapshotError, match="resume from another checkpoint"):
        other.load_state(state.keys(), state.__getitem__, (S, C))


@pytest.mark.gpu
def test_a_sender_on_cuda_and_a_receiver_on_the_cpu_stay_agreed():
    cut, here = Cut(), Cut()
    rng = random.Random(1)
    for seed in range(20):
        ids = [rng.randrange(NUM_SAMPLES) for _ in range(4)]
        x = micro_batch(ids, seed)
        expected = here.send(x, ids)
        stream = cut.sender.encode(x.cuda(), sample_ids=ids)
        assert stream.is_cuda
        assert torch.equal(stream.cpu(), here.streams[-1])
        assert torch.equal(cut.receiver.decode(stream.cpu(), x.shape, sample_ids=ids), expected)
    cut.assert_agreed()


def test_streams_of_three_visits_are_golden(golden):
    cut = Cut()
    index = torch.arange(3 * S * C, dtype=torch.int64)
    base = ((index * index * 2654435761 + index * 40503) % 2097143 - 1048571).float().view(3, S, C) * 2.0**-18
    rows = []
    for step, ids in enumerate([[0, 1, 2], [2, 5, 0], [5, 2, 2]]):
        cut.send(base + step * base.flip(1) * 2.0**-4, ids)
        rows += [f"samples {ids}", *(bytes(part.tolist()).hex(" ") for part in cut.streams[-1].split(16))]
    golden("streams/aqsgd_visits.txt", "\n".join([f"spec {cut.sender.spec}", f"shape {[3, S, C]}", *rows, ""]))
