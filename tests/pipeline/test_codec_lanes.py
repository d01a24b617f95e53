"""Lanes: what they hand over, in which order, and how what goes wrong in them comes out."""

import threading

import pytest
import torch

from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.errors import CodecError
from tahq.pipeline.codec_lanes import LOOKAHEAD, InlineLanes, Receive, ThreadedLanes
from tahq.pipeline.spans import Stopwatch

CPU = torch.device("cpu")


@pytest.fixture(params=[InlineLanes, lambda stopwatch: ThreadedLanes(CPU, stopwatch)], ids=["inline", "threaded"])
def lanes(request):
    return request.param(Stopwatch())


def frame(micro_batch: int) -> Frame:
    id = LogicalId(1, 0, 0, Purpose.TRAIN, micro_batch, 0, Direction.FORWARD)
    return Frame(id, 0, torch.float32, (1,), torch.tensor([micro_batch], dtype=torch.uint8))


def receive(micro_batch: int) -> Receive:
    return Receive(lambda: frame(micro_batch), lambda frame: frame.payload.float() * 2)


def test_tensors_come_in_the_order_of_the_step_for_step_after_step(lanes):
    for step in range(3):
        wanted = [(step * 7 + index) % 5 for index in range(6)]
        lanes.begin(map(receive, wanted))
        assert [lanes.take().item() for _ in wanted] == [2 * number for number in wanted]
        assert lanes.finish()


def test_what_is_sent_is_encoded_in_order_and_before_the_step_ends(lanes):
    done = []
    lanes.begin([])
    for number in range(20):
        lanes.send(torch.zeros(1), lambda number=number: done.append(number) or True)
    assert lanes.finish()
    assert done == list(range(20))


def test_one_tensor_that_is_not_finite_marks_its_step_and_not_the_next(lanes):
    lanes.begin([])
    for finite in (True, False, True):
        lanes.send(torch.zeros(1), lambda finite=finite: finite)
    assert not lanes.finish()
    lanes.begin([])
    lanes.send(torch.zeros(1), lambda: True)
    assert lanes.finish()


class Noted:
    """Writes down in which thread it is taken apart."""

    def __init__(self, threads: list[str]) -> None:
        self._threads = threads

    def __del__(self) -> None:
        self._threads.append(threading.current_thread().name)


def test_what_is_dropped_is_taken_apart_by_the_thread_that_encodes():
    lanes, threads = ThreadedLanes(CPU, Stopwatch()), []
    lanes.begin([])
    lanes.drop(Noted(threads))
    assert lanes.finish()
    assert threads == ["tahq-encode"]


def refuse(*_: object) -> torch.Tensor:
    raise CodecError("not a stream")


def test_a_frame_that_cannot_be_decoded_is_raised_where_it_is_taken(lanes):
    lanes.begin([receive(1), Receive(lambda: frame(2), refuse), receive(3)])
    assert lanes.take().item() == 2
    with pytest.raises(CodecError, match="not a stream"):
        lanes.take()


def test_an_encoder_that_fails_wakes_a_compute_loop_that_waits_for_a_frame():
    lanes, never = ThreadedLanes(CPU, Stopwatch()), threading.Event()
    lanes.begin([Receive(lambda: never.wait() and frame(0), refuse)])
    lanes.send(torch.zeros(1), refuse)
    with pytest.raises(CodecError, match="not a stream"):
        lanes.take()
    with pytest.raises(CodecError, match="not a stream"):
        lanes.finish()
    never.set()


def test_decoding_runs_ahead_by_so_many_tensors_and_no_more():
    waited, lanes = [], ThreadedLanes(CPU, Stopwatch())
    started = threading.Semaphore(0)

    def wait(number: int) -> Frame:
        waited.append(number)
        started.release()
        return frame(number)

    lanes.begin(Receive(lambda number=number: wait(number), lambda frame: frame.payload) for number in range(6))
    for _ in range(LOOKAHEAD):
        started.acquire()
    assert not started.acquire(timeout=0.2)  # nothing has been taken, so nothing more is made
    assert waited == list(range(LOOKAHEAD))
    assert [int(lanes.take()) for _ in range(6)] == list(range(6))


def test_encoding_does_not_hold_up_the_compute_loop():
    release, lanes = threading.Event(), ThreadedLanes(CPU, Stopwatch())
    lanes.begin([receive(4)])
    lanes.send(torch.zeros(1), release.wait)
    assert lanes.take().item() == 8  # the encoder stands still meanwhile
    release.set()
    assert lanes.finish()


def test_wait_is_for_the_frame_until_it_is_there_and_then_for_its_decoding():
    stopwatch = Stopwatch()
    stopwatch.is_recording = True
    lanes = ThreadedLanes(CPU, stopwatch)
    arrived, decoded = threading.Event(), threading.Event()

    def wait() -> Frame:
        arrived.wait()
        return frame(0)

    def decode(frame: Frame) -> torch.Tensor:
        decoded.wait()
        return frame.payload

    lanes.begin([Receive(wait, decode, "wait:3", frame(0).id)])
    threading.Timer(0.05, arrived.set).start()
    threading.Timer(0.10, decoded.set).start()
    lanes.take()
    assert lanes.finish()
    totals = stopwatch.take()
    assert totals["wait:3"] == pytest.approx(0.05, abs=0.04)  # threads may wake late, and are 50 ms apart
    assert totals["wait:codec"] == pytest.approx(0.05, abs=0.04)
    spans = {span.activity: span for span in stopwatch.take_spans() if span.detail is not None}
    assert spans["wait:3"].end_s == spans["wait:codec"].begin_s


def test_frame_that_is_decoded_already_is_not_waited_for():
    stopwatch = Stopwatch()
    lanes = ThreadedLanes(CPU, stopwatch)
    made = threading.Event()

    def decode(frame: Frame) -> torch.Tensor:
        made.set()
        return frame.payload

    lanes.begin([Receive(lambda: frame(0), decode, "wait:3")])
    assert made.wait(10)
    lanes.take()
    assert stopwatch.take().get("wait:3", 0.0) == 0.0
