"""Replicas of a pipeline sum their gradients to the same bits, and to those of a plain loop."""

import re

import pytest
import torch
from support.exactness import assert_equal_to_the_bit, plain
from support.runs import assert_same_run, launch, overrides, tiny, train

from tahq import fault_points
from tahq.config.cluster import ClusterConfig
from tahq.pipeline.checkpoint.manifest import latest_folder, read_manifest
from tahq.pipeline.checkpoint.stage_file import SnapshotReader

pytestmark = pytest.mark.ci

FP8, FP32 = "fp8", "raw:dtype=fp32"
OFFLOAD = ["residual", "m", "v", "weights"]


def replicated(replicas, stages, *, all_reduce=FP8, schedule="zero-bubble", **sections):
    """FP32 at the cuts, or as `sections` say."""
    own = {name: sections.pop(name, {}) for name in ("pipeline", "wire", "training", "run")}
    return tiny(
        pipeline={"replicas": replicas, "stages": stages, "schedule": schedule, **own["pipeline"]},
        wire={"all_reduce": all_reduce, **own["wire"]},
        training=own["training"],
        run=own["run"],
        **sections,
    )


SIX_STEPS = {"run": {"checkpoint_every": 2}, "training": {"steps": 6, "eval_every": 3, "eval_batches": 1}}


def check_killed_worker(tmp_path, monkeypatch, config, fault):
    """A run in which a worker is killed is that of an undisturbed one, to the bit, and goes back by no step."""
    calm = train(tmp_path / "calm", config)
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv(fault_points.FAULTS, fault)
    monkeypatch.setenv(fault_points.FOLDER, str(tmp_path / "faults"))
    run = train(tmp_path / "killed", config)
    assert list((tmp_path / "faults").iterdir())
    assert "it is started again" in run.stdout
    assert "all stages go back" not in run.stdout
    assert_same_run(run, calm)


@pytest.mark.parametrize(
    ("replicas", "stages", "all_reduce", "sections"),
    [
        (2, 2, FP8, {"model": {"dropout": 0.1}}),
        (
            2,
            2,
            FP32,
            {"schedule": "1f1b", "wire": {"activations": "tah", "gradients": "fixed:bits=8,round=stochastic"}},
        ),
        (4, 1, FP8, {"memory": {"gradients": "fp8"}, "training": {"clip_norm": None}}),
        (2, 2, FP8, {"wire": {"all_reduce_inside": FP32}, "pipeline": {"balance": "measured"}}),
        (2, 2, FP8, {"links": {"inside": "gloo"}, "schedule": "1f1b"}),
        pytest.param(2, 1, FP32, {"memory": {"recompute": "block"}}, marks=pytest.mark.acceptance),
        pytest.param(2, 2, FP8, {"memory": {"offload": OFFLOAD}}, marks=pytest.mark.acceptance),
    ],
    ids=["dropout", "lossy cuts", "8-bit gradients", "planned, one site", "gloo", "checkpointed", "offloaded"],
)
def test_replicas_give_the_plain_loop_with_the_same_sums(tmp_path, replicas, stages, all_reduce, sections):
    config = replicated(replicas, stages, all_reduce=all_reduce, **sections)
    assert_equal_to_the_bit(launch(tmp_path, config), plain(config, cut=True))


@pytest.mark.acceptance
def test_two_replicas_of_four_stages_stay_equal_for_twenty_steps(tmp_path):
    config = replicated(2, 4, training={"steps": 20})
    run = train(tmp_path, config)
    assert_equal_to_the_bit(run, plain(config, cut=True))
    folder = latest_folder(run.folder / "snapshots")
    hashes = read_manifest(folder).sha256
    for stage in range(4):
        one, other = (
            SnapshotReader(folder, {name: digest for name, digest in hashes.items() if name.startswith(prefix)})
            for prefix in (f"stage-{stage:03d}-", f"stage-{stage + 4:03d}-")
        )
        assert one.names() == other.names()
        assert all(torch.equal(one.tensor(name), other.tensor(name)) for name in one.names())


@pytest.mark.parametrize(
    "fault",
    ["kill@backward:stage=2:step=3", pytest.param("kill@prepared:stage=1:step=4", marks=pytest.mark.acceptance)],
)
def test_killed_worker_of_a_replica_loses_nothing(tmp_path, monkeypatch, fault):
    check_killed_worker(tmp_path, monkeypatch, replicated(2, 2, **SIX_STEPS), fault)


@pytest.mark.acceptance
def test_head_whose_loss_is_in_chunks_is_summed_whole(tmp_path):
    """Its gradient is complete before the last backward begins."""
    memory, runs = {"loss_chunks": 3}, []
    for stages in (1, 2):
        (tmp_path / str(stages)).mkdir()
        runs.append(train(tmp_path / str(stages), replicated(2, stages, all_reduce=FP32, memory=memory)))
    assert runs[0].losses == runs[1].losses
    weights = [run.weights for run in runs]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.acceptance
def test_run_goes_on_with_another_number_of_replicas(tmp_path):
    halfway = replicated(2, 2, training={"steps": 2})
    train(tmp_path, halfway)
    run = launch(tmp_path, halfway, "--resume", *overrides("training.steps=4", "pipeline.replicas=1"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert (
        "pipeline.replicas: 2 -> 1 (no longer exact: gradients are summed over other groups of samples)" in run.stdout
    )
    alone = train(tmp_path / "alone", replicated(1, 2))
    assert run.losses == pytest.approx(alone.losses, rel=1e-3)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"global_batch": 6}}, "3 micro-batches of training.micro_batch 2, which 2 replicas"),
        ({"training": {"optimizer": "qgalore"}}, "finds a subspace from each replica's own gradients"),
        ({"model": {"tie": "sync"}}, "model.tie: sync is for one pipeline"),
        ({"wire": {"activations": "aqsgd"}}, "wire.activations: aqsgd remembers the samples of one pipeline"),
        ({"schedule": "gpipe", "pipeline": {"replicas_wait": "1s"}}, "all of which gpipe keeps in memory; use 1f1b"),
        ({"links": {"inside": "gloo"}, "pipeline": {"replicas_wait": "1s"}}, "needs links over ZMQ"),
        (
            {"memory": {"shard": ["optimizer"]}, "pipeline": {"replicas_wait": "1s"}},
            "under memory.shard only that one could update its share",
        ),
        ({"wire": {"all_reduce": "tha"}}, "no codec 'tha'; did you mean tah?"),
        (
            {"hosts": [{"address": "10.0.0.1"}] * 2},
            "hosts lists 2 machines, pipeline.stages is 2 times pipeline.replicas 2",
        ),
    ],
)
def test_what_replicas_cannot_do_is_refused_with_a_reason(sections, message):
    hosts = {"hosts": sections.pop("hosts")} if "hosts" in sections else {}
    with pytest.raises(ValueError, match=re.escape(message)):
        ClusterConfig.model_validate({**replicated(2, 2, **sections), **hosts})
