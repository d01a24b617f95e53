"""`tahq-netem` for a user who wants a slow network now, and makes mistakes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.capabilities import run_without_network_rights
from support.processes import wait_until
from support.runs import command, environment

from tahq_launch import cli
from tahq_netem.network.description import named_profiles, uniform
from tahq_netem.run_command import HostProgram, listening_sockets

netns = pytest.mark.netns
NAMESPACES = Path("/run/netns")
PROFILE = """\
title: Two desks
source: [measured by us]
host: {up: 50mbit, down: 50mbit, delay: 15ms}
"""


@pytest.fixture
def netem(tmp_path, monkeypatch, capfd):
    """netem("run", ...) runs a command inside this process, in an empty folder: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, program: str = "tahq-netem") -> tuple[int, str, str]:
        programs = {"tahq-netem": cli.netem_main, "tahq": cli.main}
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        status = programs[program]()
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return run


def assert_one_line(outcome: tuple[int, str, str], *parts: str) -> None:
    status, _, stderr = outcome
    assert status == 2, stderr
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("tahq-netem: ")
    for part in parts:
        assert part in stderr


def namespaces_of(pid: int) -> list[str]:
    return [name for name in os.listdir(NAMESPACES) if name.startswith(f"tahq-{pid}")] if NAMESPACES.exists() else []


# -- words ----------------------------------------------------------------------------------------


def test_every_command_has_help_with_an_example_and_is_there_under_tahq_too(netem):
    for name in ("probe", "profiles", "run", "clean", "calibrate", "sweep", "plot"):
        status, stdout, stderr = netem(name, "--help")
        assert (status, stderr) == (0, "")
        assert f"Example: tahq-netem {name}" in stdout
    listed = [shown[1].partition("Commands:")[2] for shown in (netem("netem", "-h", program="tahq"), netem("-h"))]
    assert listed[0].split() == listed[1].split() != []


def test_profiles_are_listed_with_figures_and_sources(netem):
    status, stdout, _ = netem("profiles")
    assert status == 0
    assert all(f"\n{name}:" in stdout for name in named_profiles())
    assert "up: 20mbit, down: 185mbit" in stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["run", "cabel", "--", "true"], ["no profile 'cabel'", "did you mean cable?"]),
        (["run", "nowhere/mine.yaml", "--", "true"], ["nowhere/mine.yaml does not exist"]),
        (["run", "cable", "--backend", "relay", "--", "true"], ["--backend", "kernel", "tun"]),
        (["run", "cable", "--on", "host7", "--", "true"], ["no host 'host7'", "host0, host1"]),
        (["run", "cable", "--", "echo", "{host7}"], ["{host7}", "host0, host1"]),
        (["run", "cable", "--also", "host1", "--", "true"], ["--also host1", "a host and a command"]),
        (["run", "cable", "--also", "host1=echo 'x", "--", "true"], ["No closing quotation"]),
        (["run", "cable", "--also", "host7=true", "--", "true"], ["no host 'host7'", "host0, host1"]),
        (["run", "cable", "--also", "host1=echo {host7}", "--", "true"], ["{host7}", "host0, host1"]),
        (["run", "cable", "--faults", "nowhere.yaml", "--", "true"], ["nowhere.yaml does not exist"]),
        (["run", "cable", "--faults", "step.yaml", "--", "true"], ["steps are not counted here", "`at`"]),
        (["run", "cable", "--faults", "host.yaml", "--", "true"], ["no host 'host7'"]),
        (["run", "./mine.yaml", "--", "true"], ["mine.yaml:3: host.up", "100mbit"]),
        (["sweep", "nowhere.yaml"], ["nowhere.yaml"]),
        (["sweep", "nowhere.yaml", "--limit", "5"], ["--limit", "20ms"]),
        (["plot", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["prob"], ["prob"]),
    ],
)
def test_mistake_is_one_line_that_says_what_would_be_right(netem, tmp_path, arguments, parts):
    (tmp_path / "step.yaml").write_text("- {step: 3, link: host1, what: down}\n")
    (tmp_path / "host.yaml").write_text("- {at: 3s, link: host7, what: down}\n")
    (tmp_path / "mine.yaml").write_text(PROFILE.replace("50mbit", "50", 1))
    assert_one_line(netem(*arguments), *parts)


def test_without_rights_one_line_says_what_to_do_and_probe_what_is_missing():
    done = run_without_network_rights([command("tahq-netem"), "run", "cable", "--", "true"], environment(), timeout=60)
    assert_one_line((done.returncode, done.stdout, done.stderr), "root", "tahq-netem probe")
    done = run_without_network_rights([command("tahq-netem"), "probe"], environment(), timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "namespaces  no: " in done.stdout


# -- networks, in this process --------------------------------------------------------------------


CLIENT = """
import os, socket, sys, time
server = dict(pair.split('=') for pair in os.environ['TAHQ_HOSTS'].split(','))['host1']
assert (server, os.environ['TAHQ_HOST'], os.environ['TAHQ_INTERFACE']) == (sys.argv[1], 'host0', 'eth0')
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try: probe.connect(('192.0.2.1', 9)); sys.exit('a route to the Internet')
except OSError: pass
began = time.monotonic()
try: socket.create_connection((server, 7000), 5)
except ConnectionRefusedError: print(time.monotonic() - began)
"""


@netns
def test_command_reaches_the_other_host_by_its_address_and_nothing_else(netem, tmp_path):
    (tmp_path / "mine.yaml").write_text(PROFILE)
    status, stdout, stderr = netem("run", "mine.yaml", "--", sys.executable, "-c", CLIENT, "{host1}")
    assert status == 0, stderr
    # SYN and RST take 15 ms each.
    assert 0.030 <= float(stdout) < 0.2
    assert stderr.startswith("tahq-netem: host0 is 10.77.0.1, host1 is 10.77.0.2")


@netns
def test_program_beside_is_ready_before_the_command_and_ends_after_it(netem, tmp_path):
    (tmp_path / "page.txt").write_text("over the slow link")
    server = f"host1={sys.executable} -m http.server --bind {{host1}} 8000"
    client = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
    fetch = [sys.executable, "-c", client, "http://{host1}:8000/page.txt"]
    status, stdout, stderr = netem("run", "campus", "--also", server, "--", *fetch)
    assert (status, stdout) == (0, "over the slow link\n"), stderr
    assert "host1 | 10.77.0.1 - - [" in stderr


@netns
def test_command_is_not_started_without_the_programs_beside_it(netem, tmp_path):
    status, _, stderr = netem("run", "campus", "--also", "host1=sh -c 'exit 3'", "--", "touch", "ran")
    assert status == 2
    assert stderr.splitlines()[-1] == "tahq-netem: sh -c 'exit 3' on host1 ended with status 3 at once"
    assert not (tmp_path / "ran").exists()


CONNECT = """
import socket, sys, time
def refused_after():
    began = time.monotonic()
    assert socket.socket().connect_ex((sys.argv[1], 7000)) != 0
    return time.monotonic() - began
deadline = time.monotonic() + 20
while refused_after() < 0.05 and time.monotonic() < deadline: time.sleep(0.05)
sys.exit(refused_after() < 0.05)
"""


@netns
def test_faults_happen_while_the_command_runs(netem, tmp_path):
    (tmp_path / "faults.yaml").write_text("- {at: 200ms, link: host1, what: delay, to: 50ms, for: 60s}\n")
    argv = ["--faults", "faults.yaml", "--", sys.executable, "-c", CONNECT, "{host1}"]
    status, _, stderr = netem("run", "campus", *argv)
    assert status == 0, stderr
    assert re.search(r"\b\d+\.\d\d s: delay of host1 began \(due at 0\.20 s\)\n", stderr)
    assert "delay of host1 undone" in stderr


@netns
@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_exit_status_is_the_commands(netem, script, status):
    assert netem("run", "campus", "--", "sh", "-c", script)[0] == status


@netns
def test_output_of_all_hosts_has_their_names_and_does_not_wait_for_programs_left_in_the_background(netem):
    script = "sleep 999 & echo I am $TAHQ_HOST; exit 4"
    status, stdout, stderr = netem("run", "campus", "--hosts", "3", "--on", "all", "--", "sh", "-c", script)
    assert status == 4, stderr
    assert sorted(stdout.splitlines()) == [f"host{k} | I am host{k}" for k in range(3)]


@netns
def test_calibrate_prints_and_keeps_every_figure(netem, tmp_path):
    (tmp_path / "mine.yaml").write_text(PROFILE)
    status, stdout, stderr = netem("calibrate", "mine.yaml", "--quick", "--output", "figures.json")
    assert status == 0, stdout + stderr
    kept = json.loads((tmp_path / "figures.json").read_text())
    assert kept["is_within"]
    assert len(stdout.splitlines()) == 1 + len(kept["figures"])
    trip = next(figure for figure in kept["figures"] if figure["what"] == "round trip")
    assert abs(trip["measured"] - 0.030) < 0.002 + 1e-3
    status, stdout, _ = netem("calibrate", "mine.yaml", "--quick", "--json")
    assert json.loads(stdout).keys() == kept.keys()


@pytest.mark.acceptance
@netns
def test_nothing_runs_on_a_network_that_is_off(netem, tmp_path):
    # More than a process can carry from one device to another.
    sites = "sites: {a: {up: 30gbit}, b: {up: 50mbit}}"
    (tmp_path / "mine.yaml").write_text(f"title: Too fast\nsource: [us]\n{sites}\n")
    status, _, stderr = netem("run", "mine.yaml", "--calibrate", "figures.json", "--", "touch", "ran")
    assert status == 2
    assert "goodput" in stderr.splitlines()[-1]
    assert not json.loads((tmp_path / "figures.json").read_text())["is_within"]
    assert not (tmp_path / "ran").exists()


# -- networks, in processes of their own ----------------------------------------------------------


@pytest.fixture
def begin():
    """begin(): a `tahq-netem run` whose command has started and sleeps."""
    runs = []

    def start(**options) -> subprocess.Popen:
        argv = [command("tahq-netem"), "run", "campus", "--", "sh", "-c", "echo started; exec sleep 60"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        runs.append(subprocess.Popen(argv, env=environment(), text=True, **pipes, **options))
        assert runs[-1].stdout.readline() == "started\n"
        assert namespaces_of(runs[-1].pid)
        return runs[-1]

    yield start
    for run in runs:
        run.terminate()
        run.communicate(timeout=60)
        wait_until(lambda pid=run.pid: not namespaces_of(pid), 10, "the network goes with its run")


@netns
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_command_and_network(begin, number):
    run = begin(start_new_session=True)
    # As a terminal does at Ctrl-C: to the whole group.
    os.killpg(run.pid, number) if number == signal.SIGINT else run.send_signal(number)
    _, stderr = run.communicate(timeout=45)
    assert run.returncode in (128 + number, -number)
    assert "Traceback" not in stderr
    assert namespaces_of(run.pid) == []


@netns
def test_clean_removes_the_remains_of_a_killed_run_and_nothing_in_use(begin, netem):
    killed, in_use = begin(), begin()
    killed.kill()
    killed.wait(60)
    assert netem("clean")[0] == 0
    assert namespaces_of(killed.pid) == []
    assert namespaces_of(in_use.pid)


# -- programs on a host ---------------------------------------------------------------------------


SERVERS = {
    "tcp": "import socket, time; server = socket.create_server(('', 0)); time.sleep(60)",
    "udp": "import socket, time; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 5000)); time.sleep(60)",
}


@netns
@pytest.mark.parametrize("kind", SERVERS)
def test_each_server_of_a_host_is_awaited_until_it_listens(build, kind):
    host = build("tun", uniform(1))
    for number, script in enumerate((SERVERS["tcp"], SERVERS[kind].replace("time;", "time; time.sleep(0.3);")), 1):
        program = HostProgram(host, "host0", [sys.executable, "-c", script], copied_to=2)
        program.await_listening(timeout_s=60)
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0)
        assert len(listening_sockets(host, "host0")) == number
