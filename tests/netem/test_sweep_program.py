"""`tahq-netem sweep` on real networks: interrupted, continued, and nothing left behind."""

import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from support.processes import children, wait_until
from support.runs import command, environment

from tahq_netem.backends.namespaces import list_namespaces, owner_pid
from tahq_netem.sweep.results import read_results

SWEEP = """\
name: tiny
model: {family: gpt2, num_layers: 2, hidden_size: 64, num_heads: 2}
seq_len: 64
global_batch: 8
micro_batches: 2
stages: 2
compute: {forward: 20ms, backward: 40ms}
rates: [unshaped, 10mbit]
runtimes: [{name: tahq}]
steps: {settle: 1, at_least: 3, at_most: 3}
max_busy_cores: 64
calibrate: false
"""


@pytest.fixture
def temporary():
    """For the sweep alone, since other tests' sweeps have folders in /tmp, too. A short path: sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="tahq-") as name:
        yield Path(name)


def sweep(folder: Path, temporary: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [command("tahq-netem"), "sweep", "sweep.yaml"],
        cwd=folder,
        env=environment() | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.netns
@pytest.mark.acceptance
def test_sweep_continues_where_sigterm_stopped_it(tmp_path, temporary):
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    results = tmp_path / "tiny.jsonl"
    first = sweep(tmp_path, temporary)
    wait_until(lambda: results.exists() and results.read_text().count("\n") == 1, 120, "the first point")
    processes = children(first.pid)
    assert list(temporary.glob("tahq-sweep-*"))
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=30)
    assert first.returncode == 128 + signal.SIGTERM, output
    assert processes
    assert not any(children(pid) for pid in [first.pid, *processes])
    assert not [name for name in list_namespaces() if owner_pid(name) == first.pid]
    assert not list(temporary.glob("tahq-sweep-*"))

    second = sweep(tmp_path, temporary)
    output, _ = second.communicate(timeout=120)
    assert second.returncode == 0, output
    assert "2 points, 1 to measure" in output
    assert not [name for name in list_namespaces() if owner_pid(name) == second.pid]
    rows = list(read_results(results).values())
    assert [row["point"]["rate_bits_per_s"] for row in rows] == [None, 10e6]
    unshaped, slow = (row["step_s"] for row in rows)
    # 4 micro-batches of 2 · 64 · 64 numbers in fp32 at 10 Mbit/s: 27 ms each way, on top of (1 + 4) · 60 ms
    assert unshaped >= 0.29
    assert slow >= unshaped + 0.04
    assert slow >= rows[1]["bound_s"] * 0.98
    # The stages sleep at the pace that the bound knows.
    assert rows[1]["share_of_bound"] > 0.3


@pytest.mark.netns
@pytest.mark.acceptance
def test_faults_of_a_sweep_happen_at_every_point_and_are_over_for_the_next(tmp_path, temporary):
    text = SWEEP.replace("[{name: tahq}]", '[{name: tahq, wires: ["raw:dtype=fp32", "raw:dtype=fp16"]}]')
    text = text.replace("[unshaped, 10mbit]", "100mbit").replace("3, at_most: 3", "4, at_most: 4")
    (tmp_path / "sweep.yaml").write_text(text + "faults: [{step: 2, link: host0, what: rate, to: 1mbit}]\n")
    process = sweep(tmp_path, temporary)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    rows = list(read_results(tmp_path / "tiny.jsonl").values())
    assert len(rows) == 2
    for row in rows:
        [began, undone] = row["faults"]
        assert (began["change"], began["step"], undone["change"]) == ("began", 2, "undone")
        seconds = [step["seconds"] for step in row["steps"]]
        # 4 micro-batches of 2 · 64 · 64 numbers in two bytes are 0.52 s of 1 Mbit/s each way.
        assert seconds[3] > max(seconds[:2]) + 0.3
