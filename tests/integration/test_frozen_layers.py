"""`model.frozen_layers`: the first layers keep their weights, and no gradient is computed for, or sent to, them."""

from itertools import accumulate

import pytest
import torch
from integration.test_families import saved_model, train_in_one_loop
from safetensors.torch import load_file
from support.exactness import assert_equal_to_the_bit, plain
from support.runs import assert_same_run, finish, launch, tiny, train

from tahq import fault_points
from tahq.config.cluster import ClusterConfig

pytestmark = pytest.mark.ci

LOSSY = {"activations": "tah", "gradients": "fixed:bits=6"}


def config(frozen_layers: int = 4, **sections):
    model = {"num_layers": 8, "frozen_layers": frozen_layers} | sections.pop("model", {})
    pipeline = {"stages": 4, "layers": [2, 2, 2, 2]} | sections.pop("pipeline", {})
    return tiny(model=model, pipeline=pipeline, **sections)


def links_with_gradients(run) -> set[int]:
    return {link["link"] for row in run.metrics for link in row["links"] if link["direction"] == "gradients"}


def test_losses_are_those_of_transformers_with_frozen_layers_and_no_gradient_goes_below_them(tmp_path):
    model = saved_model("qwen3", tmp_path / "hf", tied=False)  # 4 blocks
    for name, parameter in model.named_parameters():
        is_frozen = name.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.1."))
        parameter.requires_grad_(not is_frozen)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    given = tiny(
        data={"tokenizer": "bytes"},
        training={"steps": 10, "global_batch": 16},
        run={"checkpoint_every": 4},
        wire={"activations": "raw:dtype=fp32", "gradients": "raw:dtype=fp32"},
    )
    given["model"] = {"path": "hf", "frozen_layers": 2}
    run = train(tmp_path, given)
    assert run.losses == pytest.approx(train_in_one_loop(model, ClusterConfig.model_validate(given))[0], abs=1e-5)
    assert links_with_gradients(run) == {2}
    kept = run.snapshot()
    assert frozen.isdisjoint(run.weights)
    assert frozen == {name.removeprefix("frozen/") for name in kept if name.startswith("frozen/")}
    assert not any(
        name.startswith("optimizer/") and name.partition("/")[2].partition("/")[2] in frozen for name in kept
    )

    assert finish(tmp_path, "tahq", "export", str(run.folder), "out").returncode == 0
    exported, before = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(tmp_path / "hf" / "model.safetensors"),
    )
    assert frozen == {name for name in exported if torch.equal(exported[name], before[name])}

    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "aside")
    saved_model("qwen3", tmp_path / "other", tied=False, seed=4)
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "hf" / "model.safetensors")
    refused = launch(tmp_path, given | {"training": given["training"] | {"steps": 12}}, "--resume")
    assert refused.returncode == 2
    assert "differs from what the run began with" in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stdout + refused.stderr


@pytest.mark.acceptance
def test_frozen_experts_count_in_the_loss_that_balances_the_others(tmp_path):
    model = saved_model("qwen3_moe", tmp_path / "hf", tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.1.")))
    wire = {"activations": "raw:dtype=fp32", "gradients": "raw:dtype=fp32"}
    given = tiny(data={"tokenizer": "bytes"}, training={"steps": 10, "global_batch": 16}, wire=wire)
    given["model"] = {"path": "hf", "frozen_layers": 2}
    run = train(tmp_path, given)
    losses, of_routers = train_in_one_loop(model, ClusterConfig.model_validate(given))
    assert run.losses == pytest.approx(losses, abs=1e-5)
    assert [row["router_loss"] for row in run.metrics] == pytest.approx(of_routers, abs=1e-5)
    assert links_with_gradients(run) == {2}


PIPELINES = [
    {"stages": 1, "layers": [8]},
    {"stages": 4, "layers": [3, 2, 2, 1], "schedule": "1f1b"},
    {"stages": 3, "layers": [4, 2, 2], "schedule": "zero-bubble"},
    {"stages": 2, "chunks": 2, "layers": [2, 1, 3, 2], "schedule": "interleaved"},
]


@pytest.fixture(scope="module")
def expected():
    return plain(config())


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda keys: f"{keys.get('schedule', 'alone')}-{keys['stages']}")
def test_cuts_and_schedules_give_the_plain_loop_with_frozen_layers(tmp_path, expected, pipeline):
    assert_equal_to_the_bit(launch(tmp_path, config(pipeline=pipeline)), expected)


@pytest.mark.parametrize(
    ("frozen_layers", "sections"),
    [
        (4, {"wire": LOSSY, "pipeline": {"schedule": "zero-bubble"}}),
        pytest.param(8, {"wire": LOSSY}, marks=pytest.mark.acceptance),
        (5, {"memory": {"recompute": "block", "offload": ["m", "v", "weights"]}}),
        (
            3,
            {
                "pipeline": {"stages": 2, "layers": [2, 6], "replicas": 2},
                "memory": {"shard": ["optimizer", "gradients", "weights"]},
                "wire": {"all_reduce": "raw:dtype=fp32"},
            },
        ),
    ],
    ids=["lossy", "head only", "offloaded", "replicas"],
)
def test_frozen_layers_give_the_plain_loop_with(tmp_path, frozen_layers, sections):
    given = config(frozen_layers, **sections)
    run = launch(tmp_path, given)
    assert_equal_to_the_bit(run, plain(given, cut="wire" in sections))
    stops = list(accumulate(given["pipeline"]["layers"][:-1]))
    if "replicas" not in given["pipeline"]:  # which have links of their own
        assert links_with_gradients(run) == {link for link, stop in enumerate(stops) if stop > frozen_layers}


@pytest.mark.acceptance
@pytest.mark.parametrize(
    "fault", ["kill@forward:stage=0:step=4", "kill@backward:stage=2:step=4", "kill@prepared:stage=1:step=5"]
)
def test_killed_workers_of_frozen_and_of_trained_stages_return_exactly(tmp_path, monkeypatch, fault):
    given = config(wire=LOSSY, run={"checkpoint_every": 3}, training={"steps": 6})
    calm = train(tmp_path / "calm", given)
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv(fault_points.FAULTS, fault)
    monkeypatch.setenv(fault_points.FOLDER, str(tmp_path / "faults"))
    run = train(tmp_path / "hit", given)
    assert list((tmp_path / "faults").iterdir())
    assert_same_run(run, calm)
    assert links_with_gradients(run) == {2}


@pytest.mark.acceptance
def test_resumed_run_continues_exactly_and_keeps_its_frozen_layers(tmp_path):
    given = config(wire=LOSSY, training={"steps": 6})
    calm = train(tmp_path / "calm", given)
    first = train(tmp_path / "resumed", config(wire=LOSSY, training={"steps": 3}))
    assert not first.metrics[3:]
    other = launch(tmp_path / "resumed", config(2, wire=LOSSY, training={"steps": 6}), "--resume")
    assert other.returncode == 2
    assert "model.frozen_layers was 4, is 2" in other.stderr + other.stdout
    assert_same_run(train(tmp_path / "resumed", given, "--resume"), calm)


def test_more_frozen_layers_than_the_model_has_are_refused_in_one_line(tmp_path):
    run = launch(tmp_path, config(9), "--dry-run")
    assert run.returncode == 2
    assert "frozen_layers 9 is above the model's 8 blocks" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
