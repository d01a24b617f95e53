"""Codecs that change during a run: recorded, replayed to the bit, kept across a stop."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.runs import Run, overrides, tiny, train

pytestmark = pytest.mark.ci

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
    """A metrics.jsonl with nothing but the codec of each step."""
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
    return train(folder, config(folder, replay=forced_record(folder)))


def test_each_step_uses_the_recorded_codec(forced):
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


@pytest.mark.acceptance
def test_resumed_run_keeps_its_current_codecs(forced, tmp_path):
    """Stopped between a change's decision and its first step; resumed without the record."""
    shutil.copy(forced.folder / "metrics.jsonl", tmp_path / "metrics.jsonl")
    follow = {"activations": UP, "gradients": DOWN, "raise_after": 100, "lower_after": 100}
    half = config(tmp_path, replay="metrics.jsonl", follow=follow)
    half["training"]["steps"] = 4
    train(tmp_path, half)
    rest = train(tmp_path, half, "--resume", *overrides(f"training.steps={STEPS}", "wire.replay=null"))
    assert codecs_by_step(rest) == codecs_by_step(forced)
    assert rest.losses == forced.losses


@pytest.mark.acceptance
def test_bits_fall_on_a_slow_link_and_the_run_can_be_replayed(tmp_path):
    """The link is so slow that a step's transfer takes ten times its computation, on a busy machine, too."""
    slow = config(tmp_path)
    slow["training"]["eval_every"] = None
    run = train(tmp_path, {**slow, "emulate": {"rate": "200kbit"}})
    assert codecs_by_step(run)[-1] == (UP[0], DOWN[0])
    changes = [change for row in run.metrics for change in row["codec_changes"]]
    assert {change["reason"] for change in changes} == {"bottleneck"}
    slow["wire"]["replay"] = str(run.folder / "metrics.jsonl")
    assert_same(train(tmp_path / "elsewhere", slow), run)
