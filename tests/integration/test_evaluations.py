"""Evaluations of real runs: validation sets, the best checkpoint, early stopping, samples."""

import json

import pytest
import torch
from integration.test_exactness import EXPERTS_MODEL
from safetensors.torch import load_file
from support.runs import assert_same_run, finish, launch, overrides, tiny, train

from tahq import fault_points
from tahq.pipeline.checkpoint.manifest import read_manifest
from tahq.pipeline.checkpoint.stage_file import SnapshotReader

pytestmark = pytest.mark.ci


def test_each_validation_set_has_the_loss_that_it_has_alone(tmp_path):
    def validated(name, validation):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "other.txt").write_text("a text that is not trained on, line by line\n" * 50)
        training = {"steps": 2, "eval_every": 1, "eval_batches": 2}
        return train(folder, tiny(pipeline={"stages": 2}, training=training, data={"validation": validation}))

    both = validated("both", {"own": 0.05, "other": "other.txt"})
    own, other = validated("own", 0.05), validated("other", "other.txt")
    assert both.losses == own.losses != other.losses  # which holds nothing out
    assert [row["validation"] for row in both.metrics] == [row["validation"] for row in own.metrics]
    assert both.metrics[0]["validations"]["own"] == both.metrics[0]["validation"]
    assert both.metrics[0]["validations"]["other"]["tokens"] == other.metrics[0]["validation"]["tokens"]
    assert "; other: loss " in both.stdout


@pytest.mark.acceptance
def test_run_that_stops_early_has_its_best_weights_and_goes_on_when_resumed(tmp_path):
    """A loss never falls by 10 nats, so the second evaluation ends the run; its loss is the lowest nevertheless."""
    early = {"eval_every": 2, "eval_batches": 1, "early_stopping": {"patience": 1, "min_delta": 10.0}}
    wire = {"activations": "tah", "gradients": "fixed:bits=6"}
    config = tiny(pipeline={"stages": 2}, training={"steps": 20, **early}, wire=wire)
    run = train(tmp_path / "early", config)
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5]
    assert "stopped after step 5 of 20: no validation loss was lower by more than 10 in 1 eval" in run.stderr
    assert (run.folder / "snapshots" / "best").read_text() == "step-00000004\n"
    four = train(tmp_path / "four", tiny(pipeline={"stages": 2}, training={"steps": 4}, wire=wire))
    exported = finish(tmp_path / "early", "tahq", "export", "runs/tiny", "model", "--best")
    assert exported.returncode == 0, exported.stderr
    weights = load_file(tmp_path / "early" / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in four.weights.items())
    best = run.folder / "snapshots" / "step-00000004"
    reader, expected = SnapshotReader(best, read_manifest(best).sha256), four.snapshot()
    assert reader.names() == expected.keys()
    assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in expected.items())
    status = finish(tmp_path / "early", "tahq", "status", "tiny").stdout
    assert status.startswith("tiny: done: stopped after step 5 of 20: no validation loss was lower")
    assert "best checkpoint after step 4" in status
    resumed = launch(tmp_path / "early", config, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "the run had stopped early: no validation loss was lower" in resumed.stdout
    assert [row["step"] for row in resumed.metrics] == [1, 2, 3, 4, 5, 6, 7]
    longer = launch(tmp_path / "early", config, "--resume", *overrides("training.early_stopping.patience=100"))
    assert [row["step"] for row in longer.metrics][-1] == 20


PROMPTS = ["def main(", "import"]
SAMPLES = {"every": 2, "prompts": PROMPTS, "max_tokens": 8}


def written(run):
    return [(row["step"], row["samples"]) for row in run.metrics if "samples" in row]


@pytest.mark.parametrize(
    "pipeline",
    [
        {"stages": 4},
        pytest.param({"stages": 1}, marks=pytest.mark.acceptance),
        pytest.param({"stages": 2, "chunks": 2, "schedule": "interleaved"}, marks=pytest.mark.acceptance),
    ],
    ids=str,
)
def test_samples_are_those_of_the_exported_model_and_change_no_bit(tmp_path, pipeline):
    training = {"steps": 4, "eval_every": 4, "eval_batches": 1, "lr": 1e-2}
    run = train(tmp_path / "with", tiny(pipeline=pipeline, training={**training, "samples": SAMPLES}))
    assert_same_run(run, train(tmp_path / "without", tiny(pipeline=pipeline, training=training)))
    assert [step for step, _ in written(run)] == [2, 4]
    for sample in written(run)[-1][1]:
        text = finish(tmp_path / "with", "tahq", "generate", "tiny", sample["prompt"], "--tokens", "8").stdout
        assert text == f"{sample['prompt']}{sample['text']}\n"
        assert sample["text"]
    assert 'sample after step 4: "import" → "' in run.stdout


@pytest.mark.acceptance
def test_packed_validation_sets_and_samples_do_not_depend_on_the_cut_with_frozen_layers_and_experts(tmp_path):
    pairs = [{"prompt": f"{n} times {n} is ", "response": f"{n * n}"} for n in range(200)]
    data = {"text": None, "records": "pairs.jsonl", "packing": True, "seq_len": 48}
    data["validation"] = {"own": 0.1, "pairs": "held-out.jsonl", "text": "held-out.txt"}
    training = {"steps": 2, "eval_every": 2, "eval_batches": 1, "samples": SAMPLES}
    model = {**EXPERTS_MODEL, "frozen_layers": 2}

    def trained(stages):
        folder = tmp_path / str(stages)
        folder.mkdir()
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        (folder / "held-out.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs[::3]))
        (folder / "held-out.txt").write_text("a text that is not trained on, line by line\n" * 50)
        return train(folder, tiny(pipeline={"stages": stages}, model=model, data=data, training=training))

    one, three = trained(1), trained(3)
    assert_same_run(one, three)
    assert three.metrics[-1]["validations"] == one.metrics[-1]["validations"]
    assert written(three) == written(one)
    assert [step for step, _ in written(three)] == [2]
    found = json.loads(finish(tmp_path / "3", "tahq", "eval", "tiny", "--batches", "1", "--json").stdout)["sets"]
    for name, validation in three.metrics[-1]["validations"].items():
        assert found[name]["tokens"] == validation["tokens"]
        assert found[name]["loss"] == pytest.approx(validation["loss_raw"], rel=1e-5)


@pytest.mark.parametrize(
    "wire",
    [
        {"activations": "aqsgd", "gradients": "tah"},
        pytest.param({"activations": "wf:bits=4", "gradients": "eden:bits=3"}, marks=pytest.mark.acceptance),
    ],
)
def test_samples_leave_what_codecs_remember_and_draw_as_it_is(tmp_path, wire):
    training = {"steps": 4}
    with_samples = tiny(pipeline={"stages": 2}, training={**training, "samples": SAMPLES}, wire=wire)
    run = train(tmp_path / "with", with_samples)
    assert_same_run(run, train(tmp_path / "without", tiny(pipeline={"stages": 2}, training=training, wire=wire)))
    assert [len(samples) for _, samples in written(run)] == [2, 2]


@pytest.mark.acceptance
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stage_lost_while_samples_are_written_comes_back_and_nothing_differs(tmp_path, monkeypatch, stage):
    config = tiny(
        run={"checkpoint_every": 3, "peer_timeout": "10s"},
        model={"num_layers": 3, "hidden_size": 32},
        training={"steps": 7, "samples": SAMPLES, "eval_every": 2, "eval_batches": 1},
        pipeline={"stages": 3},
        wire={"activations": "tah", "gradients": "fixed:bits=6"},
    )
    calm = train(tmp_path / "calm", config)
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv(fault_points.FAULTS, f"kill@sampling:stage={stage}:step=3")
    monkeypatch.setenv(fault_points.FOLDER, str(tmp_path / "faults"))
    run = train(tmp_path / "lost", config)
    assert len(list((tmp_path / "faults").iterdir())) == 1
    assert f"stage {stage} " in run.stdout
    assert "it is started again" in run.stdout
    assert_same_run(run, calm)
    assert written(run) == written(calm)
    assert [step for step, _ in written(run)] == [2, 4, 6, 7]
