"""The last words of a run."""

import math

from tahq.coordinator.observer import RunEnd
from tahq.observe.run_history import RunHistory
from tahq.observe.run_view import summary_text


def rows(text):
    return {line[:14].strip(): line[14:] for line in text.splitlines()[1:]}


def test_summary_says_what_a_run_came_to(history, end):
    text = summary_text(history, end, resume_command="tahq-launch c.yaml --resume", export_command="tahq export r OUT")
    assert text.splitlines()[0] == "run demo done: 20 of 20 steps in 10 s"
    assert rows(text) == {
        "loss": "3.9900 → 3.8000 nats per token; mean of 10 steps 3.9450 → 3.8450",
        "speed": "2,000 tokens/s, 0.5 s per step (medians)",
        "validation": "2.5000 (perplexity 12.18) after step 2; without the codec 2.0000 (7.389)",
        # 20 steps · (442,000 + 801,000) bytes; 20 · 1,600,000 elements are 128 MB in fp32
        "on the wire": "24.9 MB; fp32 128 MB (5.15×), fp16 64 MB (2.57×)",
        "activations": "8.82 MB, 4.41 bits per element",
        "gradients": "16 MB, 8.00 bits per element",
        "written to": "runs/demo (checkpoint after step 20)",
        "resume": "tahq-launch c.yaml --resume, with training.steps or epochs set to more",
        "export": "tahq export r OUT",
    }


def test_short_run_has_no_means(play_run):
    history = RunHistory()
    play_run(history, num_steps=3)
    text = summary_text(history, RunEnd(130, "stopped", 3, 20, None), resume_command="again")
    assert text.splitlines()[0] == "run demo ended with status 130: 3 of 20 steps in 1.5 s"
    assert rows(text)["loss"] == "3.9900 → 3.9700 nats per token"
    assert "resume" not in rows(text)
    stopped = summary_text(history, RunEnd(130, "stopped", 3, 20, 3), resume_command="tahq-launch c.yaml --resume")
    assert rows(stopped)["resume"] == "tahq-launch c.yaml --resume"
    assert rows(text)["written to"] == "runs/demo"


def test_resumed_run_says_how_many_steps_are_its_own(history):
    text = summary_text(history, RunEnd(0, "", 50, 50, 50))
    assert text.splitlines()[0] == "run demo done: 50 of 50 steps (20 of them since it was resumed) in 10 s"


def test_run_of_one_stage_says_nothing_of_wires(history, record, end):
    history.links.clear()
    assert "on the wire" not in summary_text(history, end)


def test_skipped_steps_are_counted(history, record, end):
    history.step_committed(record(21, loss=math.nan, skipped=True))
    text = summary_text(history, end)
    assert rows(text)["skipped"] == "1 of these steps, for NaN or infinity"
    assert "→ – nats" in rows(text)["loss"]
