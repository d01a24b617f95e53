"""Codec meets link: what goes into one side of a cut comes out of the other, and nothing else is taken."""

import pytest
import torch

from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.inproc_transport import InprocPair, VirtualClock
from tahq.errors import CodecError, RemoteProtocolError
from tahq.pipeline.boundary import Boundary, CodecTable, CutIdentity, Stopwatch, codec_key
from tahq.quant import get_codec

SHAPE = (2, 5, 64)
IDENTITY = CutIdentity(run=1, seed=3, cut=0)


@pytest.fixture
def sides() -> tuple[Boundary, Boundary]:
    table = CodecTable("tah", "fixed:bits=8,round=stochastic")
    pair = InprocPair(VirtualClock())
    lower, upper = (Boundary(end, IDENTITY, table, torch.device("cpu"), Stopwatch()) for end in pair.transports)
    return lower, upper


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("purpose", "direction", "spec"),
    [
        (Purpose.TRAIN, Direction.FORWARD, "tah"),
        (Purpose.TRAIN, Direction.BACKWARD, "fixed:bits=8,round=stochastic"),
        (Purpose.EVAL, Direction.FORWARD, "tah"),
        (Purpose.EVAL_RAW, Direction.FORWARD, "raw:dtype=fp32"),
        (Purpose.TIE, Direction.BACKWARD, "raw:dtype=fp32"),
    ],
)
def test_what_arrives_is_what_the_codec_of_that_purpose_makes_of_it(sides, x, purpose, direction, spec):
    lower, upper = sides
    sender, receiver = (lower, upper) if direction is Direction.FORWARD else (upper, lower)
    receiver.post(4, purpose, direction, [2], SHAPE)
    assert sender.send(4, purpose, direction, 2, x)
    codec, key = get_codec(spec), codec_key(IDENTITY.name(4, purpose, 2, direction), IDENTITY.seed)
    expected = codec.decode(codec.encode(x, key=key), SHAPE, key=key)
    assert torch.equal(receiver.receive(4, purpose, direction, 2, SHAPE), expected)


def test_frames_are_found_whatever_order_they_are_asked_for(sides, x):
    lower, upper = sides
    upper.post(0, Purpose.EVAL_RAW, Direction.FORWARD, range(3), SHAPE)
    for micro_batch in range(3):
        lower.send(0, Purpose.EVAL_RAW, Direction.FORWARD, micro_batch, x + micro_batch)
    for micro_batch in (2, 0, 1):
        got = upper.receive(0, Purpose.EVAL_RAW, Direction.FORWARD, micro_batch, SHAPE)
        assert torch.equal(got, x + micro_batch)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_sending_what_is_not_finite_is_noticed_and_goes_through(sides, x, value):
    lower, upper = sides
    x[1, 2, 3] = value
    upper.post(0, Purpose.TRAIN, Direction.FORWARD, [0], SHAPE)
    assert not lower.send(0, Purpose.TRAIN, Direction.FORWARD, 0, x)
    got = upper.receive(0, Purpose.TRAIN, Direction.FORWARD, 0, SHAPE)
    assert not got[1, 2].isfinite().all()
    assert got[0].isfinite().all()


@pytest.mark.parametrize("wrong", ["codec", "shape", "dtype"])
def test_a_frame_that_is_not_as_planned_is_refused(sides, x, wrong):
    lower, upper = sides
    index, shape, dtype = 1, SHAPE, torch.float32
    payload = get_codec("tah").encode(x)
    planned = {"codec": (2, shape, dtype), "shape": (index, (10, 64), dtype), "dtype": (index, shape, torch.bfloat16)}
    upper.post(0, Purpose.TRAIN, Direction.FORWARD, [0], SHAPE)
    id = IDENTITY.name(0, Purpose.TRAIN, 0, Direction.FORWARD)
    codec, got_shape, got_dtype = planned[wrong]
    lower.transport.send(Frame(id, codec, got_dtype, got_shape, payload))
    with pytest.raises(RemoteProtocolError, match="the plan says"):
        upper.receive(0, Purpose.TRAIN, Direction.FORWARD, 0, SHAPE)


def test_a_payload_that_is_no_stream_is_refused(sides, x):
    lower, upper = sides
    payload = get_codec("tah").encode(x)
    payload[0] = 77
    upper.post(0, Purpose.TRAIN, Direction.FORWARD, [0], SHAPE)
    id = IDENTITY.name(0, Purpose.TRAIN, 0, Direction.FORWARD)
    lower.transport.send(Frame(id, 1, torch.float32, SHAPE, payload))
    with pytest.raises(CodecError):
        upper.receive(0, Purpose.TRAIN, Direction.FORWARD, 0, SHAPE)


def test_codec_keys_differ_in_everything_but_the_run():
    base = LogicalId(1, 0, 5, Purpose.TRAIN, 2, 1, Direction.FORWARD)
    others = [
        LogicalId(1, 1, 5, Purpose.TRAIN, 2, 1, Direction.FORWARD),
        LogicalId(1, 0, 6, Purpose.TRAIN, 2, 1, Direction.FORWARD),
        LogicalId(1, 0, 5, Purpose.EVAL, 2, 1, Direction.FORWARD),
        LogicalId(1, 0, 5, Purpose.TRAIN, 3, 1, Direction.FORWARD),
        LogicalId(1, 0, 5, Purpose.TRAIN, 2, 2, Direction.FORWARD),
        LogicalId(1, 0, 5, Purpose.TRAIN, 2, 1, Direction.BACKWARD),
    ]
    keys = {codec_key(id, 9) for id in [base, *others]} | {codec_key(base, 10)}
    assert len(keys) == 8
    assert codec_key(LogicalId(2, 0, 5, Purpose.TRAIN, 2, 1, Direction.FORWARD), 9) == codec_key(base, 9)


def test_the_stopwatch_adds_up_and_starts_anew():
    stopwatch = Stopwatch()
    for _ in range(2):
        with stopwatch.measure("encode"):
            sum(range(1000))
    taken = stopwatch.take()
    assert taken.keys() == {"encode"}
    assert taken["encode"] > 0
    assert stopwatch.take() == {}
