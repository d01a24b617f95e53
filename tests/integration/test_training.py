"""Runs beyond the arithmetic of a step: epochs, validation, tied embeddings, NaN, disagreement."""

import re
import subprocess

import pytest
import torch
from safetensors import safe_open
from support.runs import launch, overrides, start, tiny, train, write_config
from support.warm_process import WarmProcess


def test_validation_without_a_lossy_codec_is_the_same_with_and_without(tmp_path):
    run = train(tmp_path, tiny(pipeline={"stages": 2}, training={"steps": 2, "eval_every": 1, "eval_batches": 2}))
    for row in run.metrics:
        assert row["validation"]["loss"] == row["validation"]["loss_raw"]
        assert row["validation"]["perplexity"] == pytest.approx(2.718281828 ** row["validation"]["loss"], rel=1e-6)


def test_epochs_end_after_their_samples_also_with_shorter_ones(tmp_path):
    (tmp_path / "text.txt").write_text("a line of text to learn, again and again\n" * 60)
    config = tiny(
        data={"text": "text.txt", "validation": 0.0},
        training={"steps": None, "epochs": 1.0},
        pipeline={"stages": 1},
        run={"checkpoint_every": 1},
    )
    first = train(tmp_path, config)
    samples = (60 * 41 - 1) // 32  # windows of 32 tokens with a label each
    done = len(first.losses)
    assert done == samples // 8
    resumed = train(tmp_path, config, "--resume", *overrides("training.epochs=2", "data.seq_len=16"))
    shorter = (60 * 41 - 1) // 16
    place = done * 8 * shorter // samples
    assert len(resumed.losses) == done + (2 * shorter - place) // 8


def test_tied_embeddings_stay_equal_and_follow_one_stage(tmp_path):
    """The two gradients are added in another order than in one stage: fp32 rounding, grown over four steps."""
    one, three = (
        train(tmp_path / str(stages), tiny(model={"tie": "sync"}, pipeline={"stages": stages})) for stages in (1, 3)
    )
    for run in (one, three):
        assert torch.equal(run.weights["transformer.wte.weight"], run.weights["lm_head.weight"])
    assert three.losses == pytest.approx(one.losses, abs=1e-5)
    norms = [[row["grad_norm"] for row in run.metrics] for run in (one, three)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize(("policy", "num_steps"), [("halt", 2), ("skip", 4)])
def test_non_finite_gradients_are_one_decision_for_all_stages(tmp_path, policy, num_steps):
    config = tiny(
        wire={"activations": "tah", "gradients": "fixed:bits=8"},
        pipeline={"stages": 2},
        training={"steps": 50, "lr": 1e30, "clip_norm": None, "non_finite": policy, "max_skipped_in_a_row": 2},
    )
    run = launch(tmp_path, config)
    assert run.returncode == 5, run.stderr
    assert run.stderr.count("\n") == 1, run.stderr
    assert "Traceback" not in run.stderr
    skipped = [row["skipped"] for row in run.metrics]
    assert skipped[0] is False
    assert all(skipped[1:])
    assert len(skipped) <= num_steps
    # the last step ended the run, and is none of those that were skipped
    kept = sorted((run.folder / "non_finite").iterdir())
    assert [path.name for path in kept] == [f"step-{step:08}.safetensors" for step in range(2, len(skipped) + 2)]
    with safe_open(kept[0], "pt") as file:
        assert file.metadata()["step"] == "2"
        assert file.get_tensor("tokens").shape == file.get_tensor("labels").shape
        assert len(file.get_tensor("sample_ids")) == len(file.get_tensor("tokens"))


def test_worker_with_other_data_is_refused_by_field_name(tmp_path):
    folders = [tmp_path / name for name in ("first", "last")]
    for folder in folders:
        folder.mkdir()
        (folder / "text.txt").write_text(f"what {folder.name} has on its disk\n" * 200)
    config = tiny(data={"text": "text.txt"}, pipeline={"stages": 2}, run={"join_timeout": "60s"})
    write_config(tmp_path, config)
    coordinator = start(tmp_path, "tahq", "coordinator", "cluster.yaml", "--bind", "127.0.0.1:0")
    try:
        peer = coordinator.stdout.readline().split()[-1]
        workers = [
            start(folder, "tahq-worker", "--stage", str(stage), "--peer", peer) for stage, folder in enumerate(folders)
        ]
        refused = wait_for_one(workers)
        _, stderr = refused.communicate()
        assert refused.returncode == 2
        dialling, joined, said = stderr.splitlines()
        assert ("dialling" in dialling, "joined" in joined) == (True, True)
        assert "data_hash" in said
    finally:
        coordinator.terminate()
        coordinator.communicate(timeout=60)
        for worker in workers:
            worker.communicate(timeout=60)


def wait_for_one(processes: list[WarmProcess], timeout_s: float = 120) -> WarmProcess:
    """The first of these that has ended."""
    for _ in range(int(timeout_s / 0.1)):
        for process in processes:
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            return process
    raise AssertionError(f"none of {processes} ended in {timeout_s} s")


@pytest.mark.acceptance
def test_long_step_says_how_many_micro_batches_each_stage_has_done(tmp_path):
    """Two stages, four micro-batches of 2 s each."""
    config = tiny(
        emulate={"sleep": {"forward": "1s", "backward": "1s"}},
        pipeline={"stages": 2},
        training={"steps": 1},
        run={"peer_timeout": "5s"},
    )
    lines = train(tmp_path, config).stdout.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("step 1/1 "))
    told = [line for line in lines[:first] if re.match(r"step 1, \d+ s so far: ", line)]
    assert re.search(r"stages?\b.* 0\b.*: micro-batch [2-4]/4 (forward|backward)", told[0])
    assert re.search(r"stages?\b.* 1\b.*: micro-batch [1-4]/4 (forward|backward)", told[0])
