"""Evaluations of real runs: validation sets, the best checkpoint, early stopping, samples."""

import pytest
import torch
from safetensors.torch import load_file
from support.runs import finish, launch, overrides, tiny, train

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


def test_run_that_stops_early_has_its_best_weights_and_goes_on_when_resumed(tmp_path):
    """A loss never falls by 10 nats, so the second evaluation ends the run; its loss is the lowest nevertheless."""
    early = {"eval_every": 2, "eval_batches": 1, "early_stopping": {"patience": 1, "min_delta": 10.0}}
    wire = {"activations": "tah", "gradients": "fixed:bits=6"}
    config = tiny(pipeline={"stages": 2}, training={"steps": 20, **early}, wire=wire)
    run = launch(tmp_path / "early", config)
    assert run.returncode == 0, run.stderr
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5]
    assert "stopped after step 5 of 20: no validation loss was lower by more than 10 in 1 eval" in run.stderr
    assert (run.folder / "snapshots" / "best").read_text() == "step-00000004\n"
    four = train(tmp_path / "four", tiny(pipeline={"stages": 2}, training={"steps": 4}, wire=wire))
    exported = finish(tmp_path / "early", "tahq", "export", "runs/tiny", "model", "--best")
    assert exported.returncode == 0, exported.stderr
    weights = load_file(tmp_path / "early" / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in four.weights.items() if name in weights)
    assert "best checkpoint  after step 4" in finish(tmp_path / "early", "tahq", "status", "tiny").stdout
    resumed = launch(tmp_path / "early", config, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "the run had stopped early: no validation loss was lower" in resumed.stdout
    assert [row["step"] for row in resumed.metrics] == [1, 2, 3, 4, 5, 6, 7]
    longer = launch(tmp_path / "early", config, "--resume", *overrides("training.early_stopping.patience=100"))
    assert [row["step"] for row in longer.metrics][-1] == 20
