"""Workers that are killed where they cannot come back alone: what they did is computed again, to the bit."""

from pathlib import Path

import pytest
import torch
from support.disks import can_mount, kept_full, small_disk
from support.processes import wait_until
from support.runs import Run, launch, start, tiny, write_config

from tahq import fault_points

NUM_STEPS = 7


def config(**sections):
    """Codecs in which a micro-batch that is lost, or comes twice, shows in every bit."""
    return tiny(
        run={"snapshot_every": 3, "peer_timeout": "10s"} | sections.pop("run", {}),
        model={"num_layers": 3, "hidden_size": 32},
        training={"steps": NUM_STEPS},
        pipeline={"stages": 3},
        wire={"activations": "tah", "gradients": "fixed:bits=6"},
        **sections,
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    run = launch(tmp_path_factory.mktemp("calm"), config())
    assert run.returncode == 0, run.stderr
    return run


def plan_fault(monkeypatch, folder: Path, fault: str) -> None:
    """Have it happen, once, in a run that is started now."""
    (folder / "faults").mkdir()
    monkeypatch.setenv(fault_points.FAULTS, fault)
    monkeypatch.setenv(fault_points.FOLDER, str(folder / "faults"))


def assert_same_bits(run: Run, calm: Run) -> None:
    assert run.returncode == 0, run.stdout + run.stderr
    assert [row["step"] for row in run.metrics] == list(range(1, NUM_STEPS + 1))
    assert run.losses == calm.losses
    ours, theirs = run.snapshot(), calm.snapshot()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_neighbours_whose_logs_a_full_disk_has_cost_go_back_together(tmp_path, calm, monkeypatch):
    if not can_mount():
        pytest.skip("needs to mount a file system, and so root")
    plan_fault(monkeypatch, tmp_path, "kill@backward:stage=1:step=4")
    write_config(tmp_path, config())
    folder = tmp_path / "runs" / "tiny"
    with small_disk(folder / "frames", 1 << 16), kept_full(folder / "frames" / "filler"):
        launcher = start(tmp_path, "tahq-launch", "cluster.yaml")
        stdout, stderr = launcher.communicate(timeout=120)
    assert list((tmp_path / "faults").iterdir())
    assert_same_bits(Run(folder, launcher.returncode, stdout, stderr), calm)
    told = [line for line in stdout.splitlines() if "are not kept until the next checkpoint is complete" in line]
    assert "No space left on device" in told[0]
    assert "frames/stage-" in told[0]
    assert "has not kept all that it sent on link" in stdout
    assert "all stages go back to step 3" in stdout


@pytest.mark.parametrize("fault", ["kill@backward:stage=1:step=4", "kill@prepared:stage=0:step=5"])
def test_run_over_gloo_goes_back_together_and_goes_on(tmp_path, calm, monkeypatch, fault):
    """Also while its links are made anew: the worker that takes the killed one's place is killed too."""
    stage = fault.split(":")[1]
    plan_fault(monkeypatch, tmp_path, f"{fault},kill@handshake:{stage}:step=3")
    run = launch(tmp_path, config(links={"inside": "gloo"}))
    assert len(list((tmp_path / "faults").iterdir())) == 2
    assert_same_bits(run, calm)
    assert "all stages go back to step 3" in run.stdout
    assert run.stdout.count("it is started again") == 2


@pytest.mark.parametrize("damage", ["checkpoint", "frame log"])
def test_files_that_are_damaged_while_a_worker_is_away_send_all_back(tmp_path, calm, damage):
    """Its newest checkpoint, or what a neighbour has kept for it: all stages compute the steps since then again."""
    write_config(tmp_path, config())
    folder = tmp_path / "runs" / "tiny"
    faults = {
        fault_points.FAULTS: "sleep=8s@backward:stage=1:step=6,kill@backward:stage=1:step=6",
        fault_points.FOLDER: str(tmp_path),
    }
    launcher = start(tmp_path, "tahq-launch", "cluster.yaml", extra=faults)
    try:
        lines = iter(launcher.stdout.readline, "")
        next(line for line in lines if line.startswith("checkpoint after step 6"))
        if damage == "checkpoint":
            (file,) = (folder / "snapshots" / "step-00000006").glob("stage-001-*")
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        else:
            wait_until(lambda: list(folder.rglob("step-00000006.frames")), 8, "frames of the step")
            for file in folder.rglob("step-00000006.frames"):
                file.write_bytes(bytes(file.stat().st_size))
        stdout, stderr = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    told = [line for line in stdout.splitlines() if "all stages go back to step" in line]
    assert len(told) == 1, stdout + stderr
    assert f"all stages go back to step {3 if damage == 'checkpoint' else 6}" in told[0]
    assert_same_bits(Run(folder, launcher.returncode, stdout, stderr), calm)
