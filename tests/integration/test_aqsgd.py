"""Training with AQ-SGD on real text: exact at every number of stages, few bits from the second epoch on, resumable."""

import os
from pathlib import Path

import pytest
import torch
from support.plain_loop import train_plainly
from support.runs import Run, assert_same_run, launch, overrides, tiny, train

from tahq.config.cluster import ClusterConfig

WIKITEXT = (
    Path(os.environ.get("TAHQ_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")) / "wikitext2-test.txt"
)
NUM_SAMPLES = 44
SAMPLE_NBYTES = 2 * 32 * 64
STEPS = 12  # of 8 samples: the second epoch begins within step 6, the third within step 11

pytestmark = pytest.mark.skipif(not WIKITEXT.exists(), reason="no wikitext2-test.txt; set TAHQ_SHARED_DATA")


def config(**sections) -> dict:
    training = {"steps": STEPS, "lr_schedule": "constant", "eval_every": 4, "eval_batches": 1}
    return tiny(
        data={"text": "text.txt", "validation": 0.1},
        wire={"activations": "aqsgd", "gradients": "fixed:bits=8"} | sections.pop("wire", {}),
        training=training | sections.pop("training", {}),
        pipeline={"stages": 3} | sections.pop("pipeline", {}),
        **sections,
    )


def folder_with_text(folder: Path) -> Path:
    text = WIKITEXT.read_text(encoding="utf-8").encode()[: 32 * 49 + 1].decode(errors="ignore")
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def three_stages(tmp_path_factory) -> Run:
    """The middle stage has no data, and still knows whose activations cross."""
    return train(folder_with_text(tmp_path_factory.mktemp("three")), config())


def bits(done: Run) -> list[list[float]]:
    """Bits per element of the activations of each cut, by step."""
    return [
        [link["bits_per_element"] for link in row["links"] if link["direction"] == "activations"]
        for row in done.metrics
    ]


def test_every_number_of_stages_is_the_plain_loop_with_a_codec_at_each_cut(three_stages, monkeypatch):
    sections = config()
    model = {**sections["model"], "vocab_size": 256}
    monkeypatch.chdir(three_stages.folder.parents[1])
    expected = train_plainly(ClusterConfig.model_validate({**sections, "model": model}), cut=True)
    assert three_stages.losses == expected.losses
    assert [row["grad_norm"] for row in three_stages.metrics] == expected.norms
    weights = three_stages.weights
    assert [name for name in weights if not torch.equal(weights[name], expected.weights[name])] == []


def test_bits_fall_from_16_to_4_with_the_second_epoch(three_stages):
    by_step = bits(three_stages)
    assert all(16 < value < 16.3 for step in by_step[:5] for value in step)
    assert all(4 < value < 16 for value in by_step[5])  # 4 samples of 8 are new
    assert all(4 < value < 4.5 for step in by_step[6:] for value in step)


def test_every_stage_reports_the_size_of_its_codec_state(three_stages):
    by_step = [[stage["codec_state_bytes"] for stage in row["stages"]] for row in three_stages.metrics]
    assert by_step[0] == [8 * SAMPLE_NBYTES, 16 * SAMPLE_NBYTES, 8 * SAMPLE_NBYTES]
    full = NUM_SAMPLES * SAMPLE_NBYTES
    assert all(step == [full, 2 * full, full] for step in by_step[5:])


def test_both_ends_of_every_cut_remember_the_same(three_stages):
    snapshot = three_stages.snapshot()
    sent = [name for name in snapshot if name.startswith("codec/") and "/sent/" in name]
    assert {name.split("/")[1] for name in sent} == {"block-0001", "block-0003"}
    for name in sent:
        assert torch.equal(snapshot[name], snapshot[name.replace("/sent/", "/received/")]), name


def test_evaluation_sees_the_first_visits_of_samples_it_never_trains_on(three_stages):
    for row in three_stages.metrics:
        if "validation" in row:
            # the wire rounds to fp16, 2^-11 of an activation
            assert row["validation"]["loss"] == pytest.approx(row["validation"]["loss_raw"], rel=1e-3)
            assert row["validation"]["loss"] != row["validation"]["loss_raw"]


@pytest.mark.acceptance
def test_resume_in_the_second_epoch_equals_uninterrupted_to_the_bit(tmp_path, three_stages):
    folder_with_text(tmp_path)
    half = config(training={"steps": 8})
    train(tmp_path, half)
    changes = overrides(f"training.steps={STEPS}", "wire.activations=aqsgd:cache=file")
    resumed = train(tmp_path, half, "--resume", *changes)
    assert_same_run(resumed, three_stages)
    assert bits(resumed) == bits(three_stages)
    assert "the continuation is exact" in resumed.stdout + resumed.stderr


@pytest.mark.acceptance
def test_skipped_step_leaves_both_ends_with_the_same_state(tmp_path):
    """Weights diverge: finite samples are sent and remembered, others neither."""
    folder_with_text(tmp_path)
    blown = config(
        training={"lr": 1e30, "clip_norm": None, "max_skipped_in_a_row": 8, "eval_every": None}, pipeline={"stages": 2}
    )
    done = launch(tmp_path, blown)
    assert done.returncode == 5, done.stderr
    assert "remember" not in done.stderr
    assert [row["skipped"] for row in done.metrics][:3] == [False, True, True]
    remembered = [row["stages"][0]["codec_state_bytes"] for row in done.metrics]
    assert remembered == [8 * SAMPLE_NBYTES] * len(remembered)
