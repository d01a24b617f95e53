"""Q-GaLore in real runs: the same losses at any number of stages, exact resume, a model that can be exported."""

import pytest
import torch
from support.runs import Run, assert_same_run, finish, overrides, tiny, train
from transformers import AutoModelForCausalLM

from tahq.memory.galore.stored_weight import snapshot_weight

pytestmark = pytest.mark.ci

LLAMA = {"family": "llama", "num_layers": 4, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96}
# Searches at step 0, then at 2 in the first two layers and at 3 in the others; found stable at once, so gaps double.
QGALORE = {"optimizer": "qgalore", "qgalore": {"gap": 2, "queue": 1, "threshold": 0.01, "max_gap": 4}, "lr": 3e-3}
INT8_ENDS = {"qgalore": {**QGALORE["qgalore"], "ends": "int8"}}
ENDS = ("model.embed_tokens.weight", "lm_head.weight")
TAH = {"activations": "tah", "gradients": "fixed:bits=8"}


def config(stages: int, *, steps: int = 5, training: dict | None = None, **sections) -> dict:
    training = {**QGALORE, "steps": steps, **(training or {})}
    return tiny(model=LLAMA, pipeline={"stages": stages}, training=training, **sections)


def norms(run: Run) -> list[float]:
    return [row["grad_norm"] for row in run.metrics]


@pytest.fixture(scope="module")
def uncut(tmp_path_factory) -> Run:
    return train(tmp_path_factory.mktemp("uncut"), config(1))


def test_two_stages_with_split_backward_equal_one_stage(tmp_path, uncut):
    run = train(tmp_path, config(2), *overrides("pipeline.schedule=zero-bubble"))
    assert {run.snapshot()[f"model/{name}"].dtype for name in ENDS} == {torch.bfloat16}
    assert norms(run) == norms(uncut)
    assert_same_run(run, uncut)


def test_four_stages_resume_on_one_to_the_bit(tmp_path, uncut):
    """Stopped after three steps, when half of the layers have been searched again."""
    halfway = config(4, steps=3)
    assert train(tmp_path, halfway).losses == uncut.losses[:3]
    run = train(tmp_path, halfway, "--resume", *overrides("training.steps=5", "pipeline.stages=1"))
    assert "no longer exact" not in run.stdout
    assert_same_run(run, uncut)


@pytest.mark.acceptance
def test_four_stages_with_tah_learn_resume_exactly_and_are_exported(tmp_path):
    whole = tmp_path / "whole"
    expected = train(whole, config(4, steps=6, wire=TAH, training=INT8_ENDS))
    assert expected.losses[-1] < expected.losses[0]
    halfway = config(4, steps=3, wire=TAH, training=INT8_ENDS)
    train(tmp_path, halfway)
    assert_same_run(train(tmp_path, halfway, "--resume", *overrides("training.steps=6")), expected)

    done = finish(whole, "tahq", "export", str(expected.folder), "exported")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(whole / "exported")
    snapshot = expected.snapshot()
    for name in ("model.layers.3.mlp.down_proj.weight", *ENDS):
        assert snapshot[f"model/{name}"].dtype == torch.int8
        assert torch.equal(model.get_parameter(name), snapshot_weight(name, snapshot.__getitem__))


@pytest.mark.acceptance
def test_tied_copies_stay_equal_and_follow_one_stage(tmp_path):
    """On one stage the same two gradients are added in the same order, so it is to the bit."""
    training = {"steps": 3, "optimizer": "qgalore", "qgalore": {"ends": "int8"}}
    one, two = (
        train(tmp_path / str(stages), tiny(model={"tie": "sync"}, pipeline={"stages": stages}, training=training))
        for stages in (1, 2)
    )
    for run in (one, two):
        assert torch.equal(run.weights["transformer.wte.weight"], run.weights["lm_head.weight"])
    assert_same_run(two, one)
