"""A cut whose codecs change from step to step, and what is measured of them."""

import math

import pytest
import torch

from tahq.comm.link.frame import Direction, Frame, Purpose
from tahq.comm.link.inproc_transport import InprocPair, VirtualClock
from tahq.errors import LocalProtocolError, RemoteProtocolError
from tahq.pipeline.boundary import Boundary, CodecTable, CutIdentity, Stopwatch, codec_key
from tahq.quant import get_codec

SHAPE = (2, 5, 256)
IDENTITY = CutIdentity(run=1, seed=3, cut=0)
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
RUNGS = {FORWARD: ["wf:bits=2", "wf", "wf:bits=6"], BACKWARD: ["eden:bits=2", "eden"]}
INDEX = {"raw": 0, "wf:bits=2": 1, "wf": 2, "wf:bits=6": 3, "eden:bits=2": 4, "eden": 5}


def make_table() -> CodecTable:
    return CodecTable("wf", "eden", rungs=RUNGS)


@pytest.fixture
def sides() -> tuple[Boundary, Boundary]:
    pair = InprocPair(VirtualClock())
    lower, upper = (
        Boundary(end, IDENTITY, make_table(), torch.device("cpu"), Stopwatch(), measure_every=2)
        for end in pair.transports
    )
    return lower, upper


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def decoded(spec: str, x: torch.Tensor, step: int, direction: Direction) -> torch.Tensor:
    codec, key = get_codec(spec), codec_key(IDENTITY.name(step, Purpose.TRAIN, 0, direction), IDENTITY.seed)
    return codec.decode(codec.encode(x, key=key), SHAPE, key=key)


def test_the_table_has_raw_then_both_ladders_and_begins_as_configured():
    table = make_table()
    assert [codec.spec.brief() for codec in table.codecs] == list(INDEX)
    assert [table.index(Purpose.TRAIN, direction, 7) for direction in Direction] == [INDEX["wf"], INDEX["eden"]]


def test_a_rung_holds_from_its_step_on_and_the_step_before_keeps_its_own():
    table = make_table()
    table.use(5, FORWARD, INDEX["wf:bits=2"])
    table.use(6, FORWARD, INDEX["wf:bits=6"])
    table.use(6, FORWARD, INDEX["wf"])  # said again, otherwise
    assert [table.index(Purpose.EVAL, FORWARD, step) for step in (5, 6, 99)] == [1, 2, 2]
    assert table.index(Purpose.TRAIN, BACKWARD, 99) == INDEX["eden"]
    assert [table.index(purpose, FORWARD, 99) for purpose in (Purpose.EVAL_RAW, Purpose.TIE)] == [0, 0]


@pytest.mark.parametrize(("direction", "index"), [(FORWARD, 0), (FORWARD, 4), (BACKWARD, 3), (BACKWARD, 6)])
def test_an_index_of_the_other_direction_is_refused(direction, index):
    with pytest.raises(LocalProtocolError, match=f"codec {index} is none of those"):
        make_table().use(1, direction, index)


def test_each_step_crosses_in_its_own_codec_even_where_a_peer_is_ahead(sides, x):
    lower, upper = sides
    lower.use(4, FORWARD, INDEX["wf:bits=6"])
    upper.post(3, Purpose.TRAIN, FORWARD, [0], SHAPE)
    lower.send(3, Purpose.TRAIN, FORWARD, 0, x)
    lower.send(4, Purpose.TRAIN, FORWARD, 0, x)  # longer than anything that was posted so far
    assert torch.equal(upper.receive(3, Purpose.TRAIN, FORWARD, 0, SHAPE), decoded("wf", x, 3, FORWARD))
    upper.use(4, FORWARD, INDEX["wf:bits=6"])
    upper.post(4, Purpose.TRAIN, FORWARD, [0], SHAPE)
    assert torch.equal(upper.receive(4, Purpose.TRAIN, FORWARD, 0, SHAPE), decoded("wf:bits=6", x, 4, FORWARD))


def test_a_frame_in_the_codec_of_another_step_is_refused(sides, x):
    lower, upper = sides
    for side in sides:
        side.use(4, BACKWARD, INDEX["eden:bits=2"])
    lower.post(4, Purpose.TRAIN, BACKWARD, [0], SHAPE)
    id = IDENTITY.name(4, Purpose.TRAIN, 0, BACKWARD)
    upper.transport.send(Frame(id, INDEX["eden"], torch.float32, SHAPE, get_codec("eden:bits=1").encode(x)))
    with pytest.raises(RemoteProtocolError, match="the plan says"):
        lower.receive(4, Purpose.TRAIN, BACKWARD, 0, SHAPE)


def test_the_error_is_measured_on_the_first_micro_batch_every_so_many_steps(sides, x):
    lower, upper = sides
    for step in (0, 1, 2):
        upper.post(step, Purpose.TRAIN, FORWARD, range(2), SHAPE)
        for micro_batch in range(2):
            lower.send(step, Purpose.TRAIN, FORWARD, micro_batch, x)
    upper.post(2, Purpose.EVAL, FORWARD, [0], SHAPE)
    lower.send(2, Purpose.EVAL, FORWARD, 0, x)
    expected = float((decoded("wf", x, 0, FORWARD) - x).norm() / x.norm())
    samples = lower.take_errors()
    assert [(sample.link, sample.direction) for sample in samples] == [(0, FORWARD)] * 2
    assert [sample.relative_error for sample in samples] == [pytest.approx(expected)] * 2
    assert lower.take_errors() == [] == upper.take_errors()


@pytest.mark.parametrize(("value", "error"), [(0.0, 0.0), (math.nan, math.inf), (math.inf, math.inf)])
def test_the_error_of_nothing_is_none_and_of_what_is_not_finite_infinite(sides, value, error):
    lower, _ = sides
    lower.send(0, Purpose.TRAIN, FORWARD, 0, torch.full(SHAPE, value))
    assert [sample.relative_error for sample in lower.take_errors()] == [error]
