"""Stages on other machines: the ssh command, and whole runs through a real sshd on loopback."""

import getpass
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import children, command_line, is_alive
from support.runs import finish, tiny, write_config

import tahq
import tahq_launch
import tahq_netem
from tahq.comm.config import MachineConfig
from tahq.comm.keys import new_key_pair
from tahq.pipeline.checkpoint.manifest import read_manifest
from tahq_launch.start.run_keys import PLAIN, RunKeys, WorkerSecret
from tahq_launch.start.worker_command import ssh_command

from .conftest import ENDLESS, SSHD, TWO_STAGES, needs_sshd, wait_for_steps, wait_until_gone

pytestmark = pytest.mark.ci

PEER = "192.0.2.1:5555"


def remote_command(stage: int, secret: WorkerSecret = PLAIN, threads: int | None = None, **host):
    """The command for a worker on gpu1, and the words that a POSIX shell there splits its last argument into."""
    machine = MachineConfig.model_validate({"address": "gpu1", "ssh": "me@gpu1"} | host)
    command = ssh_command(machine, stage, PEER, secret=secret, threads=threads)
    return command, shlex.split(command.argv[-1])


def test_remote_command_survives_the_remote_shell_and_the_users_ssh_options_come_first():
    argv = remote_command(0, ssh_options=["-p", "2222", "-o", "ConnectTimeout=99"])[0].argv
    assert argv[:5] == ("ssh", "-p", "2222", "-o", "ConnectTimeout=99")
    assert argv.index("ConnectTimeout=99") < argv.index("ConnectTimeout=15")
    assert argv[-3:-1] == ("--", "me@gpu1")
    environment = {"X": "it's; rm -rf ~"}
    _, script = remote_command(2, python="/opt/my env/bin/python", workdir="a b/$c", env=environment, threads=3)
    assert script[:5] == ["cd", "a b/$c", "&&", "exec", "env"]
    assert {"X=it's; rm -rf ~", "OMP_NUM_THREADS=3"} < set(script)
    assert script[script.index("/opt/my env/bin/python") + 1 :] == [
        *("-m", "tahq_launch.cli", "worker", "--stage", "2", "--peer", PEER, "--exit-with-stdin", "--no-curve")
    ]
    assert remote_command(0)[1][0] == "exec"
    assert remote_command(0, workdir="~/my runs")[1][:2] == ["cd", "my runs"]


def test_key_of_a_remote_worker_is_sent_over_stdin_only():
    own, coordinator = new_key_pair(), new_key_pair()
    secret = RunKeys(coordinator, {2: own}, frozenset()).secret_of(2)
    command, script = remote_command(2, secret)
    assert script[-2:] == ["--exit-with-stdin", "--keys-from-stdin"]
    assert command.first_input == f"{own.secret} {coordinator.public}\n".encode()
    assert own.secret not in f"{command.argv} {command.env} {command!r} {secret!r} {own!r}"


@pytest.fixture
def over_ssh(sshd, tmp_path):
    """over_ssh(config, python="...") is the configuration with all stages behind the sshd; runs use this code."""
    files = [module.__file__ for module in (tahq, tahq_launch, tahq_netem)]
    code = os.pathsep.join(dict.fromkeys(str(Path(file).parents[1]) for file in files if file))

    def make(config: dict, **changes) -> dict:
        host = {
            "address": "127.0.0.1",
            "ssh": f"{getpass.getuser()}@127.0.0.1",
            "ssh_options": sshd,
            "bind": "127.0.0.1:0",
            "python": sys.executable,
            "workdir": str(tmp_path),
            **changes,
            "env": {"PYTHONPATH": code, **changes.get("env", {})},
        }
        return {**config, "hosts": [host] * config["pipeline"]["stages"]}

    return make


@needs_sshd
def test_stages_over_ssh_complete_a_run(over_ssh, tmp_path, start):
    planned = {**TWO_STAGES, "pipeline": {"stages": 2}}
    write_config(tmp_path, over_ssh(planned, env={"TAHQ_TEST_MARK": "yes it's set"}))
    launcher = start("tahq-launch", "cluster.yaml")
    stdout, stderr = launcher.communicate(timeout=120)
    assert (launcher.returncode, stderr) == (0, ""), stdout
    assert "planned for" in stdout
    assert "run tiny done: 2 of 2 steps" in stdout
    assert len((tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "runs" / "tiny" / "logs" / "stage-1.log").exists()


@pytest.fixture
def remote_run(over_ssh, tmp_path, start):
    """The process ids of a launcher whose run trains over ssh, and of its workers, which are not its children."""
    write_config(tmp_path, over_ssh(ENDLESS))
    launcher = start("tahq-launch", "cluster.yaml")
    wait_for_steps(launcher, tmp_path / "runs" / "tiny", 1)
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    remote = [pid for pid in pids if is_alive(pid) and "--exit-with-stdin" in command_line(pid)]
    workers = [pid for pid in remote if os.readlink(f"/proc/{pid}/cwd") == str(tmp_path)]
    assert len(workers) == 2
    assert not set(workers) & set(children(launcher.pid))
    return launcher.pid, workers


@needs_sshd
@pytest.mark.acceptance
def test_remote_worker_exits_when_the_launcher_is_killed(remote_run):
    launcher, workers = remote_run
    os.kill(launcher, signal.SIGKILL)
    wait_until_gone(workers, 20)


@needs_sshd
@pytest.mark.acceptance
def test_broken_connection_ends_the_run_and_the_remote_worker(remote_run):
    launcher, workers = remote_run
    connection = next(pid for pid in children(launcher) if "--stage 1 " in " ".join(command_line(pid)))
    os.kill(connection, signal.SIGKILL)
    wait_until_gone([launcher, *workers], 30)


@pytest.fixture
def pulled(over_ssh, tmp_path, start):
    """The folder of a finished run whose stages' files are in homes of their own, below host0 and host1."""
    config = over_ssh(TWO_STAGES)
    for number, host in enumerate(homes := [dict(host) for host in config["hosts"]]):
        host["workdir"] = str(tmp_path / f"host{number}")
        (tmp_path / f"host{number}").mkdir()
    write_config(tmp_path, {**config, "hosts": homes})
    launcher = start("tahq-launch", "cluster.yaml")
    stdout, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, stdout + stderr
    return tmp_path / "runs" / "tiny"


def checkpoint_files(run: Path) -> list[Path]:
    return sorted(run.glob("snapshots/step-00000002/*.safetensors"))


@pytest.mark.acceptance
@needs_sshd
def test_checkpoint_is_exported_from_its_hosts_and_an_interrupted_pull_goes_on(pulled, tmp_path):
    assert checkpoint_files(pulled) == []
    done = finish(tmp_path, "tahq", "export", "runs/tiny", "out")
    assert done.returncode == 0, done.stderr
    assert "after step 2" in done.stdout
    first, second = checkpoint_files(pulled)
    whole = first.read_bytes()
    again = finish(tmp_path, "tahq", "pull", "tiny")
    assert (again.returncode, again.stdout[-10:]) == (0, " all here\n")

    first.with_name(first.name + ".partial").write_bytes(whole[:1000])
    first.unlink()
    (there,) = (tmp_path / "host0").rglob(first.name)
    there.write_bytes(bytes(1000) + whole[1000:])  # so that only the rest can come from there
    second.write_bytes(second.read_bytes()[:-1] + b"x")  # damaged
    done = finish(tmp_path, "tahq", "pull", "tiny")
    assert (done.returncode, done.stderr) == (0, "")
    assert "fetched 2 files" in done.stdout
    assert first.read_bytes() == whole
    assert finish(tmp_path, "tahq", "export", "runs/tiny", "again").returncode == 0


@pytest.mark.acceptance
@needs_sshd
def test_copy_on_another_host_replaces_a_lost_file_and_without_one_host_and_path_are_named(pulled, tmp_path, sshd):
    (kept,) = (tmp_path / "host1").rglob("stage-001-*")
    copy = tmp_path / "host0" / "runs" / "tiny" / "copies" / "stage-001" / "step-00000002" / kept.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    kept.rename(copy)
    assert finish(tmp_path, "tahq", "pull", "runs/tiny").returncode == 0
    for path in (*checkpoint_files(pulled), copy):
        path.unlink()

    refused = finish(tmp_path, "tahq", "export", "runs/tiny", "out")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    where = f"{getpass.getuser()}@127.0.0.1:{kept}: the file is not there"
    assert f"{kept.name} is not here, and cannot be fetched from {where}" in refused.stderr
    assert refused.stderr.endswith("tahq pull runs/tiny\n")

    folder = pulled / "snapshots" / "step-00000002"
    manifest = read_manifest(folder)
    hosts = [{**host, "ssh_options": ["-p", "1", *sshd]} for host in manifest.config["hosts"]]
    changed = {**manifest.meta, "config": {**manifest.config, "hosts": hosts}}
    (folder / "manifest.json").write_text(replace(manifest, meta=changed).to_json())
    for path in checkpoint_files(pulled):
        path.unlink()
    refused = finish(tmp_path, "tahq", "pull", "runs/tiny")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "hosts.0.ssh_options" in refused.stderr
    assert "Connection refused" in refused.stderr


@needs_sshd
def test_every_host_that_is_not_ready_is_named_at_once_with_what_to_do(over_ssh, sshd, tmp_path, start):
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        planned = tiny(pipeline={"stages": 8}, model={"num_layers": 8, "hidden_size": 32})
        config = over_ssh(planned)
        no_key = ["-o", "PreferredAuthentications=password", *sshd]
        changes = [
            {},
            {"python": "/no/such/python"},
            {"workdir": f"{tmp_path}/missing"},
            {"ssh_options": no_key},
            {"ssh_options": ["-p", "1", *sshd]},
            {"env": {"PYTHONPATH": "/no/such/folder", "PYTHONNOUSERSITE": "1"}, "python": "/usr/bin/python3"},
            {"bind": f"127.0.0.1:{port}"},
            {"ssh_options": ["-p", str(port), "-o", "ConnectTimeout=1", *sshd]},  # where nothing answers
        ]
        config["hosts"] = [{**host, **change} for host, change in zip(config["hosts"], changes, strict=True)]
        write_config(tmp_path, config)
        for arguments in ([], ["--dry-run"]):
            launcher = start("tahq-launch", "cluster.yaml", *arguments)
            stdout, stderr = launcher.communicate(timeout=120)
            assert launcher.returncode == 2, stdout
            assert "not ready: 127.0.0.1 (stage 1), 127.0.0.1 (stage 2)," in stderr
            assert ("Peak memory" in stdout) == bool(arguments)
            table = " ".join(stdout.replace("│", " ").split())
            assert "(stage 0)" not in table + stderr
            for part in (
                *("/no/such/python", "hosts.1.python", "mkdir -p", "hosts.2.workdir"),
                *("Permission", "ssh-copy-id", "hosts.3.ssh,", "refused", "hosts.4.ssh_options"),
                *("tahq is not installed", "pip install", "hosts.5.python", "cannot listen on", "hosts.6.bind"),
                *("timed out", "hosts.7.ssh_options"),
            ):
                assert part in table, stdout
    assert not (tmp_path / "runs").exists()


@needs_sshd
def test_addresses_at_which_hosts_do_not_answer_are_named_before_the_start(over_ssh, tmp_path, start):
    write_config(
        tmp_path, over_ssh({**TWO_STAGES, "run": {**TWO_STAGES["run"], "relay": "never"}}, address="127.0.0.9")
    )
    launcher = start("tahq-launch", "cluster.yaml")
    stdout, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 2, stdout
    assert "not ready: 127.0.0.9 (stage 1); nothing was started" in stderr
    assert re.search(r"127\.0\.0\.9:\d+", stdout)
    assert "hosts.0.address" in stdout


@needs_sshd
def test_data_model_and_device_are_looked_for_on_their_host(over_ssh, tmp_path, start):
    write_config(
        tmp_path,
        over_ssh({**TWO_STAGES, "data": {**TWO_STAGES["data"], "text": "here.txt"}}, workdir="/", device="cuda:99"),
    )
    (tmp_path / "here.txt").write_text("The launcher has this text, its hosts look for it in another folder. " * 200)
    launcher = start("tahq-launch", "cluster.yaml")
    stdout, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 2, stdout
    assert "not ready: 127.0.0.1 (stage 0), 127.0.0.1 (stage 1); nothing was started" in stderr
    table = " ".join(stdout.replace("│", " ").split())
    assert "here.txt" in table
    assert "cuda:99 is not" in table


@pytest.mark.acceptance
@needs_sshd
@pytest.mark.netns
@pytest.mark.parametrize("is_this_machine_a_host", [False, True])
def test_coordinator_listens_where_the_hosts_see_this_machine(over_ssh, sshd, tmp_path, is_this_machine_a_host):
    port = sshd[sshd.index("-p") + 1]
    folder = Path(sshd[sshd.index("-i") + 1]).parent
    config = over_ssh(TWO_STAGES, address="192.0.2.7", ssh=f"{getpass.getuser()}@192.0.2.7")
    config["hosts"] = [{key: host[key] for key in host if key != "bind"} for host in config["hosts"]]
    assert "bind" not in config["run"]
    if is_this_machine_a_host:  # its address for the other is the one at which that reaches the coordinator
        (first, _), own = config["hosts"], ("address", "ssh")
        config["hosts"] = [{key: first[key] for key in own}, {"local": True}]
        config["host_defaults"] = {key: first[key] for key in first if key not in own}
    write_config(tmp_path, config)
    script = (
        "ip link set lo up && ip address add 192.0.2.7/32 dev lo || exit 9\n"
        f"{SSHD} -D -e -f {folder}/sshd_config -o ListenAddress=192.0.2.7:{port} 2>{tmp_path}/sshd.log & daemon=$!\n"
        "(while sleep 0.2; do ss -Hltn; done) >ports & ports=$!\n"
        "trap 'kill $daemon $ports' EXIT\n"
        f"{sys.executable} -m tahq_launch.cli launch cluster.yaml"
    )
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "sshd.log").read_text()
    assert "coordinator at 192.0.2.7:7700" in done.stdout
    assert {"7700", "7701", "7702"} <= set(re.findall(r":(\d+) ", (tmp_path / "ports").read_text()))
    assert "run tiny done: 2 of 2 steps" in done.stdout
