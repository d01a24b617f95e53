"""events.jsonl: one JSON object per event, over all starts of a run."""

import json
from itertools import count

from support.made_runs import CHANGE

from tahq.coordinator.observer import RunEnd, RunHeader, StageStatus
from tahq.observe.events import EventsFile


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_run_and_its_continuation_are_written_event_by_event(tmp_path, play_run, end):
    path, clock = tmp_path / "events.jsonl", count(1_700_000_000)
    for _ in range(2):
        file = EventsFile(path, lambda: float(next(clock)))
        play_run(file)
        file.ended(end)
    events = read(path)
    names = ["started", "phase", "joined", "joined", "planned", "phase", "checkpoint", "ended"]
    assert [event["event"] for event in events] == 2 * names
    assert [event["time"] for event in events] == [1_700_000_000.0 + number for number in range(16)]
    assert events[2] == {
        "time": 1_700_000_002.0,
        "step": 0,
        "event": "joined",
        "text": "stage 0: host0, cpu",
        "stage": 0,
        "host": "host0",
        "device": "cpu",
    }
    assert (events[4]["total_steps"], events[6]["step"], events[6]["text"]) == (20, 20, "13.2 MB")


def test_lost_stage_degraded_link_and_other_codecs_are_written(tmp_path, record):
    file = EventsFile(tmp_path / "events.jsonl")
    file.opened(RunHeader("demo", tmp_path, 2, "127.0.0.1:5555", 3))
    file.step_committed(record(4, codec_changes=(CHANGE,), schedule_change="zero-bubble"))
    file.link_changed(1, 0, "nothing is heard")
    for _ in range(2):  # heartbeats
        file.stage_changed(StageStatus(1, "host1", 7, "cuda:0", 0, "", 0))
        file.phase_changed("training", "stage 1")
    file.stage_left(1)
    file.stage_changed(StageStatus(1, "host1", 8, "cuda:0", 0, "", 0))
    file.stage_returned(1, 5.4)
    file.link_changed(1, 0, "")
    file.turned_back(2)
    file.ended(RunEnd(3, "stage 1 is gone", 2, 9))
    assert [(event["step"], event["event"], event["text"]) for event in read(tmp_path / "events.jsonl")] == [
        (3, "started", "2 stages, continuing after step 3"),
        (4, "codec", str(CHANGE)),
        (4, "schedule", "zero-bubble"),
        (4, "link", "link 0 of stage 1 is degraded: nothing is heard"),
        (4, "joined", "stage 1: host1, cuda:0"),
        (4, "phase", "training: waiting for stage 1"),
        (4, "lost", "stage 1 has lost its worker"),
        (4, "joined", "stage 1: host1, cuda:0"),
        (4, "returned", "stage 1 is back after 5.4 s"),
        (4, "link", "link 0 of stage 1 works again"),
        (2, "turned back", "all stages go back to step 2"),
        (2, "ended", "with status 3: stage 1 is gone"),
    ]
