"""`tahq ps`, `status`, `logs` and `stop`, beside real runs on this machine."""

import json
import re
import secrets
import signal
from contextlib import closing

import pytest
from support.made_runs import MadeRun, finished_run
from support.runs import finish, tiny, train, write_config

from tahq.comm.control.client import ControlClient
from tahq.comm.control.messages import OWNER, FindFiles, ReadRun, Refuse, StopRequest
from tahq.comm.keys import Credentials, default_key_path, new_key_pair, read_key_file
from tahq.comm.link.shaping import Shaping
from tahq_launch.runs.found import writer_of

from .conftest import ENDLESS, assert_one_line, wait_for_steps


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.fixture
def name():
    """A name that no other run on this machine has."""
    return f"run-{secrets.token_hex(4)}"


@pytest.fixture
def named(tmp_path, start, name):
    """The launcher of an endless run of that name, which has made a step."""
    write_config(tmp_path, {**ENDLESS, "run": {**ENDLESS["run"], "name": name}})
    launcher = start("tahq-launch", "cluster.yaml")
    wait_for_steps(launcher, tmp_path / "runs" / name, 1)
    return launcher


def test_live_run_is_listed_shown_and_stopped_from_any_folder(tmp_path, named, name):
    folder, elsewhere = tmp_path / "runs" / name, tmp_path / "elsewhere"
    elsewhere.mkdir()
    (row,) = (line for line in words(finish(elsewhere, "tahq", "ps").stdout) if line[0] == name)
    assert row[5:] == [str(folder), "training"]
    rows = map(json.loads, finish(tmp_path, "tahq", "ps", "--json").stdout.splitlines())
    (listed,) = (row for row in rows if row["name"] == name)
    assert (listed["folder"], listed["pid"]) == (f"runs/{name}", named.pid)
    assert listed["step"] >= 1
    assert listed["tokens_per_s"] > 0

    shown = finish(elsewhere, "tahq", "status", name).stdout
    assert shown.startswith(f"{name}: training\n")
    assert [line[:2] for line in words(shown) if line[1:2] == ["ok"]] == [["0", "ok"], ["1", "ok"]]
    assert {"0 → 1  activations", "1 → 0  gradients"} <= {line[2:21].strip() for line in shown.splitlines()}
    as_json = json.loads(finish(tmp_path, "tahq", "status", f"runs/{name}", "--json").stdout)
    assert (as_json["state"], [stage["state"] for stage in as_json["stages"]]) == ("training", ["ok", "ok"])
    assert as_json["limit"] in shown or as_json["step"] > listed["step"]

    stopped = finish(elsewhere, "tahq", "stop", name)
    assert stopped.returncode == 0, stopped.stderr
    assert named.wait(30) == 130
    (latest,) = (folder / "snapshots" / "latest").read_text().split()
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert latest == f"step-{last['step']:08d}"
    assert f"(checkpoint after step {last['step']})" in stopped.stdout
    assert name not in finish(tmp_path, "tahq", "ps").stdout
    (row,) = (line for line in words(finish(tmp_path, "tahq", "ps", "--all").stdout) if line[0] == name)
    assert (row[2], row[6:10]) == ("–", ["ended", "with", "status", "130:"])
    again = finish(tmp_path, "tahq", "stop", name)
    assert again.returncode == 2
    assert f"runs/{name} is not running here: ended with status 130" in again.stderr


def test_folder_of_data_with_a_runs_name_is_not_taken_for_the_run(tmp_path, tahq):
    finished_run(tmp_path / "runs" / "books", num_steps=2)
    (tmp_path / "books").mkdir()
    status, shown, _ = tahq("tahq", "status", "books")
    assert (status, shown.startswith("books: ")) == (0, True), shown
    assert_one_line(tahq("tahq", "pull", "books"), 2, "runs/books has no checkpoint yet; a live run writes one when")


def test_run_that_is_stopped_now_writes_no_checkpoint(tmp_path, training):
    stopped = finish(tmp_path, "tahq", "stop", "tiny", "--now")
    assert (stopped.returncode, training.wait(30)) == (0, 143)
    assert "stopped at once by a second SIGTERM" in stopped.stdout
    assert not (tmp_path / "runs" / "tiny" / "snapshots" / "latest").exists()


def test_logs_of_all_stages_are_in_the_order_of_time_and_followed_to_the_end(tmp_path, start):
    write_config(tmp_path, {**ENDLESS, "training": {**ENDLESS["training"], "steps": 40}})
    launcher = start("tahq-launch", "cluster.yaml")
    folder = tmp_path / "runs" / "tiny"
    wait_for_steps(launcher, folder, 1)
    follower = start("tahq", "logs", "-f", "tiny", "--stage", "1")
    first = follower.stdout.readline()
    assert launcher.wait(60) == 0
    out, err = follower.communicate(30)
    assert (follower.returncode, err) == (0, "")
    assert first + out == (folder / "logs" / "stage-1.log").read_text()

    merged = finish(tmp_path, "tahq", "logs", "tiny").stdout.splitlines()
    assert {line.partition("|")[0].strip() for line in merged} == {"launcher", "stage 0", "stage 1"}
    times = [line.partition("| ")[2][:23] for line in merged]
    assert times == sorted(times)
    assert finish(tmp_path, "tahq", "logs", "tiny", "-n", "2").stdout.splitlines() == merged[-2:]
    none = finish(tmp_path, "tahq", "logs", "tiny", "--stage", "7")
    assert (none.returncode, none.stdout) == (2, "")
    assert "has no log of stage 7" in none.stderr


def test_lost_stage_and_degraded_link_are_shown(tmp_path, tahq):
    run = MadeRun(tmp_path / "runs" / "made")
    run.train(1, 3)
    run.tell.stage_left(1)
    run.tell.phase_changed("training", "stage 1")
    _, shown, _ = tahq("tahq", "status", "made")
    assert shown.startswith("made: training: waiting for stage 1\n")
    assert "stage 1 is lost" in shown
    assert ["1", "lost"] in [line[:2] for line in words(shown)]
    run.end()


def test_killed_run_is_not_live_although_its_process_id_is_used_again(tmp_path, tahq):
    run = MadeRun(tmp_path / "runs" / "made")
    assert writer_of(run.folder) is not None
    text = (run.folder / ".lock").read_text()
    run.end()
    (run.folder / ".lock").write_text(text)  # as a killed launcher leaves it; this process has its id
    assert writer_of(run.folder) is None
    assert_one_line(tahq("tahq", "stop", "made"), 2, "runs/made is not running here")


def test_unknown_run_is_refused_with_those_that_there_are(tmp_path, tahq):
    finished_run(tmp_path / "runs" / "first", num_steps=2)
    for command in ("status", "logs", "stop"):
        assert_one_line(tahq("tahq", command, "frist"), 2, "frist is not a run's folder", "there are: first")
    assert_one_line(tahq("tahq", "logs", "first"), 2, "runs/first has no logs")


def test_tokens_per_s_count_prompts_and_padding_and_tokens_the_responses(tmp_path):
    pairs = [{"prompt": "two and two is", "response": "four"}] * 64
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = tiny(pipeline={"stages": 2}, training={"steps": 2}, model={"num_layers": 2, "hidden_size": 32})
    config["data"] = {"jsonl": "pairs.jsonl", "seq_len": 32, "validation": 0}
    for row in train(tmp_path, config).metrics:
        assert (row["tokens"], row["computed_tokens"]) == (8 * len("four\0"), 8 * 32)
        assert row["tokens_per_s"] == pytest.approx(8 * 32 / row["step_time_s"])


@pytest.mark.ci
def test_run_at_an_address_is_shown_and_stopped_by_its_owner_alone(tmp_path, start, name):
    member = new_key_pair()
    run = {**ENDLESS["run"], "name": name}
    write_config(tmp_path, {**ENDLESS, "run": run, "security": {"allow": [member.public]}})
    launcher, folder = start("tahq-launch", "cluster.yaml"), tmp_path / "runs" / name
    wait_for_steps(launcher, folder, 1)
    log = (folder / "logs" / "stage-0.log").read_text()
    address = re.search(r"joined (\S+:\d+),", log)[1]
    shown = finish(tmp_path, "tahq", "status", address)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"{address}: training\n")
    logs = finish(tmp_path, "tahq", "logs", address, "--stage", "0")
    assert logs.stdout.startswith(log.splitlines()[0])

    assert finish(tmp_path, "tahq", "keygen", "--output", "other.secret").returncode == 0
    refused = finish(tmp_path, "tahq", "stop", address, "--key", "other.secret")
    assert refused.returncode == 2
    assert "its key is not" in refused.stderr
    owner = read_key_file(default_key_path()).public
    for request in (ReadRun("metrics.jsonl", 0), FindFiles(0), StopRequest(OWNER, signal.SIGTERM.value)):
        timing = {"shaping": Shaping(), "peer_timeout_s": 10, "heartbeat_s": 2}
        client = ControlClient(address, "member", **timing, credentials=Credentials(member, owner))
        with closing(client):
            client.send(request)
            assert client.recv(20) == Refuse("only a process with the coordinator's own key may read or stop the run")
    assert launcher.poll() is None

    stopped = finish(tmp_path, "tahq", "stop", address)
    assert (stopped.returncode, launcher.wait(30)) == (0, 130), stopped.stderr
    assert stopped.stdout == f"{address}: the run has stopped, and its coordinator has left\n"
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert (folder / "snapshots" / "latest").read_text() == f"step-{last:08d}\n"
