"""Real runs for tests: cluster.yaml in a temporary folder, tahq's own commands in real processes."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from support.warm_process import WarmProcess
from tahq.pipeline.checkpoint.manifest import latest_folder, read_manifest
from tahq.pipeline.checkpoint.stage_file import SnapshotReader

TINY: dict[str, Any] = {
    "run": {"name": "tiny", "seed": 7, "threads": 1, "peer_timeout": "20s"},
    "model": {"family": "gpt2", "num_layers": 4, "hidden_size": 64, "num_heads": 2},
    "data": {"text": "stdlib", "seq_len": 32},
    "training": {"steps": 4, "global_batch": 8, "micro_batch": 2, "lr": 1e-3, "optimizer": "adamw"},
    "pipeline": {"stages": 4, "schedule": "1f1b", "balance": "counted"},
    "wire": {"activations": "raw:dtype=fp32", "gradients": "raw:dtype=fp32"},
}


def tiny(**sections: dict[str, Any]) -> dict[str, Any]:
    """The tiny configuration with some keys of some sections changed."""
    return {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {**TINY, **sections}}


@dataclass
class Run:
    """A finished command and what it left."""

    folder: Path
    returncode: int
    stdout: str
    stderr: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.metrics]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The model of the newest snapshot, by canonical names."""
        return {name.removeprefix("model/"): t for name, t in self.snapshot().items() if name.startswith("model/")}

    def snapshot(self) -> dict[str, torch.Tensor]:
        folder = latest_folder(self.folder / "snapshots")
        reader = SnapshotReader(folder, read_manifest(folder).sha256)
        return {name: reader.tensor(name) for name in sorted(reader.names())}


def environment() -> dict[str, str]:
    """The tests' environment, one thread a process unless a test's configuration says otherwise."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def command(name: str) -> str:
    """The path of a console script of the environment that runs the tests."""
    return str(Path(sys.executable).with_name(name))


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """cluster.yaml in `folder`."""
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def launch(folder: Path, config: dict[str, Any], *arguments: str, timeout_s: float = 240) -> Run:
    """`tahq-launch cluster.yaml` in `folder`, to its end."""
    done = finish(folder, "tahq-launch", str(write_config(folder, config)), *arguments, timeout_s=timeout_s)
    return Run(folder / "runs" / config["run"]["name"], done.returncode, done.stdout, done.stderr)


def train(folder: Path, config: dict[str, Any], *arguments: str) -> Run:
    """`tahq-launch cluster.yaml` in `folder`, made if need be; the run must succeed."""
    folder.mkdir(exist_ok=True)
    run = launch(folder, config, *arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def overrides(*assignments: str) -> list[str]:
    """`--set` before each of `section.key=value`."""
    return [word for assignment in assignments for word in ("--set", assignment)]


def assert_same_state(run: Run, other: Run) -> None:
    """Both newest checkpoints hold the same tensors, to the bit."""
    ours, theirs = run.snapshot(), other.snapshot()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_same_run(run: Run, other: Run) -> None:
    """The same losses and the same newest checkpoint, to the bit."""
    assert run.losses == other.losses
    assert_same_state(run, other)


def finish(folder: Path, program: str, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """One of tahq's commands in `folder`, to its end."""
    process = start(folder, program, *arguments)
    try:
        stdout, stderr = process.communicate(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def start(folder: Path, program: str, *arguments: str, extra: Mapping[str, str] | None = None) -> WarmProcess:
    """One of tahq's commands in `folder`, with nothing on its stdin; `extra` is added to its environment."""
    return WarmProcess(program, arguments, folder, {**environment(), **(extra or {})})
