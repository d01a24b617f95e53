"""Lost workers that cannot recover alone: all stages return to the newest checkpoint and repeat the steps exactly."""

from pathlib import Path

import pytest
from support.disks import can_mount, kept_full, small_disk
from support.processes import wait_until
from support.runs import Run, assert_same_run, launch, start, tiny, train, write_config

from tahq import fault_points

pytestmark = pytest.mark.ci

NUM_STEPS = 7


def config(**sections):
    """With lossy codecs, a lost or repeated micro-batch changes the losses."""
    return tiny(
        run={"checkpoint_every": 3, "peer_timeout": "10s"} | sections.pop("run", {}),
        model={"num_layers": 3, "hidden_size": 32},
        training={"steps": NUM_STEPS},
        pipeline={"stages": 3},
        wire={"activations": "tah", "gradients": "fixed:bits=6"},
        **sections,
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    return train(tmp_path_factory.mktemp("calm"), config())


def plan_fault(monkeypatch, folder: Path, fault: str) -> None:
    """Inject a fault, once, in the next run."""
    (folder / "faults").mkdir()
    monkeypatch.setenv(fault_points.FAULTS, fault)
    monkeypatch.setenv(fault_points.FOLDER, str(folder / "faults"))


def assert_same_bits(run: Run, calm: Run) -> None:
    assert run.returncode == 0, run.stdout + run.stderr
    assert [row["step"] for row in run.metrics] == list(range(1, NUM_STEPS + 1))
    assert_same_run(run, calm)


def test_full_disk_for_sent_frames_sends_all_stages_back(tmp_path, calm, monkeypatch):
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


@pytest.mark.acceptance
@pytest.mark.parametrize("fault", ["kill@backward:stage=1:step=4", "kill@prepared:stage=0:step=5"])
def test_lost_worker_of_a_gloo_group_sends_all_stages_back(tmp_path, calm, monkeypatch, fault):
    """The replacement is killed, too, while it makes its links."""
    stage = fault.split(":")[1]
    plan_fault(monkeypatch, tmp_path, f"{fault},kill@handshake:{stage}:step=3")
    run = launch(tmp_path, config(links={"inside": "gloo"}))
    assert len(list((tmp_path / "faults").iterdir())) == 2
    assert_same_bits(run, calm)
    assert "all stages go back to step 3" in run.stdout
    assert run.stdout.count("it is started again") == 2


@pytest.mark.acceptance
@pytest.mark.parametrize("damage", ["checkpoint", "frame log"])
def test_file_damaged_while_a_worker_is_away_sends_all_stages_back(tmp_path, calm, damage):
    """Its newest checkpoint, or the frames that a neighbour kept for it."""
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
