"""A worker of another commit than the coordinator's, in a process of its own."""

import sys
from pathlib import Path

import pytest
from chaos.program import cold, warm
from support.runs import tiny, write_config

from tahq import __version__
from tahq.version import NUMBER, git_revision

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
CONFIG = tiny(pipeline={"stages": 1}, training={"steps": 2}, model={"num_layers": 2, "hidden_size": 32})


def clone_at(commit: str, folder: Path) -> Path:
    """The packages of this clone in a folder whose .git is at another commit."""
    (folder / ".git").mkdir(parents=True)
    (folder / ".git/HEAD").write_text(f"{commit}\n")
    for package in ("tahq", "launch/tahq_launch", "netem/tahq_netem"):
        (folder / Path(package).name).symlink_to(ROOT / package)
    return folder


def test_worker_of_another_commit_is_refused_with_the_remedy_and_the_run_waits_for_another(tmp_path):
    write_config(tmp_path, CONFIG)
    with warm("coordinator", tmp_path, "tahq", "coordinator", "cluster.yaml", "--bind", "127.0.0.1:0") as coordinator:
        argv = ["--stage", "0", "--peer", coordinator.line_with("--peer", 60).split()[-1]]
        odd_source = {"PYTHONPATH": str(clone_at("b2" * 20, tmp_path / "source"))}
        with cold("odd", tmp_path, [sys.executable, "-m", "tahq_launch.cli", "worker", *argv], odd_source) as odd:
            odd.process.wait(60)
        assert odd.status == 2
        assert f"pip install 'git+https://…@{git_revision(__version__)}'" in odd.text
        assert f"version: here {NUMBER}+gb2b2b2b2b, expected {__version__} (coordinator)" in odd.text
        said = coordinator.line_with("another version of tahq", 5)
        assert f"version: {NUMBER}+gb2b2b2b2b, expected {__version__} (coordinator)" in said
        with warm("worker", tmp_path, "tahq-worker", *argv) as worker:
            assert worker.process.wait(60) == 0, worker.text
        assert coordinator.process.wait(60) == 0, coordinator.text
