"""Codecs that remember samples, at a cut: told whose they are in training only, one for each cut, saved by place."""

import logging

import pytest
import torch

from tahq.comm.link.frame import Direction, Purpose
from tahq.comm.link.inproc_transport import InprocPair, VirtualClock
from tahq.errors import LocalProtocolError
from tahq.pipeline.boundary import Boundary, CodecTable, CutIdentity, Stopwatch
from tahq.pipeline.checkpoint.codec_state import codec_ends

SHAPE = (2, 5, 16)
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def sides(activations="aqsgd", gradients="aqsgd:cache=none"):
    pair = InprocPair(VirtualClock())
    return tuple(
        Boundary(
            end, CutIdentity(run=1, seed=3, cut=0), CodecTable(activations, gradients), torch.device("cpu"), Stopwatch()
        )
        for end in pair.transports
    )


def noise(seed):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def cross(lower, upper, step, x, ids, purpose=Purpose.TRAIN):
    upper.post(step, purpose, FORWARD, [0], SHAPE)
    assert lower.send(step, purpose, FORWARD, 0, x, ids)
    return upper.receive(step, purpose, FORWARD, 0, SHAPE, sample_ids=ids)


def ends(lower, upper, block=4):
    (sent,) = codec_ends(lower, block, is_incoming=False)
    (received,) = codec_ends(upper, block, is_incoming=True)
    return sent, received


def test_second_visit_crosses_as_a_change_and_is_counted_by_its_bytes():
    lower, upper = sides()
    x = noise(0)
    assert torch.equal(cross(lower, upper, 0, x, [7, 3]), x.half().float())
    (first,) = lower.transport.take_stats()
    got = cross(lower, upper, 1, x + 0.01, [3, 7])
    (second,) = lower.transport.take_stats()
    assert not torch.equal(got, (x + 0.01).half().float())
    # header, records, marks, values; header, records, marks, scales, codes of 4 bits
    assert first.payload_bytes == 16 + 32 + 16 + 2 * x.numel()
    assert second.payload_bytes == 16 + 32 + 16 + 2 * SHAPE[2] + x.numel() // 2


@pytest.mark.parametrize("purpose", [Purpose.EVAL, Purpose.EVAL_RAW])
def test_evaluation_neither_uses_nor_changes_what_is_remembered(purpose):
    lower, upper = sides()
    cross(lower, upper, 0, noise(0), [7, 3])
    before = {name: tensor.clone() for end in ends(lower, upper) for name, tensor in end.tensors().items()}
    x = noise(1)
    got = cross(lower, upper, 1, x, [7, 3], purpose)
    assert torch.equal(got, x.half().float() if purpose is Purpose.EVAL else x)
    after = {name: tensor for end in ends(lower, upper) for name, tensor in end.tensors().items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_training_without_sample_ids_is_refused_at_both_ends():
    lower, upper = sides()
    with pytest.raises(LocalProtocolError, match="cut 0: aqsgd:bits=4,cache=memory needs the ids"):
        lower.send(0, Purpose.TRAIN, FORWARD, 0, noise(0))
    lower.send(0, Purpose.TRAIN, FORWARD, 0, noise(0), [1, 2])
    upper.post(0, Purpose.TRAIN, FORWARD, [0], SHAPE)
    with pytest.raises(LocalProtocolError, match="needs the ids"):
        upper.receive(0, Purpose.TRAIN, FORWARD, 0, SHAPE)


def test_gradients_through_the_quantiser_alone_need_no_ids():
    lower, upper = sides()
    lower.post(0, Purpose.TRAIN, BACKWARD, [0], SHAPE)
    assert upper.send(0, Purpose.TRAIN, BACKWARD, 0, noise(0))
    assert (lower.receive(0, Purpose.TRAIN, BACKWARD, 0, SHAPE) - noise(0)).norm() < 0.2 * noise(0).norm()
    assert list(lower.codecs.stateful) == [FORWARD]


def test_names_say_the_place_and_the_end():
    lower, upper = sides()
    cross(lower, upper, 0, noise(0), [7, 3])
    sent, received = ends(lower, upper)
    assert sorted(sent.tensors()) == [
        f"codec/block-0004/activations/sent/{name}" for name in ("entries/00000", "ids", "visits")
    ]
    assert sorted(received.tensors())[1] == "codec/block-0004/activations/received/ids"
    assert received.tensors()["codec/block-0004/activations/received/ids"].tolist() == [7, 3]


def test_each_end_takes_its_own_part_of_a_snapshot_and_goes_on():
    lower, upper = sides()
    cross(lower, upper, 0, noise(0), [7, 3])
    snapshot = {name: tensor.clone() for end in ends(lower, upper) for name, tensor in end.tensors().items()}
    lower2, upper2 = sides("aqsgd:cache=file")
    for end in ends(lower2, upper2):
        end.load(snapshot.keys(), snapshot.__getitem__, SHAPE[1:])
        assert end.codec.state_nbytes == 2 * noise(0).numel()  # its own end, not both
    x = noise(1)
    assert torch.equal(cross(lower2, upper2, 1, x, [3, 7]), cross(lower, upper, 1, x, [3, 7]))


@pytest.mark.parametrize(
    ("block", "shape", "message"),
    [(5, SHAPE[1:], "the snapshot has nothing for codec/block-0005"), (4, (6, 16), "samples of another length")],
)
def test_a_cut_that_the_snapshot_does_not_have_starts_anew_with_a_warning(block, shape, message, caplog):
    lower, upper = sides()
    cross(lower, upper, 0, noise(0), [7, 3])
    snapshot = {name: tensor for end in ends(lower, upper) for name, tensor in end.tensors().items()}
    with caplog.at_level(logging.WARNING):
        for end in ends(*sides(), block=block):
            end.load(snapshot.keys(), snapshot.__getitem__, shape)
            assert end.codec.state_nbytes == 0
    assert caplog.text.count(message) == 2
    assert "starts anew there" in caplog.text
