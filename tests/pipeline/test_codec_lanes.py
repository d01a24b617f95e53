"""The lanes' tensors, their order, and errors in their threads."""

import threading
from types import SimpleNamespace

import pytest
import torch

from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.errors import CodecError
from tahq.pipeline.boundary import Boundary
from tahq.pipeline.codec_lanes import LOOKAHEAD, InlineLanes, Receive, ThreadedLanes
from tahq.pipeline.spans import Stopwatch

CPU = torch.device("cpu")


class Cut(Boundary):
    """A boundary whose frames come from `arrive`, whose tensors from `make`, and whose sending is `take`."""

    def __init__(self, arrive=lambda number: None, make=lambda number: torch.tensor(2.0 * number), take=None) -> None:
        self._arrive, self._make, self._take = arrive, make, take or (lambda number: True)
        self._stopwatch = Stopwatch()

    def await_frame(self, id):
        self._arrive(id.micro_batch)
        return Frame(id, 0, torch.float32, (), torch.empty(0, dtype=torch.uint8))

    def decode(self, frame, sample_ids=None):
        return self._make(frame.id.micro_batch)

    def send(self, id, tensor, sample_ids=None):
        return self._take(id.micro_batch)


def refuse(number: int):
    raise CodecError("not a stream")


def name(number: int) -> LogicalId:
    return LogicalId(1, 0, 0, Purpose.TRAIN, number, 0, Direction.FORWARD)


def receives(numbers, cut=None) -> list[Receive]:
    cut = cut or Cut()
    return [Receive(cut, name(number), None, "wait:3") for number in numbers]


def send(lanes, cut, number=0):
    lanes.send(cut, name(number), torch.zeros(1), None)


@pytest.fixture
def threaded():
    stopwatch = Stopwatch()
    stopwatch.is_recording = True
    return SimpleNamespace(lanes=ThreadedLanes(CPU, stopwatch), stopwatch=stopwatch)


@pytest.fixture(params=["inline", "threaded"])
def lanes(request):
    return InlineLanes() if request.param == "inline" else ThreadedLanes(CPU, Stopwatch())


def test_tensors_come_in_the_order_of_each_step(lanes):
    for step in range(3):
        wanted = [(step * 7 + index) % 5 for index in range(6)]
        lanes.begin(receives(wanted))
        assert [lanes.take().item() for _ in wanted] == [2 * number for number in wanted]
        assert lanes.finish()


def test_non_finite_tensor_marks_its_step_and_not_the_next(lanes):
    lanes.begin([])
    for number in range(3):
        send(lanes, Cut(take=lambda number: number != 1), number)
    assert not lanes.finish()
    lanes.begin([])
    send(lanes, Cut())
    assert lanes.finish()


def test_frame_that_cannot_be_decoded_is_raised_by_take(lanes):
    lanes.begin([*receives([1]), *receives([2], Cut(make=refuse)), *receives([3])])
    assert lanes.take().item() == 2
    with pytest.raises(CodecError, match="not a stream"):
        lanes.take()


def test_encoder_that_fails_wakes_a_compute_loop_that_waits_for_a_frame(threaded):
    lanes, never = threaded.lanes, threading.Event()
    lanes.begin(receives([0], Cut(arrive=lambda number: never.wait())))
    send(lanes, Cut(take=refuse))
    for end in (lanes.take, lanes.finish):
        with pytest.raises(CodecError, match="not a stream"):
            end()
    never.set()


def test_decoder_stays_a_bounded_number_of_tensors_ahead(threaded):
    lanes, arrived, started = threaded.lanes, [], threading.Semaphore(0)

    def arrive(number: int) -> None:
        arrived.append(number)
        started.release()

    lanes.begin(receives(range(6), Cut(arrive)))
    for _ in range(LOOKAHEAD):
        started.acquire()
    assert not started.acquire(timeout=0.2)  # nothing has been taken, so nothing more is decoded
    assert arrived == list(range(LOOKAHEAD))
    assert [int(lanes.take()) for _ in range(6)] == [2 * number for number in range(6)]


def test_wait_counts_for_the_frame_until_it_arrives_and_then_for_its_decoding(threaded):
    lanes, arrived, decoded = threaded.lanes, threading.Event(), threading.Event()
    cut = Cut(arrive=lambda number: arrived.wait(), make=lambda number: decoded.wait() and torch.zeros(1))
    lanes.begin(receives([0], cut))
    threading.Timer(0.05, arrived.set).start()
    threading.Timer(0.10, decoded.set).start()
    lanes.take()
    assert lanes.finish()
    totals = threaded.stopwatch.take()
    assert totals["wait:3"] == pytest.approx(0.05, abs=0.04)  # threads may wake late, and are 50 ms apart
    assert totals["wait:codec"] == pytest.approx(0.05, abs=0.04)
    spans = {span.activity: span for span in threaded.stopwatch.take_spans() if span.detail is not None}
    assert spans["wait:3"].end_s == spans["wait:codec"].begin_s
