"""Eight stages on this machine."""

import shutil

import pytest
from support.cluster_files import EXAMPLES
from support.runs import Run, finish


@pytest.mark.acceptance
def test_example_with_eight_stages_learns(tmp_path):
    shutil.copy(EXAMPLES / "eight_stages.yaml", tmp_path)
    done = finish(tmp_path, "tahq-launch", "eight_stages.yaml")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    run = Run(tmp_path / "runs" / "eight-stages", done.returncode, done.stdout, done.stderr)
    assert len(run.losses) == 10
    assert run.losses[-1] < run.losses[0]
    last = run.metrics[-1]
    assert [stage["stage"] for stage in last["stages"]] == list(range(8))
    assert {(link["from"], link["to"]) for link in last["links"]} == {
        ends for stage in range(7) for ends in ((stage, stage + 1), (stage + 1, stage))
    }
