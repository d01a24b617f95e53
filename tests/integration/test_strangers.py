"""Strangers connect to every port of a run: nothing they send is accepted, and the losses stay the same."""

import pytest
from support.processes import listening_ports, wait_until, workers
from support.runs import Run, launch, start, tiny, write_config
from support.strangers import intruders, scan, silent_connections

from tahq.comm.keys import default_key_path, new_key_pair, read_key_file

pytestmark = pytest.mark.acceptance

STEPS = 120
SMALL = tiny(pipeline={"stages": 2}, training={"steps": STEPS}, model={"num_layers": 2, "hidden_size": 32})


@pytest.fixture
def disturbed(tmp_path):
    folder = tmp_path / "disturbed"
    folder.mkdir()
    write_config(folder, SMALL)
    launcher = start(folder, "tahq-launch", "cluster.yaml")
    yield folder, launcher
    if launcher.poll() is None:
        launcher.kill()
        launcher.communicate()


def test_strangers_at_every_port_change_nothing(disturbed, tmp_path):
    folder, launcher = disturbed
    run_folder = folder / "runs" / "tiny"
    metrics = run_folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, 120, "a step")
    ports = [port for pid in (launcher.pid, *workers(launcher.pid)) for port in listening_ports(pid)]
    assert len(ports) == 3  # one per process
    keys = (read_key_file(default_key_path()).public, new_key_pair().public)
    with silent_connections(ports, 100), intruders(ports, keys) as sockets:
        for port in ports:
            scan(port)
        stdout, stderr = launcher.communicate(timeout=120)
        answered = [socket for socket in sockets if socket.poll(0)]
    assert (launcher.returncode, stderr) == (0, ""), stdout
    assert answered == []
    logs = "".join(path.read_text() for path in (run_folder / "logs").iterdir())
    assert "its public key" in logs
    assert "rejected a connection" in logs
    assert "stranger" not in logs  # their messages were never read
    run = Run(run_folder, 0, stdout, stderr)
    quiet = launch(tmp_path, SMALL)
    assert run.losses == quiet.losses
    assert len(run.losses) == STEPS
