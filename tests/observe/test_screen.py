"""What one sees: the table on a terminal, plain lines elsewhere."""

import io
import json

import pytest
from rich.console import Console

from tahq.coordinator.observer import CodecChange, RunEnd, SnapshotRecord, StageRecord, StageSplit, StageStatus
from tahq.observe.live_table import LiveTable, render
from tahq.observe.plain_lines import PlainLines
from tahq.observe.run_history import RunHistory
from tahq.observe.run_view import screen, watch_run


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self, tick_s):
        self.now_s = 0.0
        self.tick_s = tick_s

    def __call__(self):
        self.now_s += self.tick_s
        return self.now_s


def drawn(history, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(render(history))
    return console.file.getvalue()


def played(play_run, make, **options):
    """The run told to a history and then to what is made of it, as watch_run does."""
    history, stream = RunHistory(), io.StringIO()
    observer = make(stream, history, **options)
    both = type("Both", (), {})()
    for name in ("opened", "phase_changed", "stage_changed", "planned", "step_committed", "validated",
                 "snapshot_written"):  # fmt: skip
        setattr(both, name, lambda *a, n=name: [getattr(history, n)(*a), getattr(observer, n)(*a)])
    play_run(both)
    return stream.getvalue().splitlines()


def test_table_shows_run_stages_and_links(history):
    text = drawn(history)
    assert "demo  training  step 20/20  loss 3.8000  2,000 tokens/s" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 host0 cpu F0 – – 25 % –" in rows
    assert "1 host1 cpu F0 – – 50 % –" in rows
    assert "0 → 1 activations 8.84 MB 4.41 35.3 Mbit/s 16 % 4 %" in rows
    assert "1 → 0 gradients 16 MB 8.00 32 Mbit/s 40 % 0 %" in rows


def test_table_shows_what_the_step_was_spent_on_and_what_limits_it(record):
    history = RunHistory()
    for stage in range(2):
        history.stage_changed(StageStatus(stage, f"host{stage}", 40 + stage, "cpu", 12345, "F0", 0))
    splits = [
        StageSplit(forward_s=0.1, backward_s=0.15, wait_s={1: 0.2}, commit_s=0.05, beside_s={"encode": 0.05}),
        StageSplit(forward_s=0.2, backward_s=0.25, commit_s=0.05),
    ]
    history.step_committed(record(1, stages=tuple(StageRecord(n, {}, 0, split) for n, split in enumerate(splits))))
    text = drawn(history)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 host0 cpu F0 50 % 10 % 40 % (1) 10 %" in rows
    assert "1 host1 cpu F0 90 % 0 % 0 % 10 %" in rows
    assert "limited by stage 1's compute 90 % of the step" in rows


def test_table_takes_names_literally():
    history = RunHistory()
    history.phase_changed("joining", "stages 2, 3 (tahq-worker --stage 2 --peer h:1)")
    history.stage_changed(StageStatus(0, "[red]host", 1, "cpu", 1, "B[0]", 0))
    assert "joining: waiting for stages 2, 3 (tahq-worker --stage 2 --peer h:1)" in drawn(history)
    assert "[red]host" in drawn(history)
    assert "B[0]" in drawn(history)


def test_live_table_draws_at_most_five_times_a_second(play_run, record):
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


def test_plain_lines_tell_the_run_without_escape_codes(play_run):
    lines = played(play_run, PlainLines, clock=Clock(1.0))
    assert lines[0] == "run demo: 2 stages, coordinator at 127.0.0.1:5555"
    assert lines[1] == "joining: waiting for stage 1 (tahq-worker --stage 1 --peer 127.0.0.1:5555)"
    assert lines[2] == "stage 0: host0, pid 40, cpu, 12,345 parameters"
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 20
    assert steps[0] == "step 1/20  loss 3.9900  2,000 tokens/s  0.5 s per step  1.24 MB sent  9.5 s left"
    assert "validation after step 2: loss 2.5000 (perplexity 12.18), without the codec 2.0000 (7.389)" in lines
    assert lines[-1] == "checkpoint after step 20: 13.2 MB"
    assert "\x1b" not in "\n".join(lines)


def test_fast_steps_are_not_all_printed(play_run):
    lines = played(play_run, PlainLines, clock=Clock(0.01))
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/20", "10/20", "20/20"]


def test_each_change_of_a_codec_is_said_however_fast_steps_are(record):
    change = CodecChange(0, "gradients", "eden:bits=3,group=256", "eden:bits=2,group=256", "bottleneck", "too slow")
    said = "after step 3: link 0, gradients: eden:bits=3,group=256 -> eden:bits=2,group=256 (bottleneck: too slow)\n"
    stream, history = io.StringIO(), RunHistory()
    PlainLines(stream, history, Clock(0.01)).step_committed(record(3, codec_changes=(change,)))
    assert stream.getvalue().endswith(said)
    screen = Terminal()
    LiveTable(Console(file=screen, force_terminal=True, width=140), history).step_committed(
        record(3, codec_changes=(change,))
    )
    assert said.strip() in screen.getvalue()


def test_what_is_still_missing_after_a_while_is_said_with_the_next_sign_of_life():
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
    assert out.getvalue() == ""
    assert err.getvalue() == "tahq-launch: no workers\n"
