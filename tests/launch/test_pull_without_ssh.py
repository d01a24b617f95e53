"""Checkpoints from machines without ssh: over links to their workers, while the run is live and before it ends."""

import json
import signal
import socket
from pathlib import Path

import pytest
from support.processes import wait_until
from support.runs import start as start_program
from support.runs import tiny, write_config

from .conftest import wait_for_steps


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Machines:
    """A coordinator in one folder, and two workers, each in a folder of its own."""

    def __init__(self, folder: Path, hosts: list[dict], **sections: dict) -> None:
        self.folder, self.run, self.programs = folder, folder / "runs" / "tiny", []
        sections["run"] = {"bind": f"127.0.0.1:{free_port()}", "relay": free_port(), **sections.get("run", {})}
        config = tiny(pipeline={"stages": 2}, model={"num_layers": 2, "hidden_size": 32}, **sections)
        write_config(folder, config | {"hosts": [{"address": "127.0.0.1", **host} for host in hosts]})
        self._address = sections["run"]["bind"]
        self.train(2)

    def train(self, num_steps: int, *arguments: str) -> None:
        """Start all three, and wait until so many steps are done."""
        self.coordinator = self.start(self.folder, "tahq", "coordinator", "cluster.yaml", *arguments)
        for stage in range(2):
            (home := self.folder / f"machine{stage}").mkdir(exist_ok=True)
            self.start(home, "tahq-worker", "--stage", str(stage), "--peer", self._address)
        wait_for_steps(self.coordinator, self.run, num_steps)

    def start(self, folder: Path, program: str, *arguments: str, **options):
        self.programs.append(start_program(folder, program, *arguments, **options))
        return self.programs[-1]

    def finish(self, *arguments: str, **options) -> tuple[int, str, str]:
        process = self.start(self.folder, "tahq", *arguments, **options)
        stdout, stderr = process.communicate(timeout=60)
        return process.returncode, stdout, stderr

    @property
    def newest(self) -> Path:
        return self.run / "snapshots" / (self.run / "snapshots" / "latest").read_text().strip()

    def lacking(self) -> list[str]:
        files = json.loads((self.newest / "manifest.json").read_text())["files"]
        return [entry["file"] for entry in files if not (self.newest / entry["file"]).exists()]

    def close(self) -> None:
        for program in self.programs:
            program.kill()
            program.communicate(timeout=30)


@pytest.fixture
def machines(tmp_path):
    """machines([{keys of a host}, {…}], section={…}) starts them; two steps are done."""
    made = []

    def make(hosts: list[dict], **sections: dict) -> Machines:
        made.append(Machines(tmp_path, hosts, **sections))
        return made[-1]

    yield make
    for each in made:
        each.close()


ENDLESS = {"steps": 1_000_000}


NAMES_NO_ADDRESS = {"advertise": "none"}
HAS_A_WRONG_ADDRESS = {"advertise": "127.0.0.1:1"}


@pytest.mark.parametrize(
    "hosts",
    [
        [{}, {}],
        pytest.param([{}, HAS_A_WRONG_ADDRESS], marks=pytest.mark.acceptance),
        [NAMES_NO_ADDRESS, NAMES_NO_ADDRESS],
    ],
    ids=["dialled", "one cannot be dialled", "relayed"],
)
def test_owner_pulls_from_a_live_run_whose_last_checkpoint_is_here_when_it_ends(machines, hosts):
    run = machines(hosts, training=ENDLESS, run={"checkpoint_every": 1, "keep_checkpoints": 1000})
    wait_until((run.run / "snapshots" / "latest").exists, 60, "a checkpoint is complete")
    assert run.lacking()
    assert run.finish("keygen", "--output", "other/tahq/key.secret")[0] == 0
    status, _, stderr = run.finish("pull", "tiny", extra={"XDG_CONFIG_HOME": str(run.folder / "other")})
    assert (status, stderr.count("\n")) == (2, 1)
    assert "its key is not" in stderr, (stderr, run.coordinator.poll())
    status, stdout, stderr = run.finish("pull", "tiny")
    assert status == 0, stderr
    assert "fetched 2 files" in stdout
    run.coordinator.send_signal(signal.SIGINT)
    stdout, stderr = run.coordinator.communicate(timeout=60)
    assert run.coordinator.returncode == 130, stderr
    assert run.lacking() == []
    status, _, stderr = run.finish("export", "tiny", "out")
    assert status == 0, stderr


@pytest.mark.ci
def test_files_that_ctrl_c_leaves_on_their_machines_are_pulled_once_the_run_is_resumed(machines):
    run = machines([{}, {}], training={"steps": 2}, emulate={"rate": "1mbit"})  # a file takes two seconds
    assert any("the checkpoint's 2 files" in line for line in iter(run.coordinator.stdout.readline, ""))
    run.coordinator.send_signal(signal.SIGINT)
    stdout, stderr = run.coordinator.communicate(timeout=60)
    assert run.coordinator.returncode == 0, stderr
    left = run.lacking()
    assert f"left on their hosts: {', '.join(left)}; copy them into {run.newest.relative_to(run.folder)}" in stdout
    status, _, stderr = run.finish("pull", "tiny")
    assert status == 2
    assert "copy it from there by hand" in stderr
    run.train(3, "--resume", "--set", "training.steps=1000000")
    status, stdout, stderr = run.finish("pull", "tiny", "--step", "2")
    assert status == 0, stderr
    assert run.lacking() == []
