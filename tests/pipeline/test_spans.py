"""Totals and spans of what a stage's threads do, from the same measurements."""

import threading
import time

import pytest

from tahq.pipeline import spans
from tahq.pipeline.spans import Stopwatch


class LateMarks:
    """A device that finishes its work `behind_s` after it is queued."""

    behind_s = 5.0

    def __init__(self):
        self.num_reads = 0

    def mark(self):
        return time.monotonic()

    def times_s(self, marks):
        self.num_reads += 1
        return [mark + self.behind_s for mark in marks]


def on_another_thread(work, name="tahq-encode"):
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


def test_threads_beside_are_told_apart():
    stopwatch = Stopwatch()
    stopwatch.is_recording = True
    stopwatch.add("encode", 0.0, 1.0)
    on_another_thread(lambda: stopwatch.add("encode", 0.0, 4.0))
    on_another_thread(lambda: stopwatch.add("decode", 0.0, 8.0), "tahq-decode")
    assert stopwatch.take() == {"encode": 1.0, "beside:encode": 4.0, "beside:decode": 8.0}
    assert {(span.lane, span.activity) for span in stopwatch.take_spans()} == {
        ("compute", "encode"),
        ("encode", "encode"),
        ("decode", "decode"),
    }


def test_spans_of_a_step_are_bounded_and_totals_are_not(monkeypatch):
    monkeypatch.setattr(spans, "MAX_SPANS", 3)
    stopwatch = Stopwatch()
    stopwatch.is_recording = True
    for number in range(10):
        stopwatch.add("forward", number, number + 1.0)
    assert stopwatch.take() == {"forward": 10.0}
    assert len(stopwatch.take_spans()) == 3


def test_lane_that_goes_on_while_totals_are_taken_loses_nothing():
    stopwatch, stop = Stopwatch(), threading.Event()
    counted = 0

    def work():
        nonlocal counted
        while not stop.is_set():
            stopwatch.add("encode", 0.0, 1.0)
            counted += 1

    thread = threading.Thread(target=work)
    thread.start()
    taken = sum(stopwatch.take().get("beside:encode", 0.0) for _ in range(2000))
    stop.set()
    thread.join()
    assert taken + stopwatch.take().get("beside:encode", 0.0) == counted


def test_marks_that_were_read_before_count_in_the_next_totals():
    marks = LateMarks()
    stopwatch = Stopwatch(marks)
    with stopwatch.measure("forward"):
        time.sleep(0.001)
    stopwatch.read_marks()
    assert marks.num_reads == 1
    assert stopwatch.take()["forward"] >= 0.001
    assert marks.num_reads == 1


def test_times_of_a_device_are_read_once_a_step_and_say_when_it_was_done():
    marks = LateMarks()
    stopwatch = Stopwatch(marks)
    stopwatch.is_recording = True
    begin_s = time.monotonic()
    for number in range(8):
        with stopwatch.measure("forward", number):
            pass
        with stopwatch.measure("wait:1"):
            time.sleep(0.001)
    assert marks.num_reads == 0
    totals = stopwatch.take()
    assert marks.num_reads == 1
    forwards = [span for span in stopwatch.take_spans() if span.activity == "forward"]
    assert totals["forward"] == pytest.approx(sum(span.end_s - span.begin_s for span in forwards))
    assert totals["wait:1"] >= 0.008  # on the host's clock
    assert all(begin_s + marks.behind_s <= span.begin_s <= span.end_s for span in forwards)
    assert stopwatch.take() == {}
