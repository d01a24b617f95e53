"""The long trainings in one process: the losses of a real pipeline, schedules, continuing, the corpus."""

import json
import math
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from itertools import count
from pathlib import Path

import cut_training
import make_checkpoint
import pytest
import torch
from bench_compression_cost import step_times_s, steps_to
from codec_schedule import Schedule, Wire
from corpus_questions import exact_matches
from cut_training import CutTraining
from harness import launch, read_rows
from option_training import OPTIONS
from stored_training import REDUCE, ReplicaTraining

from tahq.data.config import DataConfig
from tahq.models.config import ModelConfig

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(cut_training, "BATCH", 4)
    monkeypatch.setattr(cut_training, "HELD_OUT_BATCHES", 1)


def training(model="tiny-llama"):
    made = ReplicaTraining if model.partition("/")[2] in REDUCE else CutTraining
    return made(model, DataConfig(text="stdlib", seq_len=32), CPU)


@pytest.mark.acceptance
def test_trainings_with_every_option_have_about_the_same_losses():
    losses = {}
    for option in OPTIONS:
        each = training(f"tiny-llama/{option}")
        losses[option] = [*each.run(Wire.parse(), seed=0, steps=4), each.held_out_loss()]
    base = losses.pop("bf16")
    assert base[0] == pytest.approx(math.log(256), abs=0.2)
    for option, found in losses.items():
        assert found == pytest.approx(base, abs=0.05), option
        assert found != base, option


def test_schedule_uses_other_codecs_by_cut_and_by_share_of_the_steps():
    schedule = Schedule.parse("wf:bits=5 / wf:bits=4 / wf:bits=3 @0.5 wf:bits=6 @0.9 none")
    names = [[schedule.at(step, 10, cut) for cut in range(3)] for step in (0, 4, 5, 9)]
    assert names == [["wf:bits=5", "wf:bits=4", "wf:bits=3"]] * 2 + [["wf:bits=6"] * 3, ["none"] * 3]
    assert Schedule.parse(str(schedule)) == schedule
    wire = Wire.parse("wf:bits=5 / wf:bits=4 / wf:bits=4", "eden:bits=2")
    of_two, of_four = (wire.uplink_bits(0, 1, stages, 3) for stages in (2, 4))
    assert of_two == pytest.approx(4.09, abs=0.01)
    assert of_four == pytest.approx(4.09 + 2.04, abs=0.01)  # the stage behind the first sends 4 bits and gradients


def test_time_to_a_loss_follows_the_busiest_uplink_in_every_step():
    mbit = 16 * 512 * 768 / 1e6  # of a bit per element
    none, phases = ("gpt2", "none", "none"), ("gpt2", "wf:bits=4 @0.5 wf:bits=8", "eden:bits=2")
    assert step_times_s(none, 4, 32.0, 0.1) == pytest.approx([mbit] * 4)  # 16 bits both ways
    early, later = step_times_s(phases, 4, mbit, 0.1)[::3]
    assert (early, later) == pytest.approx((6.13, 10.13), abs=0.02)
    assert step_times_s(phases, 4, mbit, 0.1, stages=2)[0] == pytest.approx(4.09, abs=0.01)
    assert step_times_s(phases, 4, 1e6, 0.1) == [0.1] * 4
    curve = [3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0]
    assert steps_to(curve, 2.0) == 60
    assert steps_to(curve, 1.5) is None


def test_codecs_change_the_held_out_loss_only_where_they_are_used():
    each = training()
    each.run(Wire.parse("wf:bits=2", "eden:bits=2"), seed=0, steps=12)
    without, coded = each.held_out_loss(), each.held_out_loss(with_codecs=True)
    assert coded != without
    assert coded == pytest.approx(without, abs=0.5)
    each.run(Wire.parse("wf:bits=2 @0.5 none", "eden:bits=2"), seed=0, steps=12)
    assert each.held_out_loss() == each.held_out_loss(with_codecs=True)


def test_interrupted_training_goes_on_to_the_bit(tmp_path):
    wire, state = Wire.parse("wf:bits=4", "eden:bits=2 @0.5 eden:bits=3"), tmp_path / "state.pt"
    whole = training().run(wire, seed=1, steps=8)
    first = training()
    taken = first.compute_gradients

    def slow(*arguments):
        time.sleep(0.05)
        return taken(*arguments)

    first.compute_gradients = slow
    begun = first.run(wire, seed=1, steps=8, deadline_s=time.time() + 0.2, state=state)
    assert 0 < len(begun) < 8
    assert training().run(wire, seed=1, steps=8, state=state) == whole
    assert not state.exists()


@pytest.mark.acceptance
def test_losses_are_those_of_a_run_over_slow_links():
    each = training()
    losses = each.run(Wire.parse("wf:bits=4", "eden:bits=2", "auto"), seed=3, steps=8)
    config = each.config(3, 8).model_dump(mode="json", exclude_unset=True)
    config |= {
        "wire": {"activations": "wf:bits=4", "gradients": "eden:bits=2"},
        "emulate": {"rate": "50mbit", "delay": "5ms"},
    }
    assert [step["loss"] for step in launch(config).steps] == pytest.approx(losses, abs=2e-6)


@pytest.mark.acceptance
def test_interrupted_table_goes_on_from_its_rows(tmp_path):
    out, script = tmp_path / "cost.md", Path(cut_training.__file__).with_name("bench_compression_cost.py")
    pairs = ["--pairs", "none + none", "wf:bits=4 @0.5 none + eden:bits=2", "--model", "tiny", "--seeds", "2"]
    small = [*pairs, "--steps", "12", "--processes", "1", "--backend", "auto", "--output", str(out)]
    command = [sys.executable, str(script), *small, "--state", str(tmp_path / "state")]
    for seconds in (["--seconds", "25"], []):
        done = subprocess.run([*command, *seconds], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        rows = read_rows(out.with_suffix(".jsonl"))
    assert len(rows) == 4
    assert rows[1]["held_out"] == rows[1]["held_out_coded"]
    assert "| `wf:bits=4 @0.5 none` | `eden:bits=2` |" in out.read_text()
    again = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stderr
    assert read_rows(out.with_suffix(".jsonl")) == rows


def test_checkpoint_is_a_folder_that_a_training_begins_with(tmp_path, monkeypatch):
    tied = cut_training.MODELS["tiny-llama"].model_copy(update={"tie": "sync"})
    monkeypatch.setitem(cut_training.MODELS, "tied", ModelConfig.model_validate(tied.model_dump(exclude_unset=True)))
    monkeypatch.setattr(make_checkpoint, "data_config", lambda options: DataConfig(text="stdlib", seq_len=32))
    out = tmp_path / "checkpoint"
    sizes = {"model": "tied", "steps": 30, "lr": 6e-4, "seed": 0, "compile": False, "held_out_batches": 2}
    options = Namespace(**sizes, output=out, state=tmp_path / "state", seconds=20)
    ticks = Namespace(time=partial(next, count()))  # a clock of which a step takes two
    for module in (cut_training, make_checkpoint):
        monkeypatch.setattr(module, "time", ticks)
    with pytest.raises(SystemExit, match=r"[1-9]\d? of 30 steps are done"):
        make_checkpoint.make(options)
    made = make_checkpoint.make(Namespace(**{**vars(options), "seconds": math.inf}))
    assert made["held_out"] < math.log(256) - 0.5
    still = CutTraining(str(out), DataConfig(text="stdlib", seq_len=32), CPU, {"training": {"lr": 1e-12}})
    still.run(Wire.parse(), seed=7, steps=1)
    assert still.held_out_loss(num_batches=2) == pytest.approx(made["held_out"], abs=1e-4)
    recorded = tmp_path / "recorded.json"
    recorded.write_text(json.dumps({**made, "held_out": made["held_out"] + 0.009}))
    make_checkpoint.check(made, recorded)
    recorded.write_text(json.dumps({**made, "held_out": made["held_out"] + 0.011}))
    with pytest.raises(SystemExit, match="expected"):
        make_checkpoint.check(made, recorded)


def test_answers_are_exact_once_they_are_learned(tmp_path):
    records = [{"prompt": f"{word}?", "response": f" {answer}"} for word, answer in (("ab", "x"), ("cd", "yz"))]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in records * 8))
    each = CutTraining("tiny-llama", DataConfig(records=str(file), seq_len=16, validation=0.0), CPU)
    each.run(Wire.parse(), seed=0, steps=1)
    assert exact_matches(each.model, each.tokenizer, records) == 0
    each.run(Wire.parse(), seed=0, steps=60)
    assert exact_matches(each.model, each.tokenizer, records) == 1
    assert exact_matches(each.model, each.tokenizer, [*records, {"prompt": "ab?", "response": " xx"}]) == 2 / 3
