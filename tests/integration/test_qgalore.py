"""Q-GaLore in real runs: the same losses at any number of stages, exact resume, a model that can be exported."""

import pytest
import torch
from support.runs import Run, finish, launch, tiny
from transformers import AutoModelForCausalLM

from tahq.memory.galore.stored_weight import snapshot_weight

LLAMA = {"family": "llama", "num_layers": 4, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96}
# Searches at steps 0, 2 and 4; each is found stable at once, so gaps double.
QGALORE = {"optimizer": "qgalore", "qgalore": {"gap": 2, "queue": 1, "threshold": 0.01, "max_gap": 4}, "lr": 3e-3}
INT8_ENDS = {"qgalore": {**QGALORE["qgalore"], "ends": "int8"}}
ENDS = ("model.embed_tokens.weight", "lm_head.weight")
TAH = {"activations": "tah", "gradients": "fixed:bits=8"}


def config(stages: int, *, steps: int = 5, training: dict | None = None, **sections) -> dict:
    return tiny(
        model=LLAMA,
        pipeline={"stages": stages},
        training={**QGALORE, "steps": steps, **(training or {})},
        **sections,
    )


def assert_same_state(one: Run, other: Run) -> None:
    left, right = one.snapshot(), other.snapshot()
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.fixture(scope="module")
def uncut(tmp_path_factory) -> Run:
    run = launch(tmp_path_factory.mktemp("uncut"), config(1))
    assert run.returncode == 0, run.stderr
    return run


def test_losses_and_snapshots_are_those_of_one_stage_at_two_with_backwards_in_two_parts(tmp_path, uncut):
    run = launch(tmp_path, config(2), "--set", "pipeline.schedule=zero-bubble")
    assert run.returncode == 0, run.stderr
    assert run.losses == uncut.losses
    assert {run.snapshot()[f"model/{name}"].dtype for name in ENDS} == {torch.bfloat16}
    assert [row["grad_norm"] for row in run.metrics] == [row["grad_norm"] for row in uncut.metrics]
    assert_same_state(run, uncut)


def test_a_run_of_four_stages_resumes_on_one_to_the_bit(tmp_path, uncut):
    """Stopped after step 3, before a search is due."""
    halfway = launch(tmp_path, config(4, steps=3))
    assert halfway.returncode == 0, halfway.stderr
    assert halfway.losses == uncut.losses[:3]
    run = launch(tmp_path, config(4, steps=3), "--resume", "--set", "training.steps=5", "--set", "pipeline.stages=1")
    assert run.returncode == 0, run.stderr
    assert "no longer exact" not in run.stdout
    assert run.losses == uncut.losses
    assert_same_state(run, uncut)


def test_four_stages_with_tah_on_the_wire_learn_resume_exactly_and_are_exported(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = launch(whole, config(4, steps=6, wire=TAH, training=INT8_ENDS))
    assert expected.returncode == 0, expected.stderr
    assert expected.losses[-1] < expected.losses[0]
    halfway = config(4, steps=3, wire=TAH, training=INT8_ENDS)
    assert launch(tmp_path, halfway).returncode == 0
    run = launch(tmp_path, halfway, "--resume", "--set", "training.steps=6")
    assert run.losses == expected.losses
    assert_same_state(run, expected)

    done = finish(whole, "tahq", "export", str(expected.folder), "exported")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(whole / "exported")
    snapshot = expected.snapshot()
    for name in ("model.layers.3.mlp.down_proj.weight", *ENDS):
        assert snapshot[f"model/{name}"].dtype == torch.int8
        assert torch.equal(model.get_parameter(name), snapshot_weight(name, snapshot.__getitem__))


def test_a_fused_backward_gives_the_bits_of_a_commit(tmp_path):
    alone = {"micro_batch": 8, "clip_norm": None, "non_finite": "halt", "activation_checkpointing": "block"}
    separate = launch(tmp_path, config(1, steps=3, training=alone))
    assert separate.returncode == 0, separate.stderr
    fused = tmp_path / "fused"
    fused.mkdir()
    run = launch(fused, config(1, steps=3, training=alone), "--set", "training.qgalore.fused=true")
    assert run.returncode == 0, run.stderr
    assert run.losses == separate.losses
    norms = [[row["grad_norm"] for row in each.metrics] for each in (run, separate)]
    assert norms[0] == norms[1]
    assert_same_state(run, separate)


def test_galore_at_full_rank_and_scale_one_is_adamw(tmp_path):
    keys = {"optimizer": "galore", "qgalore": {"rank": 96, "scale": 1.0}}
    run = launch(tmp_path, config(2, steps=3, training=keys))
    assert run.returncode == 0, run.stderr
    plain = tmp_path / "plain"
    plain.mkdir()
    expected = launch(plain, config(2, steps=3, training={"optimizer": "adamw", "qgalore": {}}))
    assert run.losses[0] == expected.losses[0]
    assert run.losses == pytest.approx(expected.losses, abs=1e-5)


@pytest.mark.parametrize("ends", ["bf16", "int8"])
def test_tied_copies_in_few_bits_stay_equal_and_follow_one_stage(tmp_path, ends):
    """On one stage the same two gradients are added in the same order, so it is to the bit."""
    runs = {}
    training = {"steps": 3, "optimizer": "qgalore", "qgalore": {"ends": ends}}
    for stages in (1, 2):
        folder = tmp_path / str(stages)
        folder.mkdir()
        runs[stages] = launch(folder, tiny(model={"tie": "sync"}, pipeline={"stages": stages}, training=training))
        assert runs[stages].returncode == 0, runs[stages].stderr
        weights = runs[stages].weights
        assert torch.equal(weights["transformer.wte.weight"], weights["lm_head.weight"])
    assert runs[2].losses == runs[1].losses
    assert_same_state(runs[2], runs[1])
