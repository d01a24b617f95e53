"""What a user sees of a run: the table on a terminal, plain lines elsewhere, and the summary."""

import io
import json
import math
from inspect import getmembers, isfunction

import pytest
from rich.console import Console

from tahq.coordinator.observer import (
    CodecChange,
    RunEnd,
    RunObserver,
    SnapshotRecord,
    StageRecord,
    StageSplit,
    StageStatus,
)
from tahq.observe.run_history import RunHistory, summary_text
from tahq.observe.run_view import LiveTable, Observers, PlainLines, render, screen, watch_run

CALLS = [name for name, _ in getmembers(RunObserver, isfunction) if not name.startswith("_")]


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self, tick_s):
        self.now_s, self.tick_s = 0.0, tick_s

    def __call__(self):
        self.now_s += self.tick_s
        return self.now_s


def drawn(history):
    console = Console(file=io.StringIO(), width=100)
    console.print(render(history))
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def lines_of(play_run, clock):
    stream, history = io.StringIO(), RunHistory()
    play_run(Observers([history, PlainLines(stream, history, clock)]))
    return stream.getvalue().splitlines()


def test_table_shows_run_stages_and_links(history):
    rows = drawn(history)
    assert rows[0] == "demo training step 20/20 loss 3.8000 2,000 tokens/s"
    assert "0 host0 cpu F0 – – 25 % –" in rows
    assert "1 host1 cpu F0 – – 50 % –" in rows
    assert "0 → 1 activations 8.84 MB 4.41 35.3 Mbit/s 16 % 4 %" in rows
    assert "1 → 0 gradients 16 MB 8.00 32 Mbit/s 40 % 0 %" in rows


def test_table_shows_the_split_of_the_step_and_its_limit(record):
    history = RunHistory()
    for stage in range(2):
        history.stage_changed(StageStatus(stage, f"host{stage}", 40 + stage, "cpu", 12345, "F0", 0))
    splits = [
        StageSplit(forward_s=0.1, backward_s=0.15, wait_s={1: 0.2}, commit_s=0.05, beside_s={"encode": 0.05}),
        StageSplit(forward_s=0.2, backward_s=0.25, commit_s=0.05),
    ]
    history.step_committed(record(1, stages=tuple(StageRecord(n, {}, 0, split) for n, split in enumerate(splits))))
    rows = drawn(history)
    assert "0 host0 cpu F0 50 % 10 % 40 % (1) 10 %" in rows
    assert "1 host1 cpu F0 90 % 0 % 0 % 10 %" in rows
    assert "limited by stage 1's compute 90 % of the step" in rows


def test_table_takes_names_literally():
    history = RunHistory()
    history.phase_changed("joining", "stages 2, 3 (tahq-worker --stage 2 --peer h:1)")
    history.stage_changed(StageStatus(0, "[red]host", 1, "cpu", 1, "B[0]", 0))
    text = "\n".join(drawn(history))
    assert "joining: waiting for stages 2, 3 (tahq-worker --stage 2 --peer h:1)" in text
    assert "0 [red]host cpu B[0]" in text


def test_table_is_drawn_at_most_five_times_a_second(play_run, record):
    history, stream = RunHistory(), io.StringIO()
    table = LiveTable(Console(file=stream, force_terminal=True, width=80), history, Clock(0.01))
    play_run(history)
    table.opened(history.header)
    begun = stream.getvalue().count("demo")
    for step in range(100):
        table.step_committed(record(step))
    assert stream.getvalue().count("demo") - begun == 5
    table.warned("careful")
    table.ended(RunEnd(0, "", 20, 20))
    assert "warning: careful" in stream.getvalue()


def test_plain_lines_have_the_whole_run_without_escape_codes(play_run):
    lines = lines_of(play_run, Clock(1.0))
    assert lines[0] == "run demo: 2 stages, coordinator at 127.0.0.1:5555"
    assert lines[1] == "joining: waiting for stage 1 (tahq-worker --stage 1 --peer 127.0.0.1:5555)"
    assert lines[2] == "stage 0: host0, pid 40, cpu, 12,345 parameters"
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 20
    assert steps[0] == "step 1/20  loss 3.9900  2,000 tokens/s  0.5 s per step  1.24 MB sent  9.5 s left"
    assert "validation after step 2: loss 2.5000 (perplexity 12.18), without the codec 2.0000 (7.389)" in lines
    assert lines[-1] == "checkpoint after step 20: 13.2 MB"
    assert "\x1b" not in "\n".join(lines)


def test_plain_lines_leave_out_most_fast_steps(play_run):
    lines = lines_of(play_run, Clock(0.01))
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/20", "10/20", "20/20"]


def test_every_change_of_a_codec_is_shown_however_fast_steps_are(record):
    change = CodecChange(0, "gradients", "eden:bits=3,group=256", "eden:bits=2,group=256", "bottleneck", "too slow")
    line = "after step 3: link 0, gradients: eden:bits=3,group=256 -> eden:bits=2,group=256 (bottleneck: too slow)"
    plain, terminal, history = io.StringIO(), Terminal(), RunHistory()
    table = LiveTable(Console(file=terminal, force_terminal=True, width=140), history)
    for observer in (PlainLines(plain, history, Clock(0.01)), table):
        observer.step_committed(record(3, codec_changes=(change,)))
    assert plain.getvalue().endswith(line + "\n")
    assert line in terminal.getvalue()


def test_plain_lines_repeat_what_is_missing_after_a_while():
    stream, clock = io.StringIO(), Clock(0.0)
    lines = PlainLines(stream, RunHistory(), clock)
    for detail in ("stages 0, 1, 2", "stages 1, 2", "stage 2"):
        lines.phase_changed("joining", detail)
    clock.now_s = 3.0
    for _ in range(2):
        lines.stage_changed(StageStatus(0, "host0", 1, "", 0, "joining", -1))
    lines.snapshot_written(SnapshotRecord(4, 0, "stage 1: disk full"))
    assert stream.getvalue().splitlines() == [
        "joining: waiting for stages 0, 1, 2",
        "joining: waiting for stage 2",
        "warning: no checkpoint after step 4: stage 1: disk full; the previous checkpoint stays valid",
    ]


def test_plain_lines_say_how_far_each_stage_is_while_nothing_else_is_printed(record):
    stream, history, clock = io.StringIO(), RunHistory(), Clock(0.0)
    lines = Observers([history, PlainLines(stream, history, clock)])
    lines.phase_changed("training", "")
    for second in range(0, 80, 2):
        clock.now_s = second
        done = "waiting for the commit" if second > 60 else f"micro-batch {1 + second // 10}/8 forward"
        for stage, activity in enumerate((f"searching subspaces, {second}/80", done, done)):
            lines.stage_changed(StageStatus(stage, "host", 1, "cpu", 1, activity, 0))
        if second == 70:
            lines.step_committed(record(1))
    told = [line for line in stream.getvalue().splitlines() if "so far" in line]
    assert told == [
        "step 1, 6 s so far: stage 0: searching subspaces, 6/80; stages 1, 2: micro-batch 1/8 forward",
        "step 1, 16 s so far: stage 0: searching subspaces, 16/80; stages 1, 2: micro-batch 2/8 forward",
        "step 1, 36 s so far: stage 0: searching subspaces, 36/80; stages 1, 2: micro-batch 4/8 forward",
        "step 1, 1:06 so far: stage 0: searching subspaces, 66/80; stages 1, 2: waiting for the commit",
        "step 1, 6 s so far: stage 0: searching subspaces, 76/80; stages 1, 2: waiting for the commit",
    ]


@pytest.mark.parametrize(
    ("stream", "term", "kind"),
    [(Terminal(), "xterm", LiveTable), (io.StringIO(), "xterm", PlainLines), (Terminal(), "dumb", PlainLines)],
)
def test_screen_is_a_table_only_on_a_terminal(stream, term, kind, monkeypatch):
    monkeypatch.setenv("TERM", term)
    assert type(screen(stream, RunHistory())) is kind


def test_watched_run_leaves_metrics_a_summary_and_its_reason(tmp_path, play_run):
    out, err = io.StringIO(), io.StringIO()
    observer = watch_run(tmp_path / "metrics.jsonl", 0, resume_command="tahq-launch c.yaml --resume", out=out, err=err)
    play_run(observer)
    observer.ended(RunEnd(3, "stage 1 is lost;\n  resume", 20, 40, 20))
    assert len([json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]) == 20
    assert "run demo ended with status 3: 20 of 40 steps" in out.getvalue()
    assert err.getvalue() == "tahq-launch: stage 1 is lost; resume\n"


def test_run_without_a_step_has_no_summary(tmp_path):
    out, err = io.StringIO(), io.StringIO()
    watch_run(tmp_path / "metrics.jsonl", 0, out=out, err=err).ended(RunEnd(2, "no workers", 0, 0))
    assert (out.getvalue(), err.getvalue()) == ("", "tahq-launch: no workers\n")


# -- the summary ---------------------------------------------------------------------------------


def rows(text):
    return {line[:14].strip(): line[14:] for line in text.splitlines()[1:]}


def test_summary_has_losses_speed_and_bytes(history, end):
    text = summary_text(history, end, resume_command="tahq-launch c.yaml --resume", export_command="tahq export r OUT")
    assert text.splitlines()[0] == "run demo done: 20 of 20 steps in 10 s"
    assert rows(text) == {
        "loss": "3.9900 → 3.8000 nats per token; mean of 10 steps 3.9450 → 3.8450",
        "speed": "2,000 tokens/s, 0.5 s per step (medians)",
        "validation": "after step 2: loss 2.5000 (perplexity 12.18), without the codec 2.0000 (7.389)",
        # 20 steps · (442,000 + 801,000) bytes; 20 · 1,600,000 elements are 128 MB in fp32
        "on the wire": "24.9 MB; fp32 128 MB (5.15×), fp16 64 MB (2.57×)",
        "activations": "8.82 MB, 4.41 bits per element",
        "gradients": "16 MB, 8.00 bits per element",
        "written to": "runs/demo (checkpoint after step 20)",
        "resume": "tahq-launch c.yaml --resume, with training.steps or epochs set to more",
        "export": "tahq export r OUT",
    }
    resumed = summary_text(history, RunEnd(0, "", 50, 50, 50))
    assert resumed.splitlines()[0] == "run demo done: 50 of 50 steps (20 of them since it was resumed) in 10 s"
    history.links.clear()
    assert "on the wire" not in summary_text(history, end)


def test_summary_of_a_short_run_has_no_means_and_resumes_only_from_a_checkpoint(play_run):
    history = RunHistory()
    play_run(history, num_steps=3)
    text = summary_text(history, RunEnd(130, "stopped", 3, 20, None), resume_command="again")
    assert text.splitlines()[0] == "run demo ended with status 130: 3 of 20 steps in 1.5 s"
    assert rows(text)["loss"] == "3.9900 → 3.9700 nats per token"
    assert rows(text)["written to"] == "runs/demo"
    assert "resume" not in rows(text)
    assert rows(summary_text(history, RunEnd(130, "", 3, 20, 3), resume_command="again"))["resume"] == "again"


def test_summary_of_a_run_that_turned_back_counts_each_step_once(history, record, end):
    history.turned_back(18)
    assert summary_text(history, RunEnd(3, "", 18, 20, 18)).startswith(
        "run demo ended with status 3: 18 of 20 steps in"
    )
    for step in (19, 20):
        history.step_committed(record(step))
    # two steps of half a second were computed again
    assert summary_text(history, end).splitlines()[0] == "run demo done: 20 of 20 steps in 11 s"


def test_summary_counts_skipped_steps(history, record, end):
    history.step_committed(record(21, loss=math.nan, skipped=True))
    text = summary_text(history, end)
    assert rows(text)["skipped"] == "1 of these steps: NaN or infinity"
    assert "→ – nats" in rows(text)["loss"]


# -- several observers as one --------------------------------------------------------------------


class Listing(RunObserver):
    def __init__(self, calls):
        self.calls = calls

    def warned(self, text):
        self.calls.append(text)


class Full(RunObserver):
    def stage_left(self, stage):
        raise OSError("no space left on device")


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_passed_on(name):
    told = type("Told", (RunObserver,), {name: lambda self, *arguments: calls.append(arguments)})
    calls = []
    getattr(Observers([told(), told()]), name)(1)
    assert calls == [(1,), (1,)]


def test_observer_that_cannot_write_is_dropped_and_the_others_go_on():
    calls = []
    observers = Observers([Full(), Listing(calls)])
    for _ in range(2):
        observers.stage_left(1)
    assert calls == ["Full cannot write any more and is left out: no space left on device"]
