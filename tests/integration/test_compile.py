"""Runs whose blocks are compiled: the same bits wherever the model is cut, and after a resume."""

import pytest
import torch
from support.runs import overrides, tiny, train

pytestmark = pytest.mark.ci


def config(stages: int, **training) -> dict:
    return tiny(pipeline={"stages": stages, "schedule": "auto"}, training={"compile": True, **training})


@pytest.mark.acceptance
def test_compiled_run_has_the_bits_of_other_cuts_and_of_a_resumed_one(tmp_path, monkeypatch):
    alone = train(tmp_path / "alone", config(1))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    divided = train(tmp_path / "divided", config(2, steps=2))
    assert any((tmp_path / "compiled").rglob("*.so"))
    divided = train(tmp_path / "divided", config(2), "--resume", *overrides("training.steps=4"))
    assert divided.losses == alone.losses
    weights = alone.weights
    assert [name for name, each in divided.weights.items() if not torch.equal(each, weights[name])] == []
    plain = train(tmp_path / "plain", config(1, compile=False))
    assert alone.losses == pytest.approx(plain.losses, abs=1e-5)
