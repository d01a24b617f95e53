"""Codecs that change while a run goes on: recorded, repeated to the bit, kept over a stop."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.runs import Run, launch, tiny

UP = ["wf:bits=2", "wf:bits=4", "wf:bits=6"]
DOWN = ["eden:bits=2", "eden:bits=4"]
STEPS = 6
CUT = ((0, "activations"), (0, "gradients"))
FORCED = {1: (UP[1], DOWN[1]), 2: (UP[0], DOWN[1]), 4: (UP[2], DOWN[0]), 5: (UP[2], DOWN[1])}
"""Codecs by the first step that has them."""


def config(folder: Path, **wire) -> dict:
    follow = {"activations": UP, "gradients": DOWN, "guard": {"measure_every": 2}}
    return tiny(
        model={"num_layers": 2, "hidden_size": 256},
        wire={"activations": UP[1], "gradients": DOWN[1], "follow": follow, **wire},
        training={"steps": STEPS, "lr_schedule": "constant", "eval_every": 3, "eval_batches": 1},
        pipeline={"stages": 2},
    )


def forced_record(folder: Path) -> str:
    """A metrics.jsonl with nothing in it but which codecs were in force."""
    path = folder / "forced.jsonl"
    rows, codecs = [], FORCED[1]
    for step in range(1, STEPS + 1):
        codecs = FORCED.get(step, codecs)
        links = [{"link": link, "direction": d, "codec": c} for (link, d), c in zip(CUT, codecs, strict=True)]
        rows.append(json.dumps({"step": step, "links": links}))
    path.write_text("\n".join(rows))
    return str(path)


def codecs_by_step(run: Run) -> list[tuple[str, ...]]:
    return [tuple(link["codec"].partition(",")[0] for link in row["links"]) for row in run.metrics]


def assert_same(left: Run, right: Run) -> None:
    assert left.losses == right.losses
    assert [row.get("validation") for row in left.metrics] == [row.get("validation") for row in right.metrics]
    ours, theirs = left.weights, right.weights
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def forced(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("forced")
    run = launch(folder, config(folder, replay=forced_record(folder)))
    assert run.returncode == 0, run.stderr
    return run


def test_each_step_crosses_in_the_codec_that_is_recorded_for_it(forced):
    wanted = [FORCED[max(since for since in FORCED if since <= step)] for step in range(1, STEPS + 1)]
    assert codecs_by_step(forced) == wanted
    bits = [[round(link["bits_per_element"]) for link in row["links"]] for row in forced.metrics]
    assert [[int(spec.partition("=")[2]) for spec in pair] for pair in wanted] == bits
    changed = {row["step"]: {change["reason"] for change in row["codec_changes"]} for row in forced.metrics}
    assert changed == {1: {"replay"}, 2: set(), 3: {"replay"}, 4: {"replay"}, 5: set(), 6: set()}
    errors = [[link["relative_error"] is not None for link in row["links"]] for row in forced.metrics]
    assert errors == [[True, True], [False, False]] * 3
    log = (forced.folder / "logs" / "launcher.log").read_text()
    assert "after step 1: link 0, activations: wf:bits=4" in log


def test_a_run_repeated_from_its_own_metrics_is_the_same_to_the_bit(forced, tmp_path):
    again = launch(tmp_path, config(tmp_path, replay=str(forced.folder / "metrics.jsonl")))
    assert again.returncode == 0, again.stderr
    assert_same(again, forced)


def test_a_run_that_stops_goes_on_with_the_codecs_that_were_in_force(forced, tmp_path):
    """Stopped after a change was decided and before it held; resumed without the record, held by a short patience."""
    shutil.copy(forced.folder / "metrics.jsonl", tmp_path / "metrics.jsonl")
    follow = {"activations": UP, "gradients": DOWN, "raise_after": 100, "lower_after": 100}
    half = config(tmp_path, replay="metrics.jsonl", follow=follow)
    half["training"]["steps"] = 4
    assert launch(tmp_path, half).returncode == 0
    rest = launch(tmp_path, half, "--resume", "--set", f"training.steps={STEPS}", "--set", "wire.replay=null")
    assert rest.returncode == 0, rest.stderr
    assert codecs_by_step(rest) == codecs_by_step(forced)
    assert rest.losses == forced.losses


def test_bits_fall_where_a_link_is_slow_and_the_run_can_be_repeated_elsewhere(tmp_path):
    """Shaped so that a step's bytes take ten times what computing does, on a machine that is busy, too."""
    slow = config(tmp_path)
    slow["training"]["eval_every"] = None
    run = launch(tmp_path, {**slow, "links": {"rate": "200kbit"}})
    assert run.returncode == 0, run.stderr
    assert codecs_by_step(run)[-1] == (UP[0], DOWN[0])
    changes = [change for row in run.metrics for change in row["codec_changes"]]
    assert {change["reason"] for change in changes} == {"bottleneck"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    slow["wire"]["replay"] = str(run.folder / "metrics.jsonl")
    again = launch(elsewhere, slow)
    assert again.returncode == 0, again.stderr
    assert_same(again, run)
