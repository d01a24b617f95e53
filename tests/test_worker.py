"""A worker's own decisions: its addresses, how fast it fetches copies, and what it says when its memory is full."""

import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.runs import start, tiny, write_config

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import memory_savings, stage_estimate
from tahq.errors import OutOfMemoryError
from tahq.memory.free_memory import _table, free_bytes, is_out_of_memory, peak_bytes
from tahq.worker import main
from tahq.worker.assembly import resolved_spec
from tahq.worker.control import WorkerOptions
from tahq.worker.links import copy_rate_bits_per_s, listening_addresses
from tahq.worker.main import out_of_memory, run_worker, size

HOSTS = [
    {"address": "192.0.2.1"},
    {"address": "198.51.100.2", "bind": "0.0.0.0:7001", "advertise": "203.0.113.9:7002"},
]


def configured(**changes) -> ClusterConfig:
    return ClusterConfig.model_validate({**tiny(pipeline={"stages": 2}), **changes})


def options(**changes) -> WorkerOptions:
    return WorkerOptions(**({"stage": 0, "peer": "127.0.0.1:5555"} | changes))


def test_takeover_on_another_machine_advertises_that_machine(caplog):
    taking = options(replaces_host=True, stage=1)
    assert listening_addresses(taking, configured(hosts=HOSTS), 1) == ("127.0.0.1:0", None)
    assert "does not have the address 198.51.100.2 of hosts.1" in caplog.text
    own = configured(hosts=[HOSTS[0], {"address": "localhost", "bind": "127.0.0.1:7001"}])
    assert listening_addresses(taking, own, 1) == ("127.0.0.1:7001", "localhost:0")


BY_HAND = {"bind": "127.0.0.1:9000", "advertise": "none"}


@pytest.mark.parametrize(
    ("given", "hosts", "stage", "expected"),
    [
        ({}, "local", 0, ("127.0.0.1:0", None)),
        ({}, HOSTS, 0, ("0.0.0.0:7701", "192.0.2.1:0")),
        ({}, HOSTS, 1, ("0.0.0.0:7001", "203.0.113.9:7002")),
        ({"spare": True}, HOSTS, 1, ("127.0.0.1:0", None)),
        (BY_HAND, "local", 1, ("127.0.0.1:9000", "none")),
        (BY_HAND, HOSTS, 1, ("127.0.0.1:9000", "none")),
        ({"spare": True, **BY_HAND}, HOSTS, 1, ("127.0.0.1:9000", "none")),
    ],
)
def test_listening_addresses_follow_the_command_line_then_the_host_entry(given, hosts, stage, expected):
    assert listening_addresses(options(**given), configured(hosts=hosts), stage) == expected


def test_open_port_of_a_listed_host_gives_way_to_a_process_that_holds_it():
    config = configured(hosts=HOSTS)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        following = config.model_copy(update={"run": config.run.model_copy(update={"base_port": port - 1})})
        assert listening_addresses(options(), following, 0)[0] == "0.0.0.0:0"
    assert listening_addresses(options(), following, 0)[0] == f"0.0.0.0:{port}"


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({}, 10e6),
        ({"emulate": {"rate": "300mbit"}}, 15e6),
        ({"emulate": {"rate": "300mbit"}, "links": {"cap_down": "100mbit"}}, 5e6),
        ({"emulate": {"rate": "300mbit"}, "run": {"copy_rate": "2mbit"}}, 2e6),
    ],
)
def test_copies_take_a_small_share_of_what_is_configured(changes, rate):
    assert copy_rate_bits_per_s(configured(**changes), 1) == pytest.approx(rate)


# -- full memory -------------------------------------------------------------------------------------

CPU = torch.device("cpu")
CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB."


def config(hosts="local", **sections) -> ClusterConfig:
    usual = {
        "model": {"vocab_size": 256, "num_layers": 6},
        "training": {"global_batch": 24, "micro_batch": 6},
        "pipeline": {"stages": 2, "layers": [3, 3]},
    }
    values = tiny(**{name: usual.get(name, {}) | sections.get(name, {}) for name in {**usual, **sections}})
    return ClusterConfig.model_validate(values | {"hosts": hosts})


def estimated(made: ClusterConfig, stage: int):
    return stage_estimate(made, resolved_spec(made, None), stage, device="cpu")


@pytest.fixture
def failed() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    return caught.value


def test_failed_allocation_is_recognised_with_its_size(failed):
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert [is_out_of_memory(error) for error in (failed, MemoryError(), other.value)] == [True, True, False]
    assert str(out_of_memory(failed, 2)).startswith(f"stage 2 is out of memory: tried to allocate {size(1 << 50)}; use")
    assert "tried to allocate 2.50 GiB" in str(out_of_memory(torch.OutOfMemoryError(CUDA_TEXT), 2))
    assert "stage 2 is out of memory: MemoryError; use a smaller" in str(out_of_memory(MemoryError(), 2))


def test_message_has_the_needs_of_the_stage_and_the_saving_of_each_change(failed):
    made = config()
    text, memory = str(out_of_memory(failed, 1, made, CPU)), estimated(made, 1)
    assert "\n" not in text
    assert re.search(r", \d+\.\d\d GiB free on cpu; it needs ", text)
    assert f"it needs {size(memory.total)} or more: activations {size(memory.activations)} (1 micro-batch" in text
    rest = f"weights {size(memory.weights)}, gradients {size(memory.gradients)}, optimizer {size(memory.optimizer)}"
    assert rest in text
    saved = memory.total - estimated(config(training={"micro_batch": 3}), 1).total
    assert f"training.micro_batch: 3 ({size(saved)} less)" in text
    assert text.endswith("`tahq-launch --dry-run` shows the estimate of every stage")


def test_full_memory_is_reported_and_ends_the_worker_with_status_4(monkeypatch):
    reported = []
    monkeypatch.setattr(main.Worker, "run", lambda worker: torch.empty(1 << 50))
    monkeypatch.setattr(main.Worker, "report", lambda worker, error: reported.append(error))
    with pytest.raises(OutOfMemoryError) as caught:
        run_worker(options(stage=2))
    assert (reported, caught.value.exit_status) == ([caught.value], 4)


def advised(*, device: str = "cpu", **sections) -> dict[str, int]:
    made = config(**sections)
    saved = dict(memory_savings(made, resolved_spec(made, None), 0, device=device))
    assert list(saved.values()) == sorted(saved.values(), reverse=True)
    assert all(nbytes > 0 for nbytes in saved.values())
    return saved


def test_fp8_activations_are_advised_for_models_that_have_them():
    coat = "memory.activations: coat"
    assert advised(device="cuda", model={"family": "llama"})[coat] > 0
    assert coat not in advised(device="cuda", model={"family": "llama"}, memory={"activations": "coat"})
    assert coat not in advised(device="cuda", model={"family": "gpt2"})
    low_rank = {"optimizer": "qgalore", "precision": "bf16"}
    assert coat not in advised(model={"family": "llama"}, training=low_rank)


def test_changes_that_are_made_already_or_impossible_are_not_advised():
    assert set(advised()) == {
        "training.micro_batch: 3",
        "memory.recompute: norm",
        "memory.recompute: att",
        "memory.recompute: block",
        "memory.activations: agoq",
        "memory.gradients: fp8",
        "pipeline.stages: 3",
        "run.checkpoint_buffers: 0",
        "one layer fewer here, pipeline.layers: [2, 4]",
    }
    small = {"activations": "agoq", "gradients": "fp8", "recompute": "block"}
    waiting = {"checkpoint_buffers": 0}
    pipeline = {"stages": 6, "layers": [1] * 6}
    assert advised(training={"micro_batch": 1}, memory=small, pipeline=pipeline, run=waiting) == {}
    fused = {"optimizer": "qgalore", "precision": "bf16", "micro_batch": 24, "clip_norm": None, "non_finite": "halt"}
    alone = {"stages": 1, "layers": [6]}
    only = advised(
        model={"family": "llama"}, training=fused | {"qgalore": {"fused": True}}, pipeline=alone, run=waiting
    )
    assert set(only) == {
        *(f"memory.recompute: {level}" for level in ("norm", "att", "block")),
        "memory.activations: agoq",
    }
    assert "pipeline.stages: 3" not in advised(hosts=[{"address": "127.0.0.1"}] * 2)


def test_shallower_schedules_and_fewer_checkpoint_buffers_are_advised():
    assert "pipeline.schedule: 1f1b" in advised(pipeline={"schedule": "gpipe"})
    assert "pipeline.in_flight: null" in advised(pipeline={"in_flight": 4})
    memory = estimated(config(), 0)
    for precision in ("fp32", "bf16"):  # no checkpoint has the bf16 copies
        training = {"precision": precision}
        buffers = advised(training=training)["run.checkpoint_buffers: 0"]
        assert buffers == 2 * (memory.weights + memory.optimizer)
    assert "run.checkpoint_buffers: 0" not in advised(run={"checkpoint_every": "never"})


@pytest.mark.parametrize(
    ("available_kb", "limit", "used", "cached", "expected"),
    [
        (1000, None, None, 0, 1000 * 1024),
        (1000, "max", 500, 0, 1000 * 1024),
        (1000, "800000", 500000, 0, 300000),
        (1000, "800000", 500000, 200000, 500000),
        (1000, "400000", 500000, 0, 0),
        (100, "800000", 500000, 0, 100 * 1024),
    ],
)
def test_free_memory_respects_the_tightest_limit(tmp_path, available_kb, limit, used, cached, expected):
    proc, group = tmp_path / "proc", tmp_path / "cgroup" / "user" / "job"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9999 kB\nMemAvailable:   {available_kb} kB\n")
    (proc / "self" / "cgroup").write_text("0::/user/job\n")
    if limit is not None:  # of a group above the process's own
        (group.parent / "memory.max").write_text(f"{limit}\n")
        (group.parent / "memory.current").write_text(f"{used}\n")
        (group.parent / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    assert free_bytes(CPU, proc, tmp_path / "cgroup") == expected


def test_peak_memory_is_the_kernels_high_water_mark_in_bytes():
    assert peak_bytes(CPU) == pytest.approx(_table(Path("/proc/self/status"))["VmHWM"], rel=0.05)


@pytest.mark.acceptance
def test_limit_on_address_space_limits_free_memory():
    """In a separate process, since a limit cannot be raised again."""
    program = (
        "import resource, torch; from tahq.memory.free_memory import _table, _PROC, free_bytes\n"
        "used = _table(_PROC / 'self' / 'status')['VmSize']\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 50 * 2**20, resource.RLIM_INFINITY))\n"
        "print(free_bytes(torch.device('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) <= 50 * 2**20


@pytest.mark.acceptance
def test_worker_whose_memory_is_full_ends_with_status_4_and_figures(tmp_path):
    """The head's logits, 4·T·V = 4 · 4,096 · 50,257 bytes, exceed the memory that is left to stage 1."""
    made = tiny(
        model={"num_layers": 2, "vocab_size": 50257},
        data={"seq_len": 512},
        training={"global_batch": 8, "micro_batch": 8, "steps": 2},
        pipeline={"stages": 2},
        memory={"loss_chunks": 1},
    )
    write_config(tmp_path, made)
    coordinator = start(tmp_path, "tahq", "coordinator", "cluster.yaml", "--bind", "127.0.0.1:0")
    peer = coordinator.stdout.readline().split()[-1]
    workers = [start(tmp_path, "tahq-worker", "--stage", str(stage), "--peer", peer) for stage in range(2)]
    with open(f"/proc/{workers[1].pid}/statm") as file:
        limit = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + 700 * 2**20
    resource.prlimit(workers[1].pid, resource.RLIMIT_AS, (limit, limit))
    ends = [process.communicate(timeout=120) for process in (*workers, coordinator)]
    assert (workers[1].returncode, coordinator.returncode) == (4, 4), ends
    for _, stderr in ends[1:]:
        assert "stage 1 " in stderr
        wanted = r"out of memory: tried to allocate [\d.]+ [GM]iB, [\d.]+ [GM]iB free on cpu"
        assert re.search(wanted, stderr), stderr
        assert f"{4 * 4096 * 50257 / 2**30:.2f} GiB" in stderr
        assert re.search(r"training\.micro_batch: 4 \(\d\.\d\d GiB less\)", stderr)
        assert "Traceback" not in stderr
