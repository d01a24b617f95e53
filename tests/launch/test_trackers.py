"""TensorBoard, Weights & Biases and Prometheus, each by its own library, beside real runs and beside made records."""

import json
import os
import signal
import socket
import sys
import time
import urllib.request
from urllib.error import URLError

import pytest
from support.processes import children, command_line, wait_until
from support.runs import tiny, write_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tahq.config.cluster import ClusterConfig
from tahq.coordinator.observer import LinkRecord, RunEnd, RunHeader, StepRecord
from tahq_launch.trackers import TrackerProcess, figures_of

from .conftest import ENDLESS, TWO_STAGES, assert_one_line


def with_trackers(config: dict, *names: str, **run: object) -> dict:
    return {**config, "run": {**config["run"], "trackers": list(names), **run}}


def record(step: int, loss: float = 1.0, num_links: int = 1) -> StepRecord:
    links = [
        LinkRecord(link, link, link + 1, "activations", 4, 441_000, 442_000, 800_000, 0.1) for link in range(num_links)
    ]
    return StepRecord(step, loss, 1000, 0.5, 1.25, 0.8, False, False, links=links)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def scalars(folder, tag: str) -> dict[int, float]:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


@pytest.mark.ci
def test_every_tracker_has_the_figures_of_a_run(tmp_path, start, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    port = free_port()
    write_config(tmp_path, with_trackers(ENDLESS, "tensorboard", "wandb", "prometheus", prometheus=f"127.0.0.1:{port}"))
    launcher = start("tahq-launch", "cluster.yaml")
    samples: dict[str, float] = {}

    def is_scraped() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
                lines = response.read().decode().splitlines()
        except URLError:
            return False
        samples.update(
            (key, float(value)) for key, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
        )
        return samples.get("tahq_step", 0) >= 2

    wait_until(is_scraped, 120, "Prometheus finds the second step")
    os.kill(launcher.pid, signal.SIGINT)
    stdout, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 130, stdout + stderr
    assert "left out" not in stdout
    folder = tmp_path / "runs" / "tiny"
    rows = {row["step"]: row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    assert scalars(folder, "loss") == pytest.approx({step: row["loss"] for step, row in rows.items()})
    sent = {step: row["links"][0]["wire_bytes"] for step, row in rows.items()}
    assert scalars(folder, "link 0 activations 0-1/wire_bytes") == pytest.approx(sent)
    (kept,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    written = kept.read_bytes()
    assert [step for step, row in rows.items() if repr(row["loss"]).encode() not in written] == []
    assert b"stage 1/forward_s" in written
    step = int(samples["tahq_step"])
    assert (
        samples['tahq_link_payload_bytes{direction="activations",from="0",link="0",to="1"}']
        == (rows[step]["links"][0]["payload_bytes"])
    )
    assert samples["tahq_tokens"] == rows[step]["tokens"]


@pytest.mark.acceptance
def test_trackers_that_fail_are_left_out_with_one_warning_each(tmp_path, start, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # without an account of Weights & Biases
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        write_config(tmp_path, with_trackers(TWO_STAGES, "tensorboard", "wandb", "prometheus", prometheus=address))
        stdout, stderr = (launcher := start("tahq-launch", "cluster.yaml")).communicate(timeout=120)
    assert (launcher.returncode, stderr) == (0, ""), stdout
    assert stdout.count("left out") == 2, stdout
    assert "warning: prometheus is left out: [Errno 98] Address already in use" in stdout
    assert "warning: wandb is left out: No API key configured. Use `wandb login` to log in." in stdout
    assert list(scalars(tmp_path / "runs" / "tiny", "loss")) == [1, 2]


def test_missing_package_is_named_with_the_command_that_installs_it(tahq, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    write_config(tmp_path, with_trackers(TWO_STAGES, "wandb"))
    for arguments in ([], ["--dry-run"]):
        outcome = tahq("tahq-launch", "cluster.yaml", *arguments)
        assert_one_line(
            outcome, 2, "run.trackers: wandb is not installed; install it with: pip install 'tahq[trackers]'"
        )
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def process(tmp_path):
    """process(*trackers): their process, that has begun, the warnings, and the run's folder."""
    (tmp_path / "logs").mkdir()

    def begin(*trackers: str):
        warnings: list[str] = []
        config = ClusterConfig.model_validate(with_trackers(tiny(), *trackers))
        process = TrackerProcess(config, 7, warnings.append)
        process.opened(RunHeader("demo", tmp_path, 2, "127.0.0.1:5555", 0))
        return process, warnings, tmp_path

    return begin


def test_steps_that_are_taken_again_replace_the_first_ones(process):
    trackers, warnings, folder = process("tensorboard")
    for step in range(1, 6):
        trackers.step_committed(record(step, loss=float(step)))
    trackers.turned_back(3)
    trackers.step_committed(record(4, loss=40.0))
    trackers.ended(RunEnd(0, "", 4, 4))
    assert scalars(folder, "loss") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}
    assert warnings == []


def test_process_that_hangs_delays_no_step_and_is_given_up(process):
    trackers, warnings, _ = process("tensorboard")
    (hung,) = (pid for pid in children(os.getpid()) if "tahq_launch.trackers" in command_line(pid))
    os.kill(hung, signal.SIGSTOP)
    slowest_s, step = 0.0, 0
    while not warnings:
        step += 1
        before_s = time.perf_counter()
        trackers.step_committed(record(step, num_links=200))
        slowest_s = max(slowest_s, time.perf_counter() - before_s)
    assert slowest_s < 2.0
    assert warnings == ["the trackers are left out: they are too slow"]
    trackers.step_committed(record(step + 1))
    trackers.ended(RunEnd(0, "", step, step))
    assert len(warnings) == 1


def test_figures_have_the_names_of_metrics_jsonl():
    link = {"link": 3, "from": 1, "to": 2, "direction": "gradients", "frames": 4, "codec": "wf", "relative_error": None}
    stage = {"stage": 1, "waiting_share": 0.5, "wait_s": {"0": 0.25}}
    row = {"step": 9, "loss": None, "skipped": True, "schedule": "1f1b", "links": [link], "stages": [stage]}
    assert {figure.path: figure.value for figure in figures_of(row)} == {
        "skipped": 1.0,
        "link 3 gradients 1-2/frames": 4.0,
        "stage 1/waiting_share": 0.5,
        "stage 1/wait_s/0": 0.25,
    }
    assert next(figures_of({"step": 9, "validation": {"loss": 2.5}})).path == "validation/loss"
    assert next(figures_of({"step": 9, "validations": {"own": {"loss": 2.5}}})).path == "validations/own/loss"
