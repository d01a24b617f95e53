"""While a worker is lost, the other replicas go on with its share; the record of that repeats the run to the bit."""

import re

import pytest
from support.runs import assert_same_run, launch, tiny

from tahq import fault_points

pytestmark = pytest.mark.ci

slow = pytest.mark.acceptance
STEPS = 80


def replicated(replicas, stages, *, training=None, **pipeline):
    return tiny(
        model={"num_layers": max(2, stages), "dropout": 0.1},
        pipeline={"stages": stages, "replicas": replicas, **pipeline},
        wire={"all_reduce": "fp8"},
        training={"steps": STEPS, "global_batch": 8, "micro_batch": 1, **(training or {})},
        run={"checkpoint_every": 10},
    )


EVALUATED = {"schedule": "1f1b", "training": {"eval_every": 4, "eval_batches": 1}}


@pytest.mark.parametrize(
    ("replicas", "stages", "sections", "faults"),
    [
        (2, 2, {"schedule": "zero-bubble"}, ["backward:stage=3:step=6"]),
        pytest.param(2, 2, EVALUATED, ["forward:stage=0:step=13"], marks=slow),
        pytest.param(4, 1, {}, ["backward:stage=1:step=7"], marks=slow),
        pytest.param(3, 1, {"training": {"global_batch": 9}}, ["prepared:stage=2:step=11"], marks=slow),
        pytest.param(2, 2, {}, ["backward:stage=0:step=6", "prepared:stage=1:step=7"], marks=slow),
        pytest.param(2, 2, {}, ["backward:stage=0:step=6", "backward:stage=3:step=8"], marks=slow),
        pytest.param(2, 2, {}, ["backward:stage=2:step=78"], marks=slow),
    ],
    ids=["late stage", "evaluating", "uneven shares", "prepared", "one replica twice", "both replicas", "at the end"],
)
def test_others_take_the_share_of_a_lost_workers_replica(tmp_path, monkeypatch, replicas, stages, sections, faults):
    for folder in ("faults", "again"):
        (tmp_path / folder).mkdir()
    with monkeypatch.context() as patch:
        patch.setenv(fault_points.FAULTS, ",".join(f"kill@{fault}" for fault in faults))
        patch.setenv(fault_points.FOLDER, str(tmp_path / "faults"))
        run = launch(tmp_path, replicated(replicas, stages, replicas_wait="0s", **sections))
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(list((tmp_path / "faults").iterdir())) == len(faults)
    stage, step = (int(number) for number in re.findall(r"\d+", faults[0]))
    everyone, rows = list(range(replicas)), run.metrics
    skipped = next(index for index, row in enumerate(rows) if row["abandoned"])
    assert skipped - step in (0, 1)  # what is prepared may be decided before the loss is noticed
    assert [row["computing"] for row in rows[: skipped + 1]] == [everyone] * (skipped + 1)
    assert rows[skipped + 1]["computing"] == [replica for replica in everyone if replica != stage // stages]
    assert rows[-1]["computing"] == everyone or step == STEPS - 2
    assert "of these steps: a replica lost a worker" in run.stdout
    again = launch(
        tmp_path / "again", replicated(replicas, stages, replay=str(run.folder / "metrics.jsonl"), **sections)
    )
    assert_same_run(run, again)
