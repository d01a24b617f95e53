"""The dashboard's server over real sockets: who is answered, and what is streamed."""

import http.client
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.made_runs import CHANGE, MadeRun, finished_run
from support.processes import children, command_line, is_alive, listening_ports, wait_until
from support.runs import write_config

from .conftest import ENDLESS, TWO_STAGES, assert_one_line, dashboard_address, wait_for_steps, wait_until_gone


class Client:
    """Requests to one dashboard."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._port, self.query = parts.port, parts.query

    @contextmanager
    def get(self, path: str, **headers: str) -> Iterator[http.client.HTTPResponse]:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)) as connection:
            connection.request("GET", path, headers=headers)
            yield connection.getresponse()

    def status(self, path: str, **headers: str) -> int:
        with self.get(path, **headers) as response:
            return response.status

    def stream(self):
        """The messages, one by one, until the server ends the stream."""
        with self.get(f"/events?{self.query}") as response:
            assert response.getheader("Content-Type").startswith("text/event-stream")
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))


@pytest.fixture
def client(tmp_path, start):
    """client(folder): a client of `tahq dashboard FOLDER`."""

    def begin(folder: Path) -> Client:
        return Client(dashboard_address(start("tahq", "dashboard", str(folder))))

    return begin


@pytest.fixture
def live(tmp_path):
    """A run of two stages that is being trained."""
    run = MadeRun(tmp_path / "live")
    run.train(1, 3)
    yield run
    run.end()


def test_only_requests_with_the_token_to_loopback_are_answered(tmp_path, client):
    dashboard = client(finished_run(tmp_path / "run", num_steps=2))
    for path in ("/", "/events"):
        assert dashboard.status(f"{path}?{dashboard.query}") == 200
        assert dashboard.status(f"{path}?{dashboard.query}", Host="localhost:99") == 200
        assert dashboard.status(f"{path}?{dashboard.query}", Host="rebound.example") == 400
        for query in ("", "?token=", f"?{dashboard.query}x", "?token=%C3%A4"):
            assert dashboard.status(path + query) == 403
    with dashboard.get(f"/?{dashboard.query}") as response:
        page, policy = response.read().decode(), response.getheader("Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; ")
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,", "dashboard.css", "dashboard.js"]
    assert [dashboard.status(f"/dashboard.{kind}") for kind in ("css", "js", "html")] == [200, 200, 404]


def test_server_listens_on_loopback_only(tmp_path, start):
    process = start("tahq", "dashboard", str(finished_run(tmp_path / "run", num_steps=2)))
    port = urlsplit(dashboard_address(process)).port
    assert listening_ports(process.pid) == [port]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [row[1] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"] == [f"0100007F:{port:04X}"]


def test_finished_run_is_sent_whole_and_the_stream_ends(tmp_path, client):
    (message,) = client(finished_run(tmp_path / "run")).stream()
    view = message["view"]
    assert [row[0] for row in message["steps"]] == list(range(1, 61))
    assert [row[0] for row in message["steps"] if row[3] is not None] == [10, 20, 30, 40, 50, 60]
    assert [event["text"] for event in message["events"] if event["event"] == "codec"] == [str(CHANGE)]
    assert (view["name"], view["state"], view["is_over"], view["step"], view["total_steps"]) == (
        *("run", "done", True),
        *(60, 60),
    )
    assert (view["figures"]["speed"], view["figures"]["time per step"]) == ("2,008 tokens/s", "0.5 s")
    assert not view["has_trouble"]
    assert view["limit"].startswith("stage 1's compute is the bottleneck: 60 % of the step")
    assert view["stages"][1]["memory"] == "2 GB of 8 GB"
    assert view["stages"][1]["parts"][:2] == [["forward", 0.2, "20 %"], ["backward", 0.4, "40 %"]]
    assert view["links"][0] == {
        "from": 0,
        "to": 1,
        "carries": "activations",
        "use": 0.3,
        "use_text": "30 %",
        "rate": "17.6 Mbit/s",
        "codec": "wf:bits=4: 4.41 bits per element",
        "state": "closed",
    }


def test_steps_events_and_states_arrive_as_they_are_written(live, client):
    stream = client(live.folder).stream()
    first = next(stream)
    assert ([row[0] for row in first["steps"]], first["view"]["state"]) == ([1, 2, 3], "training")
    live.tell.stage_left(1)
    live.tell.phase_changed("training", "stage 1")
    assert until(stream, "state", "training: waiting for stage 1")["stages"][1]["state"] == "lost"
    live.join(1, pid=50)
    live.tell.phase_changed("training", "")
    view = until(stream, "state", "training")
    assert ([stage["state"] for stage in view["stages"]], view["has_trouble"]) == (["ok", "returning"], True)
    assert {link["state"] for link in view["links"]} == {"stage 1 is returning"}
    live.tell.stage_returned(1, 5.4)
    live.tell.link_changed(0, 0, "nothing is heard")
    assert {link["state"] for link in until(stream, "has_trouble", False)["links"]} == {"degraded: nothing is heard"}
    live.tell.link_changed(0, 0, "")
    live.train(4, 4)
    assert {link["state"] for link in until(stream, "step", 4)["links"]} == {"ok"}


def until(stream, key, value):
    """The first view with this value."""
    return next(message["view"] for message in stream if message["view"][key] == value)


def test_run_that_goes_back_is_sent_anew(live, client):
    stream = client(live.folder).stream()
    assert next(stream)["anew"]
    live.tell.turned_back(1)
    message = next(each for each in stream if each["anew"])
    assert [row[0] for row in message["steps"]] == [1]
    assert message["events"][-1]["text"] == "all stages go back to step 1"


def test_damaged_lines_are_left_out_and_counted(tmp_path, client):
    folder = finished_run(tmp_path / "run")
    for name, damage in (
        ("metrics.jsonl", b'[1]\nnone\n{"step": NaN}\n'),
        ("events.jsonl", b'{"event": []}\n\xff\n{"ti'),
    ):
        path = folder / name
        path.write_bytes(damage + path.read_bytes() + b'{"step": 61')
    (message,) = client(folder).stream()
    assert [row[0] for row in message["steps"]] == list(range(1, 61))
    assert message["view"]["problem"] == "6 damaged lines are left out"


def test_run_whose_launcher_was_killed_is_not_running(live, client):
    (live.folder / ".lock").write_text("1 4194305")  # above any process id
    (message,) = client(live.folder).stream()
    assert message["view"]["state"] == "not running: it was killed; continue it with --resume"
    assert message["view"]["has_trouble"]


@pytest.mark.acceptance
@pytest.mark.serial
def test_server_takes_no_time_while_nobody_watches(live, start):
    process = start("tahq", "dashboard", str(live.folder))
    dashboard = Client(dashboard_address(process))
    stream = dashboard.stream()
    next(stream)
    stream.close()  # a browser that is closed
    time.sleep(1)
    before_s, began_s = cpu_s(process.pid), time.monotonic()
    live.train(4, 20)
    time.sleep(8)
    share = (cpu_s(process.pid) - before_s) / (time.monotonic() - began_s)
    assert share < 0.01


def cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def server_of(launcher: int) -> int:
    """The dashboard's process that a launcher has started."""
    (pid,) = (pid for pid in children(launcher) if "tahq_launch.dashboard.server" in command_line(pid))
    return pid


def test_launched_run_is_shown_to_its_last_step_and_the_server_ends_with_it(tmp_path, start):
    write_config(tmp_path, TWO_STAGES)
    launcher = start("tahq-launch", "cluster.yaml", "--dashboard")
    messages = list(Client(dashboard_address(launcher)).stream())
    assert launcher.wait(60) == 0
    assert [row[0] for message in messages for row in message["steps"]] == [1, 2]
    last = messages[-1]["view"]
    assert (last["state"], [stage["memory"].split()[0] for stage in last["stages"]].count("unknown")) == ("done", 0)
    assert Path(tmp_path / "runs/tiny/logs/dashboard.log").read_text() == ""


@pytest.mark.parametrize("killed", ["server", "launcher"])
def test_server_does_not_hold_up_the_run_and_does_not_outlive_it(tmp_path, start, killed):
    write_config(tmp_path, ENDLESS)
    launcher = start("tahq-launch", "cluster.yaml", "--dashboard")
    dashboard_address(launcher)
    server, metrics = server_of(launcher.pid), tmp_path / "runs/tiny/metrics.jsonl"
    wait_for_steps(launcher, metrics.parent, 1)
    if killed == "launcher":
        launcher.kill()
        wait_until_gone([server])
        return
    os.kill(server, 9)
    wait_until(lambda: not is_alive(server), 10, "the server's end")
    wait_for_steps(launcher, metrics.parent, metrics.read_text().count("\n") + 3)
    launcher.terminate()
    assert launcher.wait(60) == 143


def test_missing_packages_folder_without_a_run_and_taken_port_are_named(tahq, tmp_path, monkeypatch):
    assert_one_line(tahq("tahq", "dashboard", "none"), 2, "none is not a run's folder: it has no metrics.jsonl")
    folder = str(finished_run(tmp_path / "run", num_steps=2))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = tahq("tahq", "dashboard", folder, "--port", str(port))
    assert_one_line(refused, 2, f"cannot listen on 127.0.0.1:{port}: Address already in use")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    write_config(tmp_path, TWO_STAGES)
    for command in (("tahq", "dashboard", folder), ("tahq-launch", "cluster.yaml", "--dashboard")):
        assert_one_line(tahq(*command), 2, "pip install 'tahq[dashboard]'")
