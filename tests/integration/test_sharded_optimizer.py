"""Replicas that each have a share of the optimizer's states train to the bits of replicas that have all of them."""

from collections import Counter

import pytest
import torch
from integration.test_replicas import FP8, FP32, SIX_STEPS, check_killed_worker, replicated
from support.exactness import assert_equal_to_the_bit, plain
from support.runs import assert_same_run, assert_same_state, launch, overrides, train

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import stage_estimate
from tahq.pipeline.checkpoint.manifest import latest_folder, read_manifest
from tahq.pipeline.checkpoint.stage_file import SnapshotReader
from tahq.worker.assembly import resolved_spec

slow = pytest.mark.acceptance


def sharded(replicas, stages, *, all_reduce=FP32, memory=None, **sections):
    memory = {"shard": ["optimizer"], **(memory or {})}
    return replicated(replicas, stages, all_reduce=all_reduce, memory=memory, **sections)


@pytest.mark.parametrize(
    ("replicas", "stages", "sections"),
    [
        (2, 2, {"training": {"clip_norm": 0.5}, "schedule": "interleaved", "pipeline": {"chunks": 2}}),
        pytest.param(4, 1, {"links": {"inside": "gloo"}, "schedule": "1f1b"}, marks=slow),
        (4, 1, {"all_reduce": FP8}),
    ],
    ids=["clipped, in chunks", "gloo", "rounded shards"],
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


def test_run_goes_on_with_shares_or_without_to_the_bit(tmp_path):
    whole = replicated(2, 1, all_reduce=FP32, training={"steps": 4, "lr_schedule": "constant"})
    calm = train(tmp_path / "calm", whole)
    train(tmp_path / "run", whole, *overrides("training.steps=1"))
    for steps, shard in ((2, "[optimizer]"), (3, "[]"), (4, "[optimizer]")):
        changes = overrides(f"training.steps={steps}", f"memory.shard={shard}")
        run = train(tmp_path / "run", whole, "--resume", *changes)
        assert "the continuation is exact" in run.stdout
    assert run.losses == calm.losses
    assert_same_state(run, calm)


@pytest.mark.acceptance
def test_run_goes_on_with_other_numbers_of_shares(tmp_path):
    halfway = sharded(2, 1, training={"steps": 2})
    states = {name: t for name, t in train(tmp_path, halfway).snapshot().items() if name.startswith("optimizer/")}
    run = train(tmp_path, halfway, "--resume", *overrides("training.steps=2", "pipeline.replicas=4"))
    assert all(torch.equal(tensor, states[name]) for name, tensor in run.snapshot().items() if name in states)
    run = train(tmp_path, halfway, "--resume", *overrides("training.steps=4", "pipeline.replicas=1"))
    alone = train(tmp_path / "alone", replicated(1, 1))
    assert run.losses == pytest.approx(alone.losses, rel=1e-3)


@pytest.mark.parametrize(
    "fault",
    [
        "kill@committing:stage=2:step=3",
        pytest.param("kill@backward:stage=1:step=4", marks=slow),
        pytest.param("kill@snapshot:stage=0:step=4", marks=slow),
        pytest.param("kill@committing:stage=1:step=5", marks=slow),
    ],
)
def test_killed_worker_loses_no_share(tmp_path, monkeypatch, fault):
    """One that is killed while it commits leaves the others waiting for its weights."""
    check_killed_worker(tmp_path, monkeypatch, sharded(2, 2, **SIX_STEPS), fault)
