"""What goes into one side of a cut comes out of the other in the right codec, and nothing else is accepted."""

import logging
import math

import pytest
import torch
from support.cuts import IDENTITY, codec_table, cross, cut_sides

from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.errors import CodecError, LocalProtocolError, RemoteProtocolError
from tahq.pipeline.boundary import CodecTable, codec_key
from tahq.quant import get_codec

SHAPE = (2, 5, 64)
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
FIRST = IDENTITY.name(0, Purpose.TRAIN, 0, FORWARD)


def noise(seed=0, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoded(spec, x, id=FIRST):
    codec, key = get_codec(spec), codec_key(id, IDENTITY.seed)
    return codec.decode(codec.encode(x, key=key), tuple(x.shape), key=key)


@pytest.fixture
def sides():
    return cut_sides(lambda: codec_table("tah", "fixed:bits=8,round=stochastic"))


@pytest.mark.parametrize(
    ("purpose", "direction", "spec"),
    [
        (Purpose.TRAIN, FORWARD, "tah"),
        (Purpose.TRAIN, BACKWARD, "fixed:bits=8,round=stochastic"),
        (Purpose.EVAL, FORWARD, "tah"),
        (Purpose.EVAL_RAW, FORWARD, "raw:dtype=fp32"),
        (Purpose.TIE, BACKWARD, "raw:dtype=fp32"),
    ],
)
def test_tensor_arrives_as_the_codec_of_its_purpose_decodes_it(sides, purpose, direction, spec):
    sender, receiver = sides if direction is FORWARD else sides[::-1]
    got = cross(sender, receiver, noise(), step=4, purpose=purpose, direction=direction, micro_batch=2)
    assert torch.equal(got, decoded(spec, noise(), IDENTITY.name(4, purpose, 2, direction)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_tensor_is_noticed_and_sent(sides, value):
    lower, upper = sides
    x = noise()
    assert lower.send(IDENTITY.name(1, Purpose.TRAIN, 0, FORWARD), x)
    x[1, 2, 3] = value
    upper.post(FIRST, SHAPE)
    assert not lower.send(FIRST, x)
    got = upper.receive(FIRST)
    assert not got[1, 2].isfinite().all()
    assert got[0].isfinite().all()


@pytest.mark.parametrize(
    ("codec", "shape", "dtype"),
    [(2, SHAPE, torch.float32), (1, (10, 64), torch.float32), (1, SHAPE, torch.bfloat16)],
    ids=["codec", "shape", "dtype"],
)
def test_frame_that_differs_from_the_plan_is_refused(sides, codec, shape, dtype):
    lower, upper = sides
    upper.post(FIRST, SHAPE)
    lower.transport.send(Frame(FIRST, codec, dtype, shape, get_codec("tah").encode(noise())))
    with pytest.raises(RemoteProtocolError, match=r"expected \(1, \(2, 5, 64\), torch.float32\); run"):
        upper.receive(FIRST)


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_attached_numbers_arrive_as_they_are_behind_a_coded_tensor(sides, direction):
    sender, receiver = sides if direction is FORWARD else sides[::-1]
    id, numbers = IDENTITY.name(4, Purpose.TRAIN, 2, direction), torch.tensor([[1e-30, 3.0], [math.pi, -7.0]])
    receiver.post(id, SHAPE, attached_nbytes=19)
    sender.attach(id, torch.tensor([1, 2, 255], dtype=torch.uint8))
    sender.attach(id, numbers)
    sender.send(id, noise())
    spec = "tah" if direction is FORWARD else "fixed:bits=8,round=stochastic"
    assert torch.equal(receiver.receive(id), decoded(spec, noise(), id))
    attached = receiver.take_attached(id)
    assert attached[:3].tolist() == [1, 2, 255]
    assert torch.equal(attached[3:].clone().view(torch.float32), numbers.flatten())
    assert receiver.take_attached(id).numel() == 0
    (sent,) = (stats for stats in sender.transport.take_stats() if stats.frames)
    assert sent.payload_bytes == sender.codecs.codecs[1 + direction].encode(noise(), key=0).numel() + 19


def test_a_frame_too_short_for_its_attached_numbers_is_refused(sides):
    lower, upper = sides
    upper.post(FIRST, SHAPE, attached_nbytes=16)
    lower.transport.send(Frame(FIRST, 1, torch.float32, SHAPE, torch.zeros(15, dtype=torch.uint8)))
    with pytest.raises(RemoteProtocolError, match="with 15 bytes, expected 16 behind a tensor; run the same"):
        upper.receive(FIRST)


def test_a_tensor_whose_numbers_are_missing_is_refused(sides):
    lower, upper = sides
    upper.post(FIRST, SHAPE, attached_nbytes=16)
    lower.send(FIRST, noise())
    with pytest.raises(CodecError):
        upper.receive(FIRST)


def test_codec_keys_depend_on_everything_but_the_run():
    base = LogicalId(1, 0, 5, Purpose.TRAIN, 2, 1, FORWARD)
    others = [
        base._replace(**change)
        for change in (
            {"replica": 1},
            {"step": 6},
            {"purpose": Purpose.EVAL},
            {"micro_batch": 3},
            {"cut": 2},
            {"direction": BACKWARD},
        )
    ]
    keys = {codec_key(id, 9) for id in [base, *others]} | {codec_key(base, 10)}
    assert len(keys) == 8
    assert codec_key(base._replace(run=2), 9) == codec_key(base, 9)


# -- codecs that change from step to step ------------------------------------------------------------

WIDE = (2, 5, 256)
INDEX = {"raw": 0, "wf:bits=2": 1, "wf": 2, "wf:bits=6": 3, "eden:bits=2": 4, "eden": 5}


def changing_table() -> CodecTable:
    return codec_table("wf", "eden", follow={"activations": list(INDEX)[1:4], "gradients": list(INDEX)[4:]})


@pytest.fixture
def changing():
    return cut_sides(changing_table, measure_every=2)


def test_codec_is_in_force_from_its_step_on_and_the_step_before_keeps_its_own():
    table = changing_table()
    table.use(5, FORWARD, INDEX["wf:bits=2"])
    table.use(6, FORWARD, INDEX["wf:bits=6"])
    table.use(6, FORWARD, INDEX["wf"])  # replaces the one before
    assert [table.index(Purpose.EVAL, FORWARD, step) for step in (5, 6, 99)] == [1, 2, 2]
    assert table.index(Purpose.TRAIN, BACKWARD, 99) == INDEX["eden"]
    assert [table.index(purpose, FORWARD, 99) for purpose in (Purpose.EVAL_RAW, Purpose.TIE)] == [0, 0]


def test_each_step_uses_its_own_codec_even_if_the_peer_is_ahead(changing):
    lower, upper = changing
    third, fourth = (IDENTITY.name(step, Purpose.TRAIN, 0, FORWARD) for step in (3, 4))
    lower.codecs.use(4, FORWARD, INDEX["wf:bits=6"])
    upper.post(third, WIDE)
    x = noise(0, WIDE)
    lower.send(third, x)
    lower.send(fourth, x)  # larger than anything posted so far
    assert torch.equal(upper.receive(third), decoded("wf", x, third))
    upper.codecs.use(4, FORWARD, INDEX["wf:bits=6"])
    upper.post(fourth, WIDE)
    assert torch.equal(upper.receive(fourth), decoded("wf:bits=6", x, fourth))


def test_error_is_measured_on_the_first_micro_batch_of_every_second_step(changing):
    lower, upper = changing
    x = noise(0, WIDE)
    for step in (0, 1, 2):
        for micro_batch in range(2):
            cross(lower, upper, x, step=step, micro_batch=micro_batch)
    cross(lower, upper, x, step=2, purpose=Purpose.EVAL)
    expected = float((decoded("wf", x) - x).norm() / x.norm())
    samples = lower.take_errors()
    assert [(sample.link, sample.direction) for sample in samples] == [(0, FORWARD)] * 2
    assert [sample.relative_error for sample in samples] == [pytest.approx(expected)] * 2
    assert lower.take_errors() == [] == upper.take_errors()


@pytest.mark.parametrize(("value", "error"), [(0.0, 0.0), (math.nan, math.inf), (math.inf, math.inf)])
def test_error_of_zeros_is_zero_and_of_non_finite_values_infinite(changing, value, error):
    lower, _ = changing
    lower.send(FIRST, torch.full(WIDE, value))
    assert [sample.relative_error for sample in lower.take_errors()] == [error]


# -- codecs that remember samples --------------------------------------------------------------------


def remembering(activations="aqsgd"):
    return cut_sides(lambda: codec_table(activations, "aqsgd:cache=none"))


def ends(lower, upper, block=4):
    return *lower.codec_ends(block, is_incoming=False), *upper.codec_ends(block, is_incoming=True)


def states(lower, upper):
    return {name: tensor.clone() for end in ends(lower, upper) for name, tensor in end.tensors().items()}


def test_second_visit_is_sent_as_a_difference_and_counted_by_its_bytes():
    lower, upper = remembering()
    x = noise()
    assert torch.equal(cross(lower, upper, x, sample_ids=[7, 3]), x.half().float())
    (first,) = lower.transport.take_stats()
    got = cross(lower, upper, x + 0.01, step=1, sample_ids=[3, 7])
    (second,) = lower.transport.take_stats()
    assert not torch.equal(got, (x + 0.01).half().float())
    # header, records, marks, values; header, records, marks, scales, codes of 4 bits
    assert first.payload_bytes == 16 + 32 + 16 + 2 * x.numel()
    assert second.payload_bytes == 16 + 32 + 16 + 2 * SHAPE[2] + x.numel() // 2


@pytest.mark.parametrize("purpose", [Purpose.EVAL, Purpose.EVAL_RAW])
def test_evaluation_neither_uses_nor_changes_remembered_samples(purpose):
    lower, upper = remembering()
    cross(lower, upper, noise(), sample_ids=[7, 3])
    before, x = states(lower, upper), noise(1)
    got = cross(lower, upper, x, step=1, sample_ids=[7, 3], purpose=purpose)
    assert torch.equal(got, x.half().float() if purpose is Purpose.EVAL else x)
    after = states(lower, upper)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_training_without_sample_ids_is_refused_at_both_ends():
    lower, upper = remembering()
    with pytest.raises(LocalProtocolError, match="cut 0: aqsgd:bits=4,cache=memory needs the ids"):
        lower.send(FIRST, noise())
    lower.send(FIRST, noise(), [1, 2])
    upper.post(FIRST, SHAPE)
    with pytest.raises(LocalProtocolError, match="needs the ids"):
        upper.receive(FIRST)


def test_each_end_restores_its_own_state_and_continues():
    lower, upper = remembering()
    cross(lower, upper, noise(), sample_ids=[7, 3])
    checkpoint, restored = states(lower, upper), remembering("aqsgd:cache=file")
    for end in ends(*restored):
        end.load(checkpoint.keys(), checkpoint.__getitem__, SHAPE[1:])
        assert end.codec.state_nbytes == 2 * noise().numel()  # its own end, not both
    x = noise(1)
    expected = cross(lower, upper, x, step=1, sample_ids=[3, 7])
    assert torch.equal(cross(*restored, x, step=1, sample_ids=[3, 7]), expected)


@pytest.mark.parametrize(
    ("block", "shape", "message"),
    [(5, SHAPE[1:], "the checkpoint has nothing for codec/block-0005"), (4, (6, 16), "samples of another length")],
)
def test_cut_that_the_checkpoint_does_not_have_starts_empty_with_a_warning(block, shape, message, caplog):
    lower, upper = remembering()
    cross(lower, upper, noise(), sample_ids=[7, 3])
    checkpoint = states(lower, upper)
    with caplog.at_level(logging.WARNING):
        for end in ends(*remembering(), block=block):
            end.load(checkpoint.keys(), checkpoint.__getitem__, shape)
            assert end.codec.state_nbytes == 0
    assert caplog.text.count(message) == 2
    assert "starts empty there" in caplog.text
