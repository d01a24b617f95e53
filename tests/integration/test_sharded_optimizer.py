"""Replicas that each have a share of the optimizer's states train to the bits of replicas that have all of them."""

import re
from collections import Counter

import pytest
import torch
from integration.test_replicas import FP8, FP32, SIX_STEPS, check_killed_worker, replicated
from support.exactness import assert_equal_to_the_bit, plain
from support.runs import assert_same_run, assert_same_state, launch, overrides, train

from tahq import fault_points
from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import stage_estimate
from tahq.pipeline.checkpoint.manifest import latest_folder, read_manifest
from tahq.pipeline.checkpoint.stage_file import SnapshotReader
from tahq.worker.assembly import resolved_spec

pytestmark = pytest.mark.ci

slow = pytest.mark.acceptance
GRADIENTS = {"shard": ["optimizer", "gradients"]}
ALL = {"shard": ["optimizer", "gradients", "weights"]}
MANY = {"global_batch": 16, "micro_batch": 1}
"""Many micro-batches."""


def sharded(replicas, stages, *, all_reduce=FP32, memory=None, **sections):
    memory = {"shard": ["optimizer"], **(memory or {})}
    return replicated(replicas, stages, all_reduce=all_reduce, memory=memory, **sections)


@pytest.mark.parametrize(
    ("replicas", "stages", "sections"),
    [
        (2, 2, {"training": {"clip_norm": 0.5}, "schedule": "interleaved", "pipeline": {"chunks": 2}}),
        pytest.param(4, 1, {"links": {"inside": "gloo"}, "schedule": "1f1b"}, marks=slow),
        (4, 1, {"all_reduce": FP8}),
        (2, 2, {"memory": GRADIENTS, "links": {"inside": "gloo"}, "training": MANY}),
        pytest.param(4, 1, {"memory": GRADIENTS, "training": MANY, "schedule": "1f1b"}, marks=slow),
        pytest.param(
            *(2, 2, {"memory": GRADIENTS, "training": MANY, "schedule": "interleaved", "pipeline": {"chunks": 2}}),
            marks=slow,
        ),
        pytest.param(2, 1, {"memory": GRADIENTS, "training": MANY, "all_reduce": FP8}, marks=slow),
        (2, 2, {"memory": ALL, "links": {"inside": "gloo"}, "training": MANY, "schedule": "1f1b"}),
        pytest.param(4, 1, {"memory": ALL, "links": {"inside": "gloo"}, "training": MANY}, marks=slow),
        pytest.param(5, 1, {"memory": ALL, "training": {"global_batch": 10, "micro_batch": 1}}, marks=slow),
    ],
    ids=[
        *("clipped, in chunks", "gloo", "rounded shards"),
        *("gradients", "gradients of four", "gradients, in chunks", "gradients, rounded"),
        *("all", "all of four", "more replicas than matrices in a block"),
    ],
)
def test_shares_give_the_plain_loop(tmp_path, replicas, stages, sections):
    config = sharded(replicas, stages, **sections)
    assert_equal_to_the_bit(launch(tmp_path, config), plain(config, cut=True))


@pytest.mark.parametrize(
    ("optimizer", "memory", "inside"),
    [
        ("adamw8bit", {"gradients": "fp8"}, "gloo"),
        pytest.param("fp8_adamw", {}, "zmq", marks=slow),
        pytest.param("adamw_bf16", {}, "zmq", marks=slow),
    ],
)
def test_shares_give_the_bits_of_whole_states(tmp_path, optimizer, memory, inside):
    """The checkpoint has every state once, and a share takes the estimated bytes."""
    sections = {"training": {"optimizer": optimizer}, "links": {"inside": inside}, "schedule": "1f1b"}
    whole = train(tmp_path / "whole", replicated(2, 1, all_reduce=FP32, memory=memory, **sections))
    config = sharded(2, 1, memory=memory, **sections)
    run = train(tmp_path / "shares", config)
    assert_same_run(run, whole)
    assert [row["grad_norm"] for row in run.metrics] == [row["grad_norm"] for row in whole.metrics]
    folder = latest_folder(run.folder / "snapshots")
    files = [SnapshotReader(folder, {name: sha256}) for name, sha256 in read_manifest(folder).sha256.items()]
    names = Counter(name for file in files for name in file.names() if name.startswith("optimizer/"))
    assert set(names.values()) == {1}
    counted = [
        sum(
            file.tensor(name).nbytes
            for name in file.names()
            if name.startswith("optimizer/") and not name.startswith("optimizer/step/")
        )
        for file in files
    ]
    config = ClusterConfig.model_validate({**config, "model": {**config["model"], "vocab_size": 256}})
    assert max(counted) == stage_estimate(config, resolved_spec(config, None), 0, device="cpu").optimizer
    assert max(counted) < 0.55 * sum(counted)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            {"training": {"precision": "bf16", "eval_every": 2, "eval_batches": 2}, "model": {"dropout": 0.1}},
            marks=slow,
        ),
        {"memory": {"recompute": "block", "offload": ["residual"]}, "links": {"inside": "gloo"}, "schedule": "1f1b"},
        pytest.param(
            {"schedule": "interleaved", "pipeline": {"chunks": 2}, "training": {"eval_every": 1, "eval_batches": 1}},
            marks=slow,
        ),
        pytest.param(
            {"training": {"optimizer": "adamw_bf16", "adamw_bf16": {"weights": "bf16"}}, "model": {"family": "llama"}},
            marks=slow,
        ),
        {"memory": {"recompute": "ffn", "activations": "none", "gradients": "fp8"}, "training": {"precision": "bf16"}},
    ],
    ids=["bf16, evaluated", "recomputed, offloaded", "in chunks", "bf16 weights", "8-bit gradients"],
)
def test_lent_weights_give_the_bits_of_whole_ones(tmp_path, sections):
    """The checkpoint has every matrix of a block once."""
    memory = sections.pop("memory", {})
    whole, shared = (
        train(tmp_path / name, sharded(2, 2, memory={**memory, "shard": shard}, **sections))
        for name, shard in (("whole", ["optimizer"]), ("shared", ["optimizer", "weights"]))
    )
    assert_same_run(shared, whole)
    assert [row["grad_norm"] for row in shared.metrics] == [row["grad_norm"] for row in whole.metrics]
    assert [row.get("validation") for row in shared.metrics] == [row.get("validation") for row in whole.metrics]
    folder = latest_folder(shared.folder / "snapshots")
    files = [SnapshotReader(folder, {name: sha256}) for name, sha256 in read_manifest(folder).sha256.items()]
    names = Counter(name for file in files for name in file.names() if name.startswith("model/"))
    assert {name for name, count in names.items() if count == 1} == {
        name for name in names if re.search(r"\.\d+\.", name) and shared.weights[name.removeprefix("model/")].ndim > 1
    }


@slow
@pytest.mark.parametrize(
    "sections", [{"emulate": {"delay": "3ms"}}, {"emulate": {"rate": "40mbit"}}, {"links": {"inside": "gloo"}}], ids=str
)
def test_slow_links_do_not_change_what_three_replicas_compute(tmp_path, sections):
    """Neither do schedules: gradients are added in the same order."""
    training = {"steps": 3, "global_batch": 18, "micro_batch": 1, "eval_every": 1, "eval_batches": 2}
    schedule = "1f1b" if "links" in sections else "zero-bubble"
    slow_run = train(tmp_path / "slow", sharded(3, 2, memory=ALL, training=training, schedule=schedule, **sections))
    run = train(tmp_path / "run", sharded(3, 2, memory=GRADIENTS, training=training, schedule="1f1b"))
    assert_same_run(slow_run, run)
    assert [row["validation"] for row in slow_run.metrics] == [row["validation"] for row in run.metrics]


@pytest.mark.acceptance
def test_run_goes_on_with_shares_or_without_to_the_bit(tmp_path):
    whole = replicated(2, 1, all_reduce=FP32, training={"steps": 4, "lr_schedule": "constant"})
    calm = train(tmp_path / "calm", whole)
    train(tmp_path / "run", whole, *overrides("training.steps=1"))
    for steps, shard in ((2, "[optimizer]"), (3, "[optimizer, weights]"), (4, "[]")):
        changes = overrides(f"training.steps={steps}", f"memory.shard={shard}")
        run = train(tmp_path / "run", whole, "--resume", *changes)
        assert "the continuation is exact" in run.stdout
    assert run.losses == calm.losses
    assert_same_state(run, calm)


@pytest.mark.acceptance
def test_run_goes_on_with_other_numbers_of_shares(tmp_path):
    halfway = sharded(2, 1, training={"steps": 2}, memory=ALL)
    states = {name: t for name, t in train(tmp_path, halfway).snapshot().items() if name.startswith("optimizer/")}
    run = train(tmp_path, halfway, "--resume", *overrides("training.steps=2", "pipeline.replicas=4"))
    assert all(torch.equal(tensor, states[name]) for name, tensor in run.snapshot().items() if name in states)
    run = train(tmp_path, halfway, "--resume", *overrides("training.steps=4", "pipeline.replicas=1"))
    alone = train(tmp_path / "alone", replicated(1, 1))
    assert run.losses == pytest.approx(alone.losses, rel=1e-3)


@slow
@pytest.mark.parametrize(
    ("fault", "memory"),
    [
        ("kill@committing:stage=2:step=3", {}),
        ("kill@backward:stage=1:step=4", {}),
        ("kill@snapshot:stage=0:step=4", {}),
        ("kill@committing:stage=1:step=5", {}),
        ("kill@backward:stage=2:step=4", GRADIENTS),
        ("kill@backward:stage=1:step=4", ALL),
        ("kill@committing:stage=2:step=3", ALL),
        ("kill@forward:stage=0:step=4", ALL),
        ("kill@snapshot:stage=3:step=4", ALL),
        ("kill@snapshot:stage=2:step=6", ALL),
        ("kill@snapshot:stage=1:step=6", ALL),
    ],
)
def test_killed_worker_loses_no_share(tmp_path, monkeypatch, fault, memory):
    """One that is killed while it commits leaves the others waiting for its weights.

    One that has lent weights for an evaluation does so again, since others may lack some; stage 1 reports the loss.
    """
    check_killed_worker(tmp_path, monkeypatch, sharded(2, 2, memory=memory, **SIX_STEPS), fault)


@slow
def test_all_stages_go_back_where_a_process_group_lends_weights(tmp_path, monkeypatch):
    config = sharded(2, 2, memory=ALL, links={"inside": "gloo"}, schedule="1f1b", **SIX_STEPS)
    calm = train(tmp_path / "calm", config)
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv(fault_points.FAULTS, "kill@backward:stage=1:step=4")
    monkeypatch.setenv(fault_points.FOLDER, str(tmp_path / "faults"))
    run = train(tmp_path / "killed", config)
    assert "all stages go back" in run.stdout, run.stdout
    assert_same_run(run, calm)
