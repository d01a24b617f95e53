"""`tahq-netem` as somebody meets it who wants a slow network now, and makes mistakes on the way to it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.capabilities import run_without_network_rights
from support.processes import wait_until
from support.runs import command, environment

from tahq_launch import cli
from tahq_netem.network.profiles import profile_names

NAMESPACES = Path("/run/netns")
PROFILE = """\
title: Two desks
source: [measured by nobody]
host: {up: 50mbit, down: 50mbit, delay: 15ms}
"""


@pytest.fixture
def netem(tmp_path, monkeypatch, capsys):
    """netem("run", ...) runs a command inside this process: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, program: str = "tahq-netem") -> tuple[int, str, str]:
        programs = {"tahq-netem": cli.netem_main, "tahq": cli.main}
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        status = programs[program]()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def assert_one_line(outcome: tuple[int, str, str], *parts: str) -> None:
    status, _, stderr = outcome
    assert status == 2, stderr
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("tahq-netem: ")
    for part in parts:
        assert part in stderr


def tahq_netem(*arguments: str, **options) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own, to its end."""
    argv = [command("tahq-netem"), *arguments]
    return subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=120, **options)


def namespaces_of(pid: int) -> list[str]:
    return [name for name in os.listdir(NAMESPACES) if name.startswith(f"tahq-{pid}")] if NAMESPACES.exists() else []


# -- words ----------------------------------------------------------------------------------------


def test_every_command_has_help_with_an_example(netem):
    for name in ("probe", "profiles", "run", "clean", "calibrate", "sweep", "plot"):
        status, stdout, stderr = netem(name, "--help")
        assert (status, stderr) == (0, "")
        assert f"Example: tahq-netem {name}" in stdout


def test_commands_are_there_under_tahq_too(netem):
    assert netem("netem", "--help", program="tahq")[1].count("\n  ") == netem("--help")[1].count("\n  ")


def test_profiles_are_listed_with_figures_and_sources(netem):
    status, stdout, _ = netem("profiles")
    assert status == 0
    assert all(f"\n{name}: " in f"\n{stdout}" for name in profile_names())
    assert "up 20 Mbit/s, down 185 Mbit/s" in stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["run", "cabel", "--", "true"], ["no profile 'cabel'", "did you mean cable?"]),
        (["run", "nowhere/mine.yaml", "--", "true"], ["nowhere/mine.yaml", "No such file"]),
        (["run", "cable"], ["COMMAND"]),
        (["run", "cable", "--hosts", "1", "--", "true"], ["--hosts"]),
        (["run", "cable", "--backend", "relay", "--", "true"], ["--backend", "kernel", "tun"]),
        (["run", "cable", "--on", "host7", "--", "true"], ["no host 'host7'", "host0, host1"]),
        (["run", "cable", "--", "echo", "{host7}"], ["{host7}", "host0, host1"]),
        (["run", "cable", "--also", "host1", "--", "true"], ["--also host1", "a host and a command"]),
        (["run", "cable", "--also", "host1=", "--", "true"], ["--also host1=", "a host and a command"]),
        (["run", "cable", "--also", "host1=echo 'x", "--", "true"], ["No closing quotation"]),
        (["run", "cable", "--also", "host7=true", "--", "true"], ["no host 'host7'", "host0, host1"]),
        (["run", "cable", "--also", "host1=echo {host7}", "--", "true"], ["{host7}", "host0, host1"]),
        (["run", "cable", "--faults", "nowhere.yaml", "--", "true"], ["nowhere.yaml cannot be read"]),
        (["calibrate", "cabel"], ["did you mean cable?"]),
        (["sweep", "nowhere.yaml"], ["nowhere.yaml"]),
        (["sweep", "nowhere.yaml", "--limit", "5"], ["--limit", "20ms"]),
        (["plot", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["prob"], ["prob"]),
    ],
)
def test_mistake_is_one_line_that_says_what_would_be_right(netem, arguments, parts):
    assert_one_line(netem(*arguments), *parts)


def test_fault_that_cannot_happen_is_told_before_anything_is_built(netem, tmp_path):
    (tmp_path / "faults.yaml").write_text("- {step: 3, link: host1, what: down}\n")
    assert_one_line(
        netem("run", "cable", "--faults", "faults.yaml", "--", "true"), "steps are not counted here", "`at`"
    )
    (tmp_path / "faults.yaml").write_text("- {at: 3s, link: host7, what: down}\n")
    assert_one_line(netem("run", "cable", "--faults", "faults.yaml", "--", "true"), "no host 'host7'")


def test_profile_that_makes_no_sense_is_one_line(netem, tmp_path):
    (tmp_path / "mine.yaml").write_text(PROFILE.replace("50mbit", "50", 1))
    assert_one_line(netem("run", "mine.yaml", "--", "true"), "mine.yaml: host.up", "100mbit")


def test_without_rights_one_line_says_what_to_do(tmp_path):
    for arguments in (
        ["run", "cable", "--", "true"],
        ["run", "cable", "--backend", "tun", "--", "true"],
        ["calibrate", "cable"],
        ["calibrate", "cable", "--backend", "tun"],
    ):
        done = run_without_network_rights([command("tahq-netem"), *arguments], environment(), timeout=60)
        assert_one_line((done.returncode, done.stdout, done.stderr), "root", "tahq-netem probe")


def test_probe_without_rights_says_what_is_missing():
    done = run_without_network_rights([command("tahq-netem"), "probe"], environment(), timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "namespaces  no: " in done.stdout


# -- networks -------------------------------------------------------------------------------------


@pytest.mark.netns
def test_probe_says_of_each_part_whether_it_works(netem):
    status, stdout, stderr = netem("probe")
    assert (status, stderr) == (0, "")
    findings = dict(line.split(maxsplit=1) for line in stdout.splitlines())
    assert findings["namespaces"] == "yes"
    assert findings["htb"] == "yes"
    assert set(findings) >= {"kernel", "root", "veth", "tun", "netem", "tbf", "nfqueue", "TCP"}


@pytest.mark.netns
def test_command_reaches_the_other_host_by_its_address_and_nothing_else(tmp_path):
    (tmp_path / "mine.yaml").write_text(PROFILE)
    client = (
        "import os, socket, subprocess, sys, time\n"
        "server = dict(pair.split('=') for pair in os.environ['TAHQ_HOSTS'].split(','))['host1']\n"
        "assert (server, os.environ['TAHQ_HOST']) == (sys.argv[1], 'host0')\n"
        "probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "try: probe.connect(('192.0.2.1', 9)); sys.exit('there is a way out')\n"
        "except OSError: pass\n"
        "began = time.monotonic()\n"
        "try: socket.create_connection((server, 7000), 5)\n"
        "except ConnectionRefusedError: print(time.monotonic() - began)\n"
    )
    done = tahq_netem("run", "mine.yaml", "--", sys.executable, "-c", client, "{host1}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # SYN and RST take 15 ms each.
    assert 0.030 <= float(done.stdout) < 0.2
    assert done.stderr.startswith("tahq-netem: host0 is 10.77.0.1, host1 is 10.77.0.2")


@pytest.mark.netns
def test_what_runs_beside_is_ready_before_the_command_and_goes_after_it(tmp_path):
    (tmp_path / "page.txt").write_text("over the slow link")
    server = f"host1={sys.executable} -m http.server --bind {{host1}} 8000"
    client = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
    fetch = [sys.executable, "-c", client, "http://{host1}:8000/page.txt"]
    done = tahq_netem("run", "campus", "--also", server, "--", *fetch, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "over the slow link\n"), done.stderr
    assert "host1 | 10.77.0.1 - - [" in done.stderr


@pytest.mark.acceptance
@pytest.mark.netns
def test_each_of_two_servers_on_a_host_is_ready_before_the_command():
    late = "import socket, time; time.sleep({}); server = socket.create_server(('', {})); time.sleep(60)"
    scripts = [late.format(delay_s, port) for delay_s, port in ((0.3, 8001), (0.6, 8002))]
    servers = [("--also", f"host1={shlex.join([sys.executable, '-c', script])}") for script in scripts]
    connect = "import socket, sys; [socket.create_connection((sys.argv[1], port), 5) for port in (8001, 8002)]"
    command_line = [*(word for flags in servers for word in flags), "--", sys.executable, "-c", connect, "{host1}"]
    done = tahq_netem("run", "campus", *command_line)
    assert done.returncode == 0, done.stderr


@pytest.mark.netns
def test_last_words_of_what_runs_beside_are_shown_even_if_they_are_read_late():
    server = (
        "import signal, socket, sys\n"
        "words = '\\n' * 30_000 + 'served nobody'\n"  # with the host's name before each, more than a pipe holds
        "signal.signal(signal.SIGTERM, lambda *_: (print(words, flush=True), sys.exit()))\n"
        "server = socket.create_server(('', 8000))\n"
        "signal.pause()\n"
    )
    beside = ["--also", f"host1={shlex.join([sys.executable, '-c', server])}"]
    argv = [command("tahq-netem"), "run", "campus", *beside, "--", "echo", "done"]
    with subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "done\n"
        wait_until(lambda: not namespaces_of(run.pid), 60, "the network goes")
        time.sleep(0.5)  # for a run that would not wait for its words to be read
        assert run.stderr.read().splitlines()[-1] == "host1 | served nobody"
        assert run.wait(60) == 0


@pytest.mark.netns
def test_command_is_not_started_without_what_has_to_run_beside(tmp_path):
    done = tahq_netem("run", "campus", "--also", "host1=sh -c 'exit 3'", "--", "touch", "ran", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "tahq-netem: sh -c 'exit 3' on host1 ended with status 3 at once"
    assert not (tmp_path / "ran").exists()


@pytest.mark.netns
def test_faults_happen_while_the_command_runs(tmp_path):
    (tmp_path / "faults.yaml").write_text("- {at: 200ms, link: host1, what: delay, to: 50ms, for: 60s}\n")
    connect = (
        "import socket, sys, time\n"
        "def refused_after():\n"
        "    began = time.monotonic()\n"
        "    assert socket.socket().connect_ex((sys.argv[1], 7000)) != 0\n"
        "    return time.monotonic() - began\n"
        "deadline = time.monotonic() + 20\n"
        "while refused_after() < 0.05 and time.monotonic() < deadline: time.sleep(0.05)\n"
        "sys.exit(refused_after() < 0.05)\n"
    )
    flags = ["--faults", "faults.yaml"]
    done = tahq_netem("run", "campus", *flags, "--", sys.executable, "-c", connect, "{host1}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\b\d+\.\d\d s: delay of host1 began \(due at 0\.20 s\)\n", done.stderr)
    assert "delay of host1 undone" in done.stderr


@pytest.mark.netns
@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)])
def test_exit_status_is_the_commands(script, status):
    done = tahq_netem("run", "campus", "--", "sh", "-c", script)
    assert done.returncode == status, done.stderr


@pytest.mark.netns
def test_command_on_all_hosts_is_told_apart_by_name():
    done = tahq_netem("run", "campus", "--hosts", "3", "--on", "all", "--", "sh", "-c", "echo I am $TAHQ_HOST; exit 4")
    assert done.returncode == 4
    assert sorted(done.stdout.splitlines()) == [f"host{k} | I am host{k}" for k in range(3)]


@pytest.mark.netns
def test_what_a_command_leaves_in_the_background_holds_nobody_up():
    done = tahq_netem("run", "campus", "--on", "all", "--", "sh", "-c", "sleep 999 & echo done")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["host0 | done", "host1 | done"]


@pytest.mark.netns
def test_program_that_is_not_there_is_one_line(tmp_path):
    done = tahq_netem("run", "campus", "--", "no-such-program")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "tahq-netem: cannot start no-such-program: No such file or directory"


@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_command_and_network(number, tmp_path):
    argv = [command("tahq-netem"), "run", "campus", "--", "sh", "-c", "echo started; exec sleep 60"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(argv, env=environment(), text=True, start_new_session=True, **pipes)
    try:
        assert process.stdout.readline() == "started\n"
        assert namespaces_of(process.pid)
        # As a terminal does at Ctrl-C: to the whole group.
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, stderr = process.communicate(timeout=45)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode in (128 + number, -number)
    assert "Traceback" not in stderr
    assert namespaces_of(process.pid) == []


@pytest.mark.netns
def test_clean_removes_what_a_killed_run_left_and_nothing_in_use():
    argv = [command("tahq-netem"), "run", "campus", "--", "sh", "-c", "echo started; exec sleep 60"]
    runs = [subprocess.Popen(argv, env=environment(), text=True, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for run in runs:
            assert run.stdout.readline() == "started\n"
        killed, in_use = runs
        assert namespaces_of(killed.pid)
        killed.kill()
        killed.wait(60)
        assert tahq_netem("clean").returncode == 0
        assert namespaces_of(killed.pid) == []
        assert namespaces_of(in_use.pid)
    finally:
        for run in runs:
            run.terminate()
            run.communicate(timeout=60)
    wait_until(lambda: not namespaces_of(in_use.pid), 10, "the network goes with its run")


@pytest.mark.netns
def test_calibrate_prints_and_keeps_every_figure(tmp_path):
    (tmp_path / "mine.yaml").write_text(PROFILE)
    done = tahq_netem("calibrate", "mine.yaml", "--quick", "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "figures.json").read_text())
    assert kept["is_within"]
    assert len(done.stdout.splitlines()) == 1 + len(kept["figures"])
    trip = next(figure for figure in kept["figures"] if figure["what"] == "round trip")
    assert abs(trip["measured"] - 0.030) < 0.002 + 1e-3


@pytest.mark.acceptance
@pytest.mark.netns
def test_nothing_runs_on_a_network_that_is_off(tmp_path):
    # More than a process can carry from one device to another.
    sites = "sites: {a: {up: 30gbit}, b: {up: 50mbit}}"
    (tmp_path / "mine.yaml").write_text(f"title: Too fast\nsource: [nobody]\n{sites}\n")
    flags = ["--calibrate", "figures.json"]
    done = tahq_netem("run", "mine.yaml", *flags, "--", "touch", "ran", cwd=tmp_path)
    assert done.returncode == 2
    assert "goodput" in done.stderr.splitlines()[-1]
    assert not json.loads((tmp_path / "figures.json").read_text())["is_within"]
    assert not (tmp_path / "ran").exists()
