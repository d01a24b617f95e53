"""Whole runs on CUDA: bf16 autocast over fp32 master weights, codecs on device tensors, moves between devices."""

import math
import re
import subprocess

import pytest
import torch
from support.runs import assert_same_run, launch, start, tiny, train, write_config

pytestmark = [pytest.mark.gpu]

LOSSY = {"activations": "tah", "gradients": "fixed:bits=8"}
CONFIG = tiny(
    run={"device": "cuda"},
    wire=LOSSY,
    model={"family": "llama", "overrides": {"initializer_range": 0.06}},
    training={"steps": 20, "lr": 3e-3, "eval_every": 10, "eval_batches": 1},
    pipeline={"stages": 2},
)


def with_training(config: dict, **changes) -> dict:
    return {**config, "training": {**config["training"], **changes}}


def test_a_pipeline_on_cuda_learns_in_bf16(tmp_path):
    run = launch(tmp_path, CONFIG)
    assert run.returncode == 0, run.stderr
    assert run.losses[-1] < 0.75 * run.losses[0]
    validated = [row["validation"] for row in run.metrics if row.get("validation")]
    assert len(validated) == 2
    assert all(math.isfinite(value) for row in validated for value in row.values())
    bits = {row["direction"]: row["bits_per_element"] for row in run.metrics[-1]["links"]}
    assert bits["activations"] == pytest.approx(4.41, abs=0.06)
    assert bits["gradients"] == pytest.approx(8.25, abs=0.05)


def test_fp32_on_cuda_follows_the_cpu(tmp_path):
    """TF32 is off, so only the order of sums differs: 1e-3 of a nat over five steps leaves room for growth."""
    config = with_training(
        {**CONFIG, "wire": {"activations": "raw:dtype=fp32", "gradients": "raw:dtype=fp32"}}, steps=5
    )
    losses = {}
    for device in ("cuda", "cpu"):
        folder = tmp_path / device
        folder.mkdir()
        chosen = with_training({**config, "run": {**config["run"], "device": device}}, precision="fp32")
        run = launch(folder, chosen)
        assert run.returncode == 0, run.stderr
        losses[device] = run.losses
    assert losses["cuda"] == pytest.approx(losses["cpu"], abs=1e-3)


def test_a_run_moves_from_cuda_to_the_cpu(tmp_path):
    assert launch(tmp_path, with_training(CONFIG, steps=10)).returncode == 0
    moved = launch(tmp_path, CONFIG, "--resume", "--set", "training.steps=12", "--set", "run.device=cpu")
    assert moved.returncode == 0, moved.stderr
    assert len(moved.losses) == 12
    assert moved.losses[-1] < moved.losses[0]


OPTIMIZER = ["optimizer"]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


@two_devices
def test_a_worker_uses_no_device_but_its_own(tmp_path):
    """A context on another's GPU costs half a gigabyte there, and seconds in the first step."""
    config = with_training({**CONFIG, "run": {**CONFIG["run"], "device": "auto", "checkpoint_every": 5}}, steps=60)
    used: set[tuple[str, str]] = set()
    run = start(tmp_path, "tahq-launch", str(write_config(tmp_path, config)))
    while run.poll() is None:
        used |= _contexts()
    text = "".join(run.communicate())
    assert run.returncode == 0, text
    workers = re.findall(r"pid (\d+), cuda:", text)
    assert len(workers) == 2, text
    assert sorted(pid for pid, _ in used if pid in workers) == sorted(workers), used


def _contexts() -> set[tuple[str, str]]:
    """The process id and device of every CUDA context on this machine."""
    command = ("nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader")
    rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {(pid, device) for pid, device in (row.split(", ") for row in rows)}


@pytest.mark.parametrize("optimizer", ["adamw", "fp8_adamw"])
@pytest.mark.parametrize("inside", ["zmq", pytest.param("nccl", marks=two_devices)])
def test_shares_of_optimizer_states_give_the_bits_of_whole_ones(tmp_path, inside, optimizer):
    """Over ZMQ both replicas are on one device."""
    config = with_training({**CONFIG, "pipeline": {"stages": 1, "replicas": 2}}, steps=5, optimizer=optimizer)
    config |= {"run": {**CONFIG["run"], "device": "auto" if inside == "nccl" else "cuda"}, "links": {"inside": inside}}
    whole, shared = (
        train(tmp_path / name, {**config, "wire": {"all_reduce": "raw"}, "memory": {"shard": shard}})
        for name, shard in (("whole", []), ("shared", ["optimizer"]))
    )
    assert_same_run(shared, whole)


@pytest.mark.parametrize("memory", [{}, {"recompute": "block", "gradients": "bf16", "offload": ["residual"]}], ids=str)
@pytest.mark.parametrize("inside", ["zmq", pytest.param("nccl", marks=two_devices)])
def test_shared_gradients_and_weights_give_the_bits_of_shared_sums_and_whole_weights(tmp_path, inside, memory):
    """Over ZMQ both replicas are on one device. Sums of gradients have an order of their own, nearly the usual one."""
    config = with_training({**CONFIG, "pipeline": {"stages": 1, "replicas": 2}}, steps=5, micro_batch=1, eval_every=2)
    config |= {"run": {**CONFIG["run"], "device": "auto" if inside == "nccl" else "cuda"}, "links": {"inside": inside}}
    config["training"] |= {"eval_batches": 1}
    optimizer, sums, every = (
        train(tmp_path / str(number), {**config, "wire": {"all_reduce": "raw"}, "memory": {**memory, "shard": shard}})
        for number, shard in enumerate((OPTIMIZER, [*OPTIMIZER, "gradients"], [*OPTIMIZER, "gradients", "weights"]))
    )
    assert_same_run(every, sums)
    assert sums.losses == pytest.approx(optimizer.losses, rel=1e-3)


@two_devices
@pytest.mark.parametrize(
    "pipeline",
    [{"stages": 2}, {"stages": 2, "chunks": 2, "schedule": "interleaved"}, {"stages": 1, "replicas": 2}],
    ids=str,
)
def test_nccl_between_devices_gives_what_zmq_gives_to_the_bit(tmp_path, pipeline):
    config = with_training({**CONFIG, "run": {**CONFIG["run"], "device": "auto"}, "pipeline": pipeline}, steps=5)
    losses = {}
    for inside in ("zmq", "nccl"):
        folder = tmp_path / inside
        folder.mkdir()
        run = launch(folder, {**config, "links": {"inside": inside}})
        assert run.returncode == 0, run.stderr
        losses[inside] = run.losses
    assert losses["nccl"] == losses["zmq"]
