"""Runs whose rows hold several records: the same bits on one stage and on three, of which the middle has no data."""

import json

import pytest
from support.runs import assert_same_run, finish, overrides, tiny, train
from support.small_slices import EXPERTS

BALANCED = {"overrides": {**EXPERTS["mixtral"], "output_router_logits": True, "router_aux_loss_coef": 0.1}}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({}, marks=pytest.mark.ci),
        pytest.param({"family": "mixtral", "num_kv_heads": 1, **BALANCED}, marks=pytest.mark.acceptance),
    ],
    ids=["dense", "counts of experts beside positions"],
)
def test_packed_run_has_the_same_bits_cut_and_resumed_and_transformers_finds_its_loss(tmp_path, model):
    pairs = [{"prompt": f"{n} times {n} is ", "response": f"{n * n}"} for n in range(200)]
    for folder in ("one", "three", "resumed"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = {"text": None, "records": "pairs.jsonl", "packing": True, "seq_len": 48, "validation": 0.2}
    config = tiny(model=model, data=data, training={"eval_every": 2, "eval_batches": 1}, run={"checkpoint_every": 2})
    one = train(tmp_path / "one", config, *overrides("pipeline.stages=1"))
    three = train(tmp_path / "three", config, *overrides("pipeline.stages=3"))
    assert_same_run(one, three)
    assert three.metrics[-1]["validation"] == one.metrics[-1]["validation"]

    train(tmp_path / "resumed", config, *overrides("pipeline.stages=3", "training.steps=2"))
    resumed = train(tmp_path / "resumed", config, *overrides("pipeline.stages=3"), "--resume")
    assert_same_run(resumed, three)

    done = finish(tmp_path / "three", "tahq", "eval", "tiny", "--batches", "1", "--json")
    found, validation = json.loads(done.stdout), three.metrics[-1]["validation"]
    assert found["tokens"] == validation["tokens"]
    assert found["loss"] == pytest.approx(validation["loss_raw"], rel=1e-5)
